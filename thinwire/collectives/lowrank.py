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
        raw = [rank == 0 for rank in ranks]
        thin = [i for i, whole in enumerate(raw) if not whole]
        matrices = {i: parts[i].reshape(matrix_shape(tuple(parts[i].shape))) for i in thin}
        start = derive("lowrank", seed)
        starts = {i: starting_factor(m, ranks[i], start, state.get(f"q{i}")) for i, m in matrices.items()}
        first = [part if whole else matrices[i] @ starts[i] for i, (part, whole) in enumerate(zip(parts, raw))]
        means = yield from _mean(first, group)
        lefts = _orthonormal({i: means[i] for i in thin})
        rights = {i: matrices[i].T @ lefts[i] for i in thin}
        mean_rights = dict(zip(thin, (yield from _mean(list(rights.values()), group)))) if thin else {}
        state.update({f"q{i}": right for i, right in mean_rights.items()})
        mean = [part if whole else lefts[i] @ mean_rights[i].T for i, (part, whole) in enumerate(zip(means, raw))]
        own = [part if whole else lefts[i] @ rights[i].T for i, (part, whole) in enumerate(zip(parts, raw))]
        return _flat(mean).view(u.shape).to(u.dtype), _flat(own).view(u.shape).to(u.dtype)

    def _parts(self, u: Tensor) -> list[Tensor]:
        """u cut into tensors of the given shapes, a convolution's as out × rest, in a type that QR takes."""
        shapes = self.shapes or (tuple(u.shape),)
        numels = [math.prod(shape) for shape in shapes]
        if sum(numels) != u.numel():
            raise ValueError(f"{u.numel()} values arrived for shapes of {sum(numels)}: {list(shapes)}")
        flat = u.reshape(-1).to(torch.promote_types(u.dtype, torch.float32))
        matrices = [(shape[0], math.prod(shape[1:])) if len(shape) > 2 else shape for shape in shapes]
        return [part.view(shape) for part, shape in zip(flat.split(numels), matrices)]


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def _mean(tensors: list[Tensor], group: Group) -> Steps[list[Tensor]]:
    """The mean over the members of every tensor, by one all-reduce."""
    whole = yield from exact_mean_steps(_flat(tensors), group)
    return [part.view(t.shape) for part, t in zip(whole.split([t.numel() for t in tensors]), tensors)]


def _orthonormal(factors: dict[int, Tensor]) -> dict[int, Tensor]:
    """QR of every factor, those of one shape in one batched call (twice as fast as one by one for a dozen)."""
    out: dict[int, Tensor] = {}
    by_shape = sorted(factors, key=lambda i: tuple(factors[i].shape))
    for _, same in groupby(by_shape, key=lambda i: tuple(factors[i].shape)):
        places = list(same)
        out |= zip(places, torch.linalg.qr(torch.stack([factors[i] for i in places])).Q)
    return out
