"""The 16-bit block scale: a sign, 9 bits of exponent, 7 significant bits; no floor.

    code = sign·2¹⁵ + 64·(e + 149) + (m − 64)   for the scale ±m·2^(e−7), 64 ≤ m ≤ 127
    code 0 is zero, 0xFFFF is "not finite"

Why not a bfloat16: that would flush the scales of small gradients. Why so few bits: a code of 8 bits times 7
significant bits is exact in float32, so `h + q·s` has one rounding whether or not the compiler fuses it: the
mirrors at both ends stay bitwise equal across CPU and GPU. The sign lets a block point its one spare level at its
extreme (quantize.py, least squares).
"""

from __future__ import annotations

import torch
from torch import Tensor

BIAS = 149
NONFINITE = 0xFFFF
LARGEST = (128 + BIAS) * 64 + 63
SIGN = 1 << 15
TINY, NORMAL = 2.0**-149, 2.0**-126


def encode_scale(absmax: Tensor, qmax: float, fmax: float) -> Tensor:
    """int32 codes of the smallest scale s ≥ absmax/qmax, stepped down where qmax·s would exceed `fmax`."""
    v = (absmax / qmax).clamp(min=TINY)
    v = torch.where((v < NORMAL) & (v * qmax < absmax), v + TINY, v)  # a denormal quotient may have rounded down
    mantissa, exponent = torch.frexp(v)
    code = (exponent + BIAS) * 64 + torch.ceil(mantissa * 128).to(torch.int32) - 64
    code = code.clamp(max=LARGEST)
    code = code - (decode_scale(code) * qmax > fmax).to(torch.int32)
    code = torch.where(absmax == 0, 0, code)
    return torch.where(torch.isfinite(absmax), code, NONFINITE).to(torch.int32)


def nearest_scale(v: Tensor, fmax: float) -> Tensor:
    """int32 codes of the scale nearest to v ≥ 0 (half to even, at most `fmax`): for a mean, which is no bound."""
    mantissa, exponent = torch.frexp(v)
    code = (exponent + BIAS) * 64 + torch.round(mantissa * 128).to(torch.int32) - 64
    code = torch.where(v > 0, code.clamp(max=LARGEST), 0)
    code = code - (decode_scale(code) > fmax).to(torch.int32)
    return torch.where(torch.isfinite(v), code, NONFINITE).to(torch.int32)


def decode_scale(code: Tensor) -> Tensor:
    """float32 scales of int32 codes; two powers of two, since one alone may not be a float32."""
    magnitude = code & (SIGN - 1)
    exponent = (magnitude >> 6) - BIAS - 7
    half = exponent >> 1
    scale = ((magnitude & 63) + 64).to(torch.float32) * _power(half) * _power(exponent - half)
    scale = torch.where(magnitude == 0, 0.0, torch.where(code >= SIGN, -scale, scale))
    return torch.where(magnitude > LARGEST, torch.nan, scale)


def reciprocal(scale: Tensor) -> tuple[Tensor, Tensor]:
    """(lift, r) with x/s computed as (x·lift)·r: r = 1/(s·lift) is correctly rounded and never overflows.

    The lift is 1 unless s is outside 2^±60; multiplying by it is exact where it matters. Zero gives r = 0.
    """
    magnitude = scale.abs()
    lift = torch.where(magnitude < 2.0**-60, 2.0**64, torch.where(magnitude > 2.0**60, 2.0**-64, 1.0))
    r = torch.where(scale == 0, 0.0, 1.0 / (scale * lift))
    return lift.to(scale.dtype), r.to(scale.dtype)


def _power(exponent: Tensor) -> Tensor:
    return ((exponent + 127) << 23).to(torch.int32).view(torch.float32)


def to_bytes(code: Tensor) -> Tensor:
    """uint8[2·blocks], little-endian, of int32 codes (torch has no arithmetic on uint16)."""
    return torch.stack((code & 255, code >> 8), dim=-1).to(torch.uint8).reshape(-1)


def from_bytes(wire: Tensor) -> Tensor:
    """The inverse of `to_bytes`."""
    pairs = wire.reshape(-1, 2).to(torch.int32)
    return pairs[:, 0] | (pairs[:, 1] << 8)
