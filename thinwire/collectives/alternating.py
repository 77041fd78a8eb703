"""Low rank by one factor per exchange, left and right in turn, each through a collective of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from thinwire.codecs.lowrank import gaussian
from thinwire.collectives.base import Collective, State
from thinwire.collectives.dense import Dense, Gather, TwoHop
from thinwire.collectives.groups import Group
from thinwire.collectives.lowrank import LowRank, orthonormal
from thinwire.errors import UsageError
from thinwire.kernels.random import derive
from thinwire.steps import Steps

Shape = tuple[int, ...]


@dataclass(frozen=True)
class AlternatingLowRank(LowRank):
    """mean ≈ F̄·Bᵀ of rank r, where all members know the basis B already: it is what the exchange before brought.

    1. B = orthonormal columns of the last exchange's mean factor (Gaussian at first, and where a column is zero);
    2. F_i = M_i·B through `factors`: (F̄, own F_i); 3. mean = F̄·Bᵀ, own_i = (own F_i)·Bᵀ; 4. the next exchange takes
    Mᵀ for M and F̄ for B. So it is a power iteration over exchanges (ACP-SGD, ICDCS 2023): half of `LowRank`'s bytes and
    messages, of the *mean's* largest directions. What lies outside of B's span is for the memory to keep.

    Σ own = P·mean holds with coded factors too. A factor travels column by column, so that a codec's block holds values
    of one column. Vectors, and matrices that would not shrink, travel beside the factors, coded as they are.

    rank, shapes, shrink: as LowRank's. factors: how a factor is averaged: Dense, Gather or TwoHop.
    """

    factors: Collective = field(default_factory=Dense)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.factors, (Dense, Gather, TwoHop)):
            raise UsageError(f"factors = {self.factors!r}: must be dense, gather or two_hop")

    def sends(self, shapes: Sequence[Shape], turn: int) -> int:
        """Values of a member's message in the exchange of that number, of tensors of these shapes."""
        total = 0
        for shape in shapes:
            rank = self.rank_of(tuple(shape))
            total += rank * (math.prod(shape[1:]) if turn % 2 else shape[0]) if rank else math.prod(shape)
        return total

    def steps(
        self, u: Tensor, group: Group = None, *, state: State, key: object = "", step: int = 0, seed: int = 0
    ) -> Steps[tuple[Tensor, Tensor]]:
        collective = self if self.shapes else self.for_shapes((tuple(u.shape),))
        turn = Turn(collective, u.reshape(1, -1), state)
        message = turn.message[0]
        mean, own = yield from self.factors.steps(message, group, state={}, key=key, step=step, seed=seed)
        turn.keep(mean, state)
        return turn.values(mean[None]).view(u.shape).to(u.dtype), turn.values(own[None]).view(u.shape).to(u.dtype)


class Turn:
    """One exchange's part of the arithmetic, for one member or for several at once.

    collective: with shapes. u: float[members, values]. state: what the exchange before kept.
    """

    def __init__(self, collective: LowRank, u: Tensor, state: State) -> None:
        self.shapes = [(s[0], math.prod(s[1:])) if len(s) > 1 else (1, math.prod(s)) for s in collective.shapes]
        self.numels = [math.prod(shape) for shape in self.shapes]
        if sum(self.numels) != u.shape[1]:
            raise ValueError(f"{u.shape[1]} values arrived for shapes of {sum(self.numels)}: {list(collective.shapes)}")
        self.number = int(state.get("turn", torch.tensor(0)))
        self.ranks = [collective.rank_of(shape) for shape in collective.shapes]
        parts = u.to(torch.promote_types(u.dtype, torch.float32)).split(self.numels, 1)
        alike: dict[tuple[Shape, int], list[int]] = {}
        for i, rank in enumerate(self.ranks):
            if rank:
                alike.setdefault((self.shapes[i], rank), []).append(i)
        self.batches = list(alike.values())
        found = [self._turned(torch.stack([parts[i].unflatten(1, self.shapes[i]) for i in b], 1)) for b in self.batches]
        self.bases = orthonormal([self._basis(b, m, state) for b, m in zip(self.batches, found)])
        pieces = list(parts)
        for batch, matrices, base in zip(self.batches, found, self.bases):
            for i, factor in zip(batch, (matrices @ base).mT.flatten(2).unbind(1)):
                pieces[i] = factor
        self.lengths = [piece.shape[1] for piece in pieces]
        self.message = torch.cat(pieces, 1)  # [members, values to send]

    def values(self, message: Tensor) -> Tensor:
        """[members, values] of what [members, values to send] has become."""
        pieces = list(message.split(self.lengths, 1))
        for batch, base in zip(self.batches, self.bases):
            factors = torch.stack([pieces[i].unflatten(1, (self.ranks[i], -1)) for i in batch], 1)
            matrices = self._turned(factors.mT @ base.mT)
            for i, matrix in zip(batch, matrices.flatten(2).unbind(1)):
                pieces[i] = matrix
        return torch.cat(pieces, 1)

    def keep(self, mean: Tensor, state: State) -> None:
        """What the next exchange begins with. mean: [values to send], the same on all members."""
        for i, piece in enumerate(mean.split(self.lengths)):
            if self.ranks[i]:
                state[f"q{i}"] = piece.view(self.ranks[i], -1).T.contiguous()
        state["turn"] = torch.tensor(self.number + 1)

    def _turned(self, matrices: Tensor) -> Tensor:
        return matrices.mT if self.number % 2 else matrices

    def _basis(self, batch: list[int], matrices: Tensor, state: State) -> Tensor:
        """[batch, columns, rank], not yet orthonormal."""
        shape = (matrices.shape[-1], self.ranks[batch[0]])
        fresh = _gaussian(*shape, matrices.device).to(matrices.dtype)
        kept = [state.get(f"q{i}") for i in batch]
        if any(q is None or q.shape != shape for q in kept):
            return fresh.expand(len(batch), *shape)
        last = torch.stack([q for q in kept if q is not None]).to(matrices)
        norms = torch.linalg.vector_norm(last, dim=-2, keepdim=True)
        return torch.where(norms > 0, last, fresh)


@cache
def _gaussian(columns: int, rank: int, device: torch.device) -> Tensor:
    """What a basis begins with, and what takes the place of columns that are zero."""
    return gaussian(columns * rank, derive("alternating"), device).view(columns, rank)
