"""Elementwise building blocks of the Triton kernels: dtypes, rounding, the random hash, scale codes."""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

from thinwire.kernels import random, scales

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))
INFINITY_BITS = tl.constexpr(0x7F800000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
# Adding 1.5·2²³ to |t| < 2²² rounds t half to even and leaves the integer in the low bits of the sum.
ROUNDER = tl.constexpr(12582912.0)
ROUNDER_BITS = tl.constexpr(0x4B400000)
GOLDEN, MUL1, MUL2 = (tl.constexpr(c) for c in (random.GOLDEN, random.MUL1, random.MUL2))
LARGEST, NONFINITE, SIGN = (tl.constexpr(c) for c in (scales.LARGEST, scales.NONFINITE, scales.SIGN))
NORMAL_BITS = tl.constexpr(0x00800000)  # bits of 2^-126, the smallest normal float32
# A scale code is (float32 bits >> 17) − EXPONENTS: both are a 9- or 8-bit exponent above six mantissa bits.
EXPONENTS = tl.constexpr((126 - scales.BIAS) * 64)
NORMAL_CODE = tl.constexpr((scales.BIAS - 125) * 64)  # the code of 2^-126


@triton.jit
def bits_of(x):
    """float32 → int32 bits."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    """int32 bits → float32."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def widen(x):
    """float32 of loaded values. bfloat16 by its bits: Triton's interpreter gets denormals wrong."""
    if x.dtype == tl.bfloat16:
        return float_of(x.to(tl.uint16, bitcast=True).to(tl.int32) << 16)
    return x.to(tl.float32)


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """float32 rounded half to even to the stored dtype. The interpreter truncates to bfloat16: own path."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        bits = bits_of(x)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x == x, rounded, 0x7FC0)
        return rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def hash32(position, k0, k1):
    """random.hash32 of int64 positions, as uint32; k0, k1: the seed's keys as int32."""
    low, high = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    return hash_sum(low * GOLDEN + (high * MUL1 + k0.to(tl.uint32)), k1)


@triton.jit
def golden(offset):
    """An offset's share in `hash_sum`."""
    return offset.to(tl.uint32) * GOLDEN


@triton.jit
def hash_start(start, k0):
    """What all offsets from `start` share in `hash_sum`, as long as none carries into the high word."""
    low, high = start.to(tl.uint32), (start >> 32).to(tl.uint32)
    return low * GOLDEN + high * MUL1 + k0.to(tl.uint32)


@triton.jit
def hash_sum(h, k1):
    """hash32 of start + offset, of golden(offset) + hash_start(start, k0): an offset that is a sum costs no product."""
    h = (h ^ (h >> 16)) * MUL1
    h = (h ^ k1.to(tl.uint32) ^ (h >> 15)) * MUL2
    return h ^ (h >> 15)


@triton.jit
def drawn_up(t, h, k1):
    """⌈t − u⌉, lifted by ROUNDER; h: as `hash_sum` takes it; u: the number drawn, its hash's first 23 bits.

    t − u rounded up crosses no whole number, so two sums that round up are exact. A unit that shifts is busier than one
    that multiplies: one of the shifts is the high word of a product.
    """
    if INTERPRETED:
        u = (hash_sum(h, k1) >> 9).to(tl.float64) * 1.1920928955078125e-07  # 2^-23
        return tl.math.ceil(t.to(tl.float64) - u).to(tl.float32) + ROUNDER
    # one program in the grid's second direction, which the assembler does not know: it would make shifts of products
    one = tl.inline_asm_elementwise("mov.u32 $0, %nctaid.y;", "=r,r", [k1], tl.int32, is_pure=True, pack=1)
    h = (h ^ tl.umulhi(h, (one << 16).to(tl.uint32))) * MUL1
    h = (h ^ k1.to(tl.uint32) ^ (h >> 15)) * MUL2
    above_one = ((h >> 9) ^ (h >> 24)) | 0x3F800000  # 1 + u
    return tl.inline_asm_elementwise(
        "{ .reg .f32 d; sub.rp.f32 d, $1, $2; add.rp.f32 $0, d, 0f4B400001; }", "=f,f,f",
        [t, above_one.to(tl.float32, bitcast=True)], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def multiply_add(a, b, c):
    """a·b + c rounded once. The interpreter has no such operation: by float64, which holds the product."""
    if INTERPRETED:
        return (a.to(tl.float64) * b + c).to(tl.float32)
    return tl.fma(a, b, c)


@triton.jit
def scale_code(v, limit, NEAREST: tl.constexpr):
    """scales.nearest_scale, or encode_scale (rounded up), of v > 0; one less where above `limit`."""
    small = bits_of(v) < NORMAL_BITS
    bits = bits_of(tl.where(small, v * 4294967296.0, v))  # a denormal is lifted by 2^32, exactly
    bits += (0xFFFF + ((bits >> 17) & 1)) if NEAREST else 0x1FFFF
    code = (bits >> 17) - EXPONENTS - tl.where(small, 32 * 64, 0)
    code = tl.minimum(code, LARGEST)
    return code - (code > limit).to(tl.int32)


@triton.jit
def block_scale(top, shrink, limit, QMAX: tl.constexpr):
    """scales.encode_scale of max|x|·shrink; max|x| is given by its bits `top`."""
    absmax = float_of(top) * shrink
    # The quotient by a number of seven bits is never so close to a tie that a product in float64 would miss it.
    quotient = (absmax.to(tl.float64) * (1.0 / QMAX)).to(tl.float32)
    bits = tl.maximum(bits_of(quotient), 1)  # at least 2^-149, whose bits are 1
    rounded_down = (bits < NORMAL_BITS) & (float_of(bits) * QMAX < absmax)
    code = scale_code(float_of(bits + rounded_down.to(tl.int32)), limit, False)
    code = tl.where(top == 0, 0, code)
    return tl.where(top >= INFINITY_BITS, NONFINITE, code)


@triton.jit
def scale_value(code):
    """scales.decode_scale of int32 codes: their bits shifted, by way of 2^46 where the scale is denormal."""
    magnitude = code & (SIGN - 1)
    small = magnitude < NORMAL_CODE
    bits = (magnitude + tl.where(small, 46 * 64, 0) + EXPONENTS) << 17
    scale = float_of(bits) * tl.where(small, 1.4210854715202004e-14, 1.0)  # 2^-46
    scale = tl.where(magnitude == 0, 0.0, tl.where(code >= SIGN, -scale, scale))
    return tl.where(magnitude > LARGEST, float("nan"), scale)


@triton.jit
def reciprocal(scale):
    """scales.reciprocal."""
    magnitude = tl.abs(scale)
    low, high = magnitude < 8.673617379884035e-19, magnitude > 1.152921504606847e18  # 2^±60
    lift = tl.where(low, 18446744073709551616.0, tl.where(high, 5.421010862427522e-20, 1.0))  # 2^±64
    return lift, tl.where(scale == 0.0, 0.0, tl.math.div_rn(1.0, scale * lift))


@triton.jit
def rounded(t):
    """|t| < 2²² rounded half to even, still lifted by ROUNDER: for `as_float` (never −0) and `as_integer`."""
    return t + ROUNDER


@triton.jit
def as_float(lifted):
    """The rounded value, of what `lifted` it to where floats are whole numbers."""
    return lifted - ROUNDER


@triton.jit
def as_integer(lifted):
    """Cheaper than the conversion instruction."""
    return bits_of(lifted) - ROUNDER_BITS
