"""Block-scaled codecs with fused kernels: 2–8 bits, and one bit."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, work_dtype
from thinwire.errors import UsageError
from thinwire.kernels import delta as delta_kernel
from thinwire.kernels import quantize as kernel
from thinwire.kernels import sign as sign_kernel

SCALE_SLACK = 1 + 2.0**-6  # a scale is rounded up to 7 significant bits


class Blockwise(Codec):
    """A codec whose blocks of `block` values, a multiple of 8, are coded each on its own; `bits` per value if it has
    them, 2–8."""

    block: int

    never_syncs = True

    def __post_init__(self) -> None:
        bits = getattr(self, "bits", 2)
        if not isinstance(bits, int) or not 2 <= bits <= 8:
            raise UsageError(f"bits must be 2, 3, … 8, not {bits!r}")
        if not isinstance(self.block, int) or self.block < 8 or self.block % 8:
            raise UsageError(f"block must be a multiple of 8, at least 8, not {self.block!r}")

    @property
    def span(self) -> int:
        return self.block

    def _finite(self, wire: Tensor, x: Tensor, bits: int) -> Tensor:
        """0-d bool: does the message of x carry no mark of a block that is not finite?"""
        return kernel.is_finite(wire, x.numel(), bits, -(-x.numel() // self.block), x.dtype)


@dataclass(frozen=True)
class Quantize(Blockwise):
    """Block-scaled quantisation: q = round(x/s_B), one 16-bit scale s_B per block (kernels/quantize.py has the layout).

    bits: per value, 2–8. block: values per scale, a multiple of 8. rounding: "nearest" (contractive) or "stochastic"
    (unbiased). scale: "absmax" (s_B from the largest magnitude, 2^bits − 1 codes), "full" (the same with all 2^bits
    codes, the odd one negative: AQ-SGD's grid, which two bits need), or "mse" for least squared error (all codes too).
    """

    bits: int
    block: int = 128
    rounding: str = "nearest"
    scale: str = "absmax"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rounding not in ("nearest", "stochastic"):
            raise UsageError(f"rounding must be nearest or stochastic, not {self.rounding!r}")
        if self.scale not in ("absmax", "full", "mse"):
            raise UsageError(f"scale must be absmax, full or mse, not {self.scale!r}")
        if self.scale != "absmax" and self.rounding == "stochastic":
            raise UsageError(
                f"scale {self.scale} clips, so stochastic rounding would not be unbiased: use nearest with it"
            )

    @property
    def _mode(self) -> kernel.Mode:
        return {
            "stochastic": self.rounding == "stochastic",
            "mse": self.scale == "mse",
            "full": self.scale == "full",
        }

    def encode_flagged(self, x: Tensor, seed: int = 0, into: Tensor | None = None) -> tuple[Tensor, Tensor]:
        flat = _flat(x)
        flag = kernel.flag_for(flat)
        wire = kernel.quantize(flat, self.bits, self.block, **self._mode, seed=seed, out=into, finite=flag)
        return wire, self._finite(wire, flat, self.bits) if flag is None else flag

    def encode_onto_flagged(
        self, x: Tensor, h: Tensor, seed: int = 0, gate: bool = False, out: Tensor | None = None,
        into: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        target = h if out is None else out
        place = target.view(-1) if target.is_contiguous() else target.new_empty(target.numel())
        flat = _flat(x)
        flag = kernel.flag_for(flat)
        wire = delta_kernel.encode_delta(
            flat,
            _flat(h),
            place,
            self.bits,
            self.block,
            gate=gate,
            seed=seed,
            **self._mode,
            wire=into,
            finite=flag,
        )
        if not target.is_contiguous():
            target.copy_(place.view(target.shape))
        return wire, self._finite(wire, flat, self.bits) if flag is None else flag

    def decode_onto(
        self, wire: Tensor, h: Tensor, dtype: torch.dtype | None = None, seed: int = 0, gate: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        dtype, target = dtype or h.dtype, h if out is None else out
        self._check_onto(wire, h, dtype, gate)
        place = target.view(-1) if target.is_contiguous() else target.new_empty(target.numel())
        y = delta_kernel.decode_delta(wire, _flat(h), place, self.bits, self.block, dtype, gate=gate)
        if not target.is_contiguous():
            target.copy_(place.view(target.shape))
        return y.view(h.shape)

    def _decode(self, wire: Tensor, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
        return kernel.dequantize(wire, math.prod(shape), self.bits, self.block, dtype)

    def _nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return kernel.quantized_bytes(math.prod(shape), self.bits, self.block, dtype)

    def omega(self, numel: int) -> float | None:
        """(√(1 + B/Q) − 1)/2 with Q = qmax²: reached by one extreme among equal small values."""
        if self.rounding == "nearest":
            return None
        block, q = min(self.block, max(numel, 1)), (kernel.qmax(self.bits) / SCALE_SLACK) ** 2
        return (math.sqrt(1 + block / q) - 1) / 2

    def delta(self, numel: int) -> float | None:
        """No value moves by more than itself or half a step, and the extreme is qmax steps long.

        Of the full grid it is one step longer, and moves by a whole one where it is positive.
        """
        if self.rounding == "stochastic":
            return None
        full = self.scale == "full"
        block, q = min(self.block, max(numel, 1)), ((kernel.qmax(self.bits) + full) / SCALE_SLACK) ** 2
        return 1 - min((block + 3 * full) / (block - 1 + 4 * q), 1 - 1e-6)


@dataclass(frozen=True)
class ScaledSign(Blockwise):
    """One bit per value: (‖x‖₁/B)·sign(x) per block of B (signSGD with error feedback, ICML 2019). δ ≥ 1/B.

    block: values per scale B, a multiple of 8.
    """

    block: int = 128

    def encode_flagged(self, x: Tensor, seed: int = 0, into: Tensor | None = None) -> tuple[Tensor, Tensor]:
        flat = _flat(x)
        flag = kernel.flag_for(flat)
        wire = sign_kernel.encode_sign(flat, self.block, finite=flag)
        finite = self._finite(wire, flat, 1) if flag is None else flag
        return (wire if into is None else into.copy_(wire)), finite

    def _decode(self, wire: Tensor, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
        return sign_kernel.decode_sign(wire, math.prod(shape), self.block, dtype)

    def _nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return sign_kernel.sign_bytes(math.prod(shape), self.block, dtype)

    def delta(self, numel: int) -> float | None:
        return (1 - 2.0**-12) / min(self.block, max(numel, 1))  # the mean itself is rounded to 7 bits


def _flat(x: Tensor) -> Tensor:
    return x.to(work_dtype(x.dtype)).contiguous().view(-1)
