"""Codecs without a grid of their own: the bytes as they are, or in a narrower floating type."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, from_raw, is_finite, raw_bytes
from thinwire.errors import UsageError

CASTS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Identity(Codec):
    """C(x) = x: the bytes as they are."""

    span = 1
    never_syncs = True

    def _encode(self, x: Tensor, seed: int) -> Tensor:
        return raw_bytes(x)

    def _decode(self, wire: Tensor, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
        return from_raw(wire, dtype)

    def _nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return math.prod(shape) * dtype.itemsize

    def omega(self, numel: int) -> float | None:
        return 0.0

    def delta(self, numel: int) -> float | None:
        return 1.0

    def rows(self, x: Tensor, seeds: object) -> Tensor:
        return x.clone()


@dataclass(frozen=True)
class Cast(Codec):
    """Round to a narrower float; a value beyond its range is an error, not Inf.

    to: "fp16", "bf16" or "fp8" (e4m3).
    """

    to: str

    def __post_init__(self) -> None:
        if self.to not in CASTS:
            raise UsageError(f"Cast to {self.to!r} is unknown: one of {', '.join(CASTS)}")

    span = 1
    never_syncs = True

    @property
    def dtype(self) -> torch.dtype:
        """What values become."""
        return CASTS[self.to]

    @property
    def adds(self) -> bool:
        """Can torch and its backends add values of that type?"""
        return self.dtype.itemsize > 1

    def encode_flagged(self, x: Tensor, seed: int = 0, into: Tensor | None = None) -> tuple[Tensor, Tensor]:
        wire, finite = super().encode_flagged(x, seed, into)
        return wire, finite & is_finite(from_raw(wire, CASTS[self.to]))

    def _encode(self, x: Tensor, seed: int) -> Tensor:
        return raw_bytes(x.to(CASTS[self.to]))

    def _decode(self, wire: Tensor, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
        return from_raw(wire, CASTS[self.to]).to(dtype)

    def _nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return math.prod(shape) * CASTS[self.to].itemsize
