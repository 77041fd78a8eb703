"""Scalar building blocks of the CPU kernels: bit casts, bfloat16 loads and stores, the random hash, scales."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from thinwire.kernels.cpu.compile import OPTIONS, inline
from thinwire.kernels.random import GOLDEN, MUL1, MUL2
from thinwire.kernels.scales import BIAS, LARGEST, NONFINITE, NORMAL, SIGN, TINY

INFINITY_BITS = np.int32(0x7F800000)
MAGNITUDE = np.int32(0x7FFFFFFF)
TINIEST, SMALLEST_NORMAL = np.float32(TINY), np.float32(NORMAL)


@intrinsic
def as_float(typingctx, bits):
    """int32 bits → float32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


@intrinsic
def as_bits(typingctx, value):
    """float32 → int32 bits."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), codegen


def read(a, i):
    """a[i] as float32, whatever the storage (float32, or uint16 holding a bfloat16)."""


@overload(read, jit_options=OPTIONS)
def _read(a, i):
    if a.dtype == types.uint16:
        return lambda a, i: as_float(np.int32(np.uint32(a[i]) << np.uint32(16)))
    return lambda a, i: a[i]


def write(a, i, value):
    """a[i] = value, rounded half to even where the storage is bfloat16."""


@overload(write, jit_options=OPTIONS)
def _write(a, i, value):
    if a.dtype == types.uint16:

        def to_bfloat16(a, i, value):
            bits = as_bits(value)
            rounded = (bits + np.int32(0x7FFF) + ((bits >> np.int32(16)) & np.int32(1))) >> np.int32(16)
            a[i] = np.uint16(rounded) if value == value else np.uint16(0x7FC0)

        return to_bfloat16

    def plain(a, i, value):
        a[i] = value

    return plain


@inline
def hash32(low, high_key, k1):
    """random.hash32 of position `low`; `high_key` = k0 + (position >> 32)·MUL1. Numba widens to 64 bits: cut back."""
    h = np.uint32(np.uint32(low) * np.uint32(GOLDEN) + np.uint32(high_key))
    h = np.uint32(np.uint32(h ^ (h >> np.uint32(16))) * np.uint32(MUL1))
    h = np.uint32(np.uint32(h ^ np.uint32(k1) ^ (h >> np.uint32(15))) * np.uint32(MUL2))
    return np.uint32(h ^ (h >> np.uint32(15)))


@inline
def high_key(position, k0):
    """The key for values beyond the first 2³²."""
    return np.uint32(np.uint32(k0) + np.uint32(position >> 32) * np.uint32(MUL1))


@inline
def uniform(h):
    """A 32-bit hash as a number in [0, 1)."""
    return np.float32(h >> np.uint32(8)) * np.float32(2.0**-24)


@inline
def scale_code(v, nearest):
    """scales.encode_scale (rounded up) or nearest_scale of one v > 0."""
    shifted = np.int32(0)
    bits = as_bits(v)
    if bits < np.int32(0x00800000):
        bits = as_bits(v * np.float32(2.0**32))
        shifted = np.int32(32)
    mantissa = (bits & np.int32(0x7FFFFF)) | np.int32(0x800000)
    mantissa += np.int32(0xFFFF) + ((mantissa >> 17) & 1) if nearest else np.int32(0x1FFFF)
    exponent = (bits >> 23) - 126 - shifted
    return np.int32(min((exponent + BIAS) * 64 + (mantissa >> 17) - 64, LARGEST))


@inline
def scale_value(code):
    """scales.decode_scale of one code."""
    magnitude = np.int32(code & (SIGN - 1))
    if magnitude == 0:
        return np.float32(0)
    if magnitude > LARGEST:
        return np.float32(np.nan)
    exponent = np.int32((magnitude >> 6) - BIAS - 7)
    half = exponent >> np.int32(1)
    power = as_float(np.int32((half + 127) << 23))
    scale = np.float32((magnitude & 63) + 64) * power * as_float(np.int32((exponent - half + 127) << 23))
    return -scale if code >= SIGN else scale


@inline
def reciprocal(scale):
    """scales.reciprocal of one scale ≠ 0."""
    magnitude = abs(scale)
    lift = np.float32(1)
    if magnitude < np.float32(2.0**-60):
        lift = np.float32(2.0**64)
    elif magnitude > np.float32(2.0**60):
        lift = np.float32(2.0**-64)
    return lift, np.float32(1) / (scale * lift)


@inline
def block_scale(absmax_bits, shrink, qmax, fmax):
    """Code of the smallest scale s ≥ shrink·absmax/qmax with qmax·s ≤ fmax; absmax given by its bits."""
    if absmax_bits == 0:
        return np.int32(0)
    if absmax_bits >= INFINITY_BITS:
        return np.int32(NONFINITE)
    absmax = as_float(absmax_bits) * np.float32(shrink)
    v = max(absmax / np.float32(qmax), TINIEST)
    if v < SMALLEST_NORMAL and v * np.float32(qmax) < absmax:
        v += TINIEST
    code = scale_code(v, False)
    if scale_value(code) * np.float32(qmax) > fmax:
        code -= np.int32(1)
    return code
