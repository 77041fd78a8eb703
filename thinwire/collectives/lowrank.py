"""PowerSGD (NeurIPS 2019) as a collective: two all-reduces of thin factors, for one tensor or many at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from thinwire.codecs.lowrank import LowRank as LowRankCodec
from thinwire.codecs.lowrank import matrix_shape, starting_factor
from thinwire.collectives.base import Collective, State
from thinwire.collectives.groups import Group
from thinwire.collectives.sums import exact_mean_steps
from thinwire.errors import UsageError
from thinwire.kernels.random import derive
from thinwire.steps import Steps


@dataclass(frozen=True)
class LowRank(Collective):
    """mean ≈ P·Qᵀ of rank r; M is u as a × b, first dimension × all others. 2·r(a+b)(P−1)/P words, not 2ab(P−1)/P.

    1. P = mean of M_i·Q (Q from the last step, or Gaussian from the group's seed); 2. orthonormalise P (QR, float32);
    3. Q_i = M_iᵀ·P, Q = mean Q_i; 4. mean = P·Qᵀ. own_i = P·Q_iᵀ, whose sum is P times the mean. Zero gradients give
    zeros; vectors, and matrices that would not shrink, travel as they are beside the left factors.

    With `shapes` u is the flat concatenation of tensors of those shapes, and steps 1 and 3 are one all-reduce each
    for all of them. Every tensor gets what it would get in an exchange of its own with the same seed; the state of
    the i-th is "q<i>".

    rank: columns of P and of Q, at least 1; of a matrix that is smaller than that nothing is lost. shapes: as above;
    empty: u is one tensor of its own shape. shrink: from 1 on: the rank of each matrix is lowered to what makes it at
    least so many times smaller; 0: it is the same for all.
    """

    rank: int
    shapes: tuple[tuple[int, ...], ...] = ()
    shrink: float = 0.0

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 1:
            raise UsageError(f"rank must be a positive integer, not {self.rank!r}")
        if type(self.shrink) not in (int, float) or (self.shrink != 0 and not self.shrink >= 1):
            raise UsageError(f"shrink must be 0, or a number from 1 on, not {self.shrink!r}")

    def rank_of(self, shape: tuple[int, ...]) -> int:
        """The rank of a tensor of that shape, a convolution's as out × rest; 0: it travels as it is."""
        if len(shape) < 2:
            return 0
        rows, columns = shape[0], math.prod(shape[1:])
        rank = self.rank
        if self.shrink and rows + columns:
            rank = min(rank, int(rows * columns / (self.shrink * (rows + columns))))
        return 0 if rank < 1 or LowRankCodec(rank).is_raw((rows, columns)) else rank

    def for_shapes(self, shapes: Sequence[tuple[int, ...]]) -> LowRank:
        return replace(self, shapes=tuple(tuple(shape) for shape in shapes))

    def steps(
        self, u: Tensor, group: Group = None, *, state: State, key: object = "", step: int = 0, seed: int = 0
    ) -> Steps[tuple[Tensor, Tensor]]:
        parts = self._parts(u)
        ranks = [self.rank_of(tuple(part.shape)) for part in parts]
        raw = [i for i, rank in enumerate(ranks) if rank == 0]
        batches = _batches(parts, ranks, u.is_cuda)
        start = derive("lowrank", seed)
        # 1. the mean of the left factors, and of what travels as it is
        first = [batch.matrices @ batch.starts(state, start) for batch in batches]
        whole = yield from _mean([*first, *(parts[i] for i in raw)], group)
        means, own = dict(zip(raw, whole[len(batches) :])), {i: parts[i] for i in raw}
        # 2. and 3. made orthonormal; the mean of the right factors
        lefts = orthonormal(whole[: len(batches)])
        rights = [batch.matrices.mT @ left for batch, left in zip(batches, lefts)]
        mean_rights = (yield from _mean(rights, group)) if batches else []
        # 4. the means, and this member's parts of them
        for batch, left, right, mean_right in zip(batches, lefts, rights, mean_rights):
            state.update(zip(batch.names, mean_right))
            means.update(zip(batch.places, left @ mean_right.mT))
            own.update(zip(batch.places, left @ right.mT))
        return tuple(_flat([of[i] for i in range(len(parts))]).view(u.shape).to(u.dtype) for of in (means, own))  # type: ignore[return-value]

    def _parts(self, u: Tensor) -> list[Tensor]:
        """u cut into tensors of the given shapes, a convolution's as out × rest, in a type that QR takes."""
        shapes = self.shapes or (tuple(u.shape),)
        numels = [math.prod(shape) for shape in shapes]
        if sum(numels) != u.numel():
            raise ValueError(f"{u.numel()} values arrived for shapes of {sum(numels)}: {list(shapes)}")
        flat = u.reshape(-1).to(torch.promote_types(u.dtype, torch.float32))
        matrices = [(shape[0], math.prod(shape[1:])) if len(shape) > 2 else shape for shape in shapes]
        return [part.view(shape) for part, shape in zip(flat.split(numels), matrices)]


@dataclass(frozen=True)
class _Batch:
    """Matrices of one shape and rank. places: which of the parts they are. matrices: [batch, rows, columns]."""

    places: list[int]
    matrices: Tensor
    rank: int

    @property
    def names(self) -> list[str]:
        """Of their right factors in the state."""
        return [f"q{i}" for i in self.places]

    def starts(self, state: State, seed: int) -> Tensor:
        """[batch, columns, rank]: what each begins with."""
        columns = self.matrices.shape[2]
        kept = [state.get(name) for name in self.names]
        if any(factor is None or factor.shape != (columns, self.rank) for factor in kept):
            return torch.stack([starting_factor(m, self.rank, seed, q) for m, q in zip(self.matrices, kept)])
        return starting_factor(self.matrices[0], self.rank, seed, torch.stack([q for q in kept if q is not None]))


def _batches(parts: list[Tensor], ranks: list[int], together: bool) -> list[_Batch]:
    """The parts that have a rank, each alone, or `together` with those of its shape: on a card launches count."""
    shapes = {i: matrix_shape(tuple(parts[i].shape)) for i, rank in enumerate(ranks) if rank}
    alike: dict[tuple[object, ...], list[int]] = {}
    for i, shape in shapes.items():
        alike.setdefault((*shape, ranks[i]) if together else (i,), []).append(i)
    places = alike.values()
    return [_Batch(same, torch.stack([parts[i].view(shapes[i]) for i in same]), ranks[same[0]]) for same in places]


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def _mean(tensors: list[Tensor], group: Group) -> Steps[list[Tensor]]:
    """The mean over the members of every tensor, by one all-reduce."""
    whole = yield from exact_mean_steps(_flat(tensors), group)
    return [part.view(t.shape) for part, t in zip(whole.split([t.numel() for t in tensors]), tensors)]


def orthonormal(factors: list[Tensor]) -> list[Tensor]:
    """Each [batch, rows, rank] with orthonormal columns. On CPUs by QR, those of one shape in one batched call (twice
    as fast as one by one for a dozen)."""
    if factors and factors[0].is_cuda:
        return [by_cholesky(factor) for factor in factors]
    out: dict[int, Tensor] = {}
    by_shape = sorted(range(len(factors)), key=lambda i: tuple(factors[i].shape))
    for _, same in groupby(by_shape, key=lambda i: tuple(factors[i].shape)):
        places = list(same)
        out |= zip(places, torch.linalg.qr(torch.stack([factors[i] for i in places])).Q)
    return [out[i] for i in range(len(factors))]


def by_cholesky(factor: Tensor) -> Tensor:
    """float[batch, rows, rank] → A·L⁻ᵀ with L·Lᵀ = AᵀA: orthonormal columns, zeros where A is zero.

    A card makes QR column by column, hundreds of small kernels; this is a handful. Columns are made equally long first,
    and all is in float64: squaring the condition number then loses nothing that float32 held. What is added to the
    diagonal is less than float32's rounding.
    """
    wide = factor.double()
    wide = wide / torch.linalg.vector_norm(wide, dim=-2, keepdim=True).clamp(min=1e-150)
    gram = wide.mT @ wide
    gram.diagonal(dim1=-2, dim2=-1).add_(1e-14)
    lower = torch.linalg.cholesky_ex(gram).L
    return torch.linalg.solve_triangular(lower.mT, wide, upper=True, left=False).to(factor.dtype)
