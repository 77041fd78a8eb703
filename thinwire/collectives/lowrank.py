"""PowerSGD (NeurIPS 2019) as a collective: two all-reduces of thin factors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs.lowrank import LowRank as LowRankCodec
from thinwire.codecs.lowrank import matrix_shape, starting_factor
from thinwire.collectives.base import Collective, State, all_reduce, world
from thinwire.errors import UsageError
from thinwire.kernels.random import derive


@dataclass(frozen=True)
class LowRank(Collective):
    """mean ≈ P·Qᵀ of rank r; M is u as (leading dimensions) × (last). 2·r(a+b)(P−1)/P words instead of 2ab(P−1)/P.

    1. P = mean of M_i·Q (Q from the last step, or Gaussian from the group's seed); 2. orthonormalise P (QR, float32);
    3. Q_i = M_iᵀ·P, Q = mean Q_i; 4. mean = P·Qᵀ. own_i = P·Q_iᵀ, whose sum is P times the mean. Zero gradients give
    zeros; vectors, and matrices that would not shrink, go through the exact mean.
    """

    rank: int

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or self.rank < 1:
            raise UsageError(f"rank must be a positive integer, not {self.rank!r}")

    def exchange(
        self, u: Tensor, group: Any = None, *, state: State, key: object = "", step: int = 0, seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        size, _ = world(group)
        shape = tuple(u.shape)
        if not u.numel() or LowRankCodec(self.rank).is_raw(shape):
            return all_reduce(u, group) / size, u
        work = torch.promote_types(u.dtype, torch.float32)
        matrix = u.reshape(matrix_shape(shape)).to(work)
        start = starting_factor(matrix, self.rank, derive("lowrank", seed), state.get("q"))
        left = torch.linalg.qr(all_reduce(matrix @ start, group) / size).Q
        right = matrix.T @ left
        mean_right = all_reduce(right, group) / size
        state["q"] = mean_right
        mean, own = (left @ right.T for right in (mean_right, right))
        return mean.reshape(shape).to(u.dtype), own.reshape(shape).to(u.dtype)
