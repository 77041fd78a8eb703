"""A learned boundary: of a hidden state of d values only r coordinates cross, in a basis that both ends hold and train.

    sender     z = Aᵀ(x − a(token))             [.., r], which the wire's codec then codes
    receiver   x̂ = A·z + a(token)               A: d × r, orthonormal; a: anchors, optional
    a(token) = Pᵀ·E[token]                       E: vocabulary × k, P: k × d

The gradient on the way back is Aᵀg, of r values too. Both ends' gradients of A add up to the gradient of the boundary
(synchronise.py). After MAPL (arXiv 2606.05484). What lies outside A is lost, the residual stream's part too: such a
boundary is a part of the model, and a model without it computes something else.

With `tables` the receiving stage adds a vector of the token, t[token], of a table of its own: a parameter of the stage,
which the model's optimiser trains and nobody else needs. What of a hidden state is its token's then need not cross, and
a basis that stays as it begins (rate 0) is enough: nothing at all is synchronised.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from thinwire.boundaries.stiefel import orthonormal
from thinwire.errors import UsageError


@dataclass(frozen=True)
class Projected:
    """How boundaries of a pipeline learn. The same on all ranks.

    rank: how many of a hidden state's values cross.
    anchors: k of the factorised token anchors, 0: none. With them every stage is called with `tokens`.
    vocabulary: how many tokens there are, for anchors.
    rate: of the basis, relative to the rate that `Boundaries.step` is given; 0: the basis stays as it begins.
    every: the basis learns in every so many-th step, from that step's gradient; in the others nothing is exchanged.
    seed: of the first basis, which is the same at all boundaries, so that the residual stream passes from the start.
    tables: has every receiving stage a table of its own, with a vector per token? Stages are then called with `tokens`.
    """

    rank: int
    anchors: int = 0
    vocabulary: int = 0
    rate: float = 0.1
    every: int = 1
    seed: int = 0
    tables: bool = False

    def __post_init__(self) -> None:
        for name, least in (("rank", 1), ("anchors", 0), ("vocabulary", 0), ("every", 1), ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UsageError(f"Projected: {name} = {value!r}: must be an integer, {least} or more")
        if isinstance(self.rate, bool) or not isinstance(self.rate, (int, float)) or not self.rate >= 0:
            raise UsageError(f"Projected: rate = {self.rate!r}: must be a number, 0 or more")
        if not isinstance(self.tables, bool):
            raise UsageError(f"Projected: tables = {self.tables!r}: must be true or false")
        for name in ("anchors", "tables"):
            if getattr(self, name) and not self.vocabulary:
                raise UsageError(f"Projected: {name} = {getattr(self, name)}: needs vocabulary, the number of tokens")

    @property
    def learns(self) -> bool:
        """Is anything of a boundary trained?"""
        return self.rate > 0 or self.anchors > 0

    def around(
        self, module: nn.Module, stage: int, stages: int, width: int, *, inside: Collection[int] = (),
        device: torch.device | str = "cpu",
    ) -> BoundedStage:  # fmt: skip
        """A stage's module between its boundaries, for CompressedStage.

        module: takes and returns one tensor [.., width], but for the first stage's input and the last one's output.
        stage, stages: which of how many. width: of the hidden states.
        inside: boundaries between two stages of one rank (s: between s and s + 1), which stay as they are.
        device: where the boundaries' parameters are. With `tables`, see BoundedStage.fill_table.
        """
        if self.rank > width:
            raise UsageError(f"Projected: rank = {self.rank}: hidden states have {width} values")
        into = Subspace(self, width) if stage > 0 and stage - 1 not in inside else None
        out = Subspace(self, width) if stage < stages - 1 and stage not in inside else None
        table = nn.Parameter(torch.zeros(self.vocabulary, width)) if self.tables and into is not None else None
        return BoundedStage(module, into, out, table).to(device)


class Subspace(nn.Module):
    """One end of a boundary: the basis A [width, rank], and the anchors' factors, if any.

    config: the boundary's. width: of the hidden states.
    """

    def __init__(self, config: Projected, width: int) -> None:
        super().__init__()
        self.config = config
        self.basis = nn.Parameter(orthonormal(width, config.rank, config.seed))
        self.tokens: nn.Parameter | None = None
        self.lift: nn.Parameter | None = None
        if config.anchors:
            generator = torch.Generator().manual_seed(config.seed)
            self.tokens = nn.Parameter(torch.randn(config.vocabulary, config.anchors, generator=generator))
            self.lift = nn.Parameter(torch.zeros(config.anchors, width))  # so that anchors begin as zero

    def project(self, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Coordinates [.., rank] of hidden states [.., width]; tokens [..]: their ids, needed with anchors."""
        anchor = self._anchor(tokens, x.dtype)
        return functional.linear(x if anchor is None else x - anchor, self.basis.to(x.dtype).T)

    def expand(self, z: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Hidden states [.., width] of coordinates [.., rank]; tokens as above."""
        x = functional.linear(z, self.basis.to(z.dtype))
        anchor = self._anchor(tokens, z.dtype)
        return x if anchor is None else x + anchor

    def _anchor(self, tokens: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        if self.tokens is None or self.lift is None:
            return None
        if tokens is None:
            raise UsageError("a boundary with anchors needs schedule.step(…, tokens=ids) on every rank")
        return functional.embedding(tokens, self.tokens.to(dtype)) @ self.lift.to(dtype)


class BoundedStage(nn.Module):
    """A stage's module between the ends of its two boundaries; None: there is none on that side.

    Its own parameters are `module`'s and the table (`trained`): those of the boundaries belong to `Boundaries`, and to
    no optimiser.
    `opening`: None while coordinates cross. A number: hidden states cross whole, and the receiver keeps that share of
    what lies outside its basis: 0 is what was learnt, 1 a stage without boundaries. The same on all stages.
    """

    takes_tokens = True

    def __init__(
        self, module: nn.Module, into: Subspace | None, out: Subspace | None, table: nn.Parameter | None = None
    ) -> None:
        super().__init__()
        self.module = module
        self.into = into
        self.out = out
        self.table = table
        self.opening: float | None = None

    def trained(self) -> list[nn.Parameter]:
        """The parameters for the model's optimiser."""
        return [*self.module.parameters(), *(() if self.table is None else (self.table,))]

    @torch.no_grad()
    def fill_table(self, embedding: Tensor) -> None:
        """Let the table begin as what of each token's first hidden state, [vocabulary, width], lies outside the basis:
        then the model begins as it would without boundaries, where blocks begin as nothing."""
        if self.table is None or self.into is None:
            return
        if embedding.shape != self.table.shape:
            shapes = f"{tuple(embedding.shape)}, and the table is {tuple(self.table.shape)}"
            raise UsageError(f"fill_table: the embedding is {shapes}")
        basis = self.into.basis
        rows = embedding.to(basis)
        self.table.copy_(rows - rows @ basis @ basis.T)

    def forward(self, x: Tensor, *, tokens: Tensor | None = None, **more: Any) -> Tensor:
        """tokens: ids of the micro-batch, for anchors; more: `module`'s own keywords."""
        hidden = self.module(self._enter(x, tokens), **more)
        if self.out is None or self.opening is not None:
            return hidden
        if not isinstance(hidden, Tensor):
            raise UsageError(f"a learned boundary takes stages that return one tensor, not {type(hidden).__name__}")
        return self.out.project(hidden, tokens)

    def _enter(self, x: Tensor, tokens: Tensor | None) -> Tensor:
        """What `module` is given of what arrived."""
        if self.into is None:
            return x
        passed = self.into.expand(x if self.opening is None else self.into.project(x, tokens), tokens)
        if self.table is not None:
            if tokens is None:
                raise UsageError("a boundary with tables needs schedule.step(…, tokens=ids) on every rank")
            passed = passed + functional.embedding(tokens, self.table).to(passed.dtype)
        return passed if self.opening is None else passed + self.opening * (x - passed)
