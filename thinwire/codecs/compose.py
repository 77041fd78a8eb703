"""Codecs made of codecs: after a rotation, with an error of mean zero, a biased one repaired by an unbiased one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, from_raw, raw_bytes, work_dtype
from thinwire.codecs.lowrank import matrix_shape
from thinwire.errors import UsageError
from thinwire.kernels import hadamard
from thinwire.kernels.random import derive


@dataclass(frozen=True)
class Rotated(Codec):
    """inner(R·x), R a random Hadamard rotation of blocks: outliers are spread before they are quantised.

    R is an isometry of exactly n values, so ω and δ are those of the inner codec. inner: the codec of the rotated
    values. block: values rotated together, a power of two from 8.
    """

    inner: Codec
    block: int = 128

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Codec):
            raise UsageError(f"Rotated wants a codec, not {self.inner!r}")
        if not isinstance(self.block, int) or self.block < 8 or self.block & (self.block - 1):
            raise UsageError(f"block must be a power of two, at least 8, not {self.block!r}")

    @property
    def span(self) -> int | None:
        return None if self.inner.span is None else math.lcm(self.block, self.inner.span)

    @property
    def never_syncs(self) -> bool:
        return self.inner.never_syncs

    def encode_flagged(self, x: Tensor, seed: int = 0, into: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """What is not finite makes its block so, and the inner codec sees it; and it sees a rotation that overflows."""
        if not x.numel():
            return super().encode_flagged(x, seed, into)
        rotated = hadamard.rotate(x.to(work_dtype(x.dtype)).contiguous().view(-1), self.block, derive("rotate", seed))
        return self.inner.encode_flagged(rotated, seed, into)

    def _decode(self, wire: Tensor, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
        rotated = self.inner.decode(wire, (math.prod(shape),), _rotated_dtype(dtype), seed)
        limit = torch.finfo(dtype).max
        return hadamard.rotate(rotated, self.block, derive("rotate", seed), inverse=True).clamp(-limit, limit)

    def _nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return self.inner.nbytes((math.prod(shape),), _rotated_dtype(dtype))

    def omega(self, numel: int) -> float | None:
        return self.inner.omega(numel)

    def delta(self, numel: int) -> float | None:
        return self.inner.delta(numel)


@dataclass(frozen=True)
class Centered(Codec):
    """C(x) and the mean over tokens of what it left out: y = C(x) + 1·m, m = mean of the rows of x − C(x).

    x is taken as (all leading dimensions) × (last). The error of every column then has mean zero, so it does not meet
    what the activations of all tokens have in common (docs/pipeline.md). m travels in bf16, two bytes per column; a
    single row has no mean to send. ‖x − y‖ ≤ ‖x − C(x)‖: δ is the inner codec's. inner: the codec C.
    """

    inner: Codec

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Codec):
            raise UsageError(f"Centered wants a codec, not {self.inner!r}")

    @property
    def never_syncs(self) -> bool:
        return self.inner.never_syncs

    @property
    def warm_starts(self) -> bool:
        return self.inner.warm_starts

    def encode(self, x: Tensor, seed: int = 0, prev: Tensor | None = None) -> Tensor:
        if prev is None or not x.numel():
            return super().encode(x, seed)
        return self._with_mean(x.to(work_dtype(x.dtype)), self.inner.encode(x, seed, prev), seed)

    def right_factor(self, wire: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        return self.inner.right_factor(wire[: self.inner.nbytes(shape, dtype)], shape, dtype)

    def _encode(self, x: Tensor, seed: int) -> Tensor:
        return self._with_mean(x, self.inner.encode_flagged(x, seed)[0], seed)

    def _with_mean(self, x: Tensor, wire: Tensor, seed: int) -> Tensor:
        rows, columns = matrix_shape(tuple(x.shape))
        if rows < 2:
            return wire
        work = torch.promote_types(x.dtype, torch.float32)
        left = x.to(work) - self.inner.decode(wire, x.shape, x.dtype, seed).to(work)
        limit = torch.finfo(torch.bfloat16).max
        mean = left.reshape(rows, columns).mean(dim=0).clamp(-limit, limit).to(torch.bfloat16)
        return torch.cat((wire, raw_bytes(mean)))

    def _decode(self, wire: Tensor, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
        cut = self.inner.nbytes(shape, dtype)
        y = self.inner.decode(wire[:cut], shape, dtype, seed)
        if cut == wire.numel():
            return y
        work, limit = torch.promote_types(dtype, torch.float32), torch.finfo(dtype).max
        return (y.to(work) + from_raw(wire[cut:], torch.bfloat16).to(work)).clamp(-limit, limit)

    def _nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        rows, columns = matrix_shape(shape)
        return self.inner.nbytes(shape, dtype) + (2 * columns if rows > 1 else 0)

    def delta(self, numel: int) -> float | None:
        return self.inner.delta(numel)


@dataclass(frozen=True)
class Induced(Codec):
    """C(x) + Q(x − C(x)), both in one message: unbiased, ω = ω_Q·(1 − δ_C) (induced compressor, ICLR 2021).

    biased: C, with a δ. unbiased: Q, with an ω.
    """

    biased: Codec
    unbiased: Codec

    def __post_init__(self) -> None:
        for part in (self.biased, self.unbiased):
            if not isinstance(part, Codec):
                raise UsageError(f"Induced wants two codecs, not {part!r}")

    def _encode(self, x: Tensor, seed: int) -> Tensor:
        first = self.biased.encode(x, derive("biased", seed))
        rest = x - self.biased.decode(first, x.shape, x.dtype, derive("biased", seed))
        return torch.cat((first, self.unbiased.encode(rest, derive("unbiased", seed))))

    def _decode(self, wire: Tensor, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
        cut = self.biased.nbytes(shape, dtype)
        first = self.biased.decode(wire[:cut], shape, dtype, derive("biased", seed))
        return first + self.unbiased.decode(wire[cut:], shape, dtype, derive("unbiased", seed))

    def _nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return self.biased.nbytes(shape, dtype) + self.unbiased.nbytes(shape, dtype)

    def omega(self, numel: int) -> float | None:
        omega, delta = self.unbiased.omega(numel), self.biased.delta(numel)
        return None if omega is None or delta is None else omega * (1 - delta)

    def rows(self, x: Tensor, seeds: Sequence[int] | Tensor) -> Tensor:
        first = self.biased.rows(x, [derive("biased", int(s)) for s in seeds])
        return first + self.unbiased.rows(x - first, [derive("unbiased", int(s)) for s in seeds])


def _rotated_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
