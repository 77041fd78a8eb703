"""Rank-r approximation by one power step (PowerSGD, NeurIPS 2019), as a stateless codec.

    M = x as (all leading dimensions) × (last);   P = orth(M·Q₀);   Q = Mᵀ·P;   message = P, Q;   decoded = P·Qᵀ

Q₀ is the right factor of the key's last message (`prev`, kept by the channel) or Gaussian from the seed. Since P is
orthonormal, the error is M minus its projection: never longer than M, but without a worst-case δ. Vectors, and
matrices that would not shrink, are sent as they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, describe_nonfinite, from_raw, is_finite, raw_bytes, work_dtype
from thinwire.errors import UsageError
from thinwire.kernels.random import uniform


@dataclass(frozen=True)
class LowRank(Codec):
    """M ≈ P·Qᵀ, both factors in the message: rank·(rows + columns) values instead of rows·columns.

    rank: columns of P and of Q, at least 1.
    """

    rank: int

    warm_starts = True

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 1:
            raise UsageError(f"rank must be a positive integer, not {self.rank!r}")

    def encode(self, x: Tensor, seed: int = 0, prev: Tensor | None = None) -> Tensor:
        """As Codec.encode; `prev` float[last dimension, rank] warm-starts the power step."""
        if not bool(is_finite(x)):
            raise ValueError(f"cannot encode a {tuple(x.shape)} tensor: {describe_nonfinite(x)}")
        if not x.numel():
            return torch.empty(0, dtype=torch.uint8, device=x.device)
        return self._encode(x.to(work_dtype(x.dtype)).contiguous(), seed, prev)

    def right_factor(self, wire: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Q cut from a message: the next `prev`. None where the tensor travels raw."""
        if self.is_raw(shape):
            return None
        rows, columns = matrix_shape(shape)
        return from_raw(wire, work_dtype(dtype))[rows * self.rank :].view(columns, self.rank)

    def is_raw(self, shape: tuple[int, ...]) -> bool:
        """Does a tensor of that shape travel as it is, because two factors would be no smaller?"""
        rows, columns = matrix_shape(shape)
        return self.rank * (rows + columns) >= rows * columns

    def _encode(self, x: Tensor, seed: int, prev: Tensor | None = None) -> Tensor:
        if self.is_raw(tuple(x.shape)):
            return raw_bytes(x)
        work = torch.promote_types(x.dtype, torch.float32)
        matrix = x.reshape(matrix_shape(tuple(x.shape))).to(work)
        left = torch.linalg.qr(matrix @ starting_factor(matrix, self.rank, seed, prev)).Q
        right = matrix.T @ left
        return raw_bytes(torch.cat((left.reshape(-1), right.reshape(-1))).to(x.dtype))

    def _decode(self, wire: Tensor, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
        values = from_raw(wire, dtype)
        if self.is_raw(shape):
            return values
        rows, columns = matrix_shape(shape)
        work = torch.promote_types(dtype, torch.float32)
        left, right = values.to(work).split((rows * self.rank, columns * self.rank))
        return left.view(rows, self.rank) @ right.view(columns, self.rank).T

    def _nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        rows, columns = matrix_shape(shape)
        return (rows * columns if self.is_raw(shape) else self.rank * (rows + columns)) * dtype.itemsize


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """(product of the leading dimensions, the last); a vector is one row, which travels raw."""
    if not shape:
        return 1, 1
    return math.prod(shape[:-1]), shape[-1]


def starting_factor(matrix: Tensor, rank: int, seed: int, prev: Tensor | None) -> Tensor:
    """Q₀ [columns, rank]: prev with unit columns; columns that vanished (zero gradients) are drawn afresh. prev
    may also be [batch, columns, rank], of as many matrices."""
    columns = matrix.shape[1]
    fresh = gaussian(columns * rank, seed, matrix.device).to(matrix.dtype).view(columns, rank)
    if prev is None or prev.shape[-2:] != fresh.shape:
        return fresh
    prev = prev.to(matrix)  # one from a checkpoint is in host memory
    norm = torch.linalg.vector_norm(prev, dim=-2, keepdim=True)
    return torch.where(norm > 0, prev / torch.where(norm > 0, norm, 1.0), fresh)


def gaussian(n: int, seed: int, device: torch.device | str) -> Tensor:
    """float32[n], normal by Box–Muller from the counter-based generator."""
    pair = uniform(2 * n, seed, device).view(2, n)
    return torch.sqrt(-2 * torch.log1p(-pair[0])) * torch.cos(2 * math.pi * pair[1])
