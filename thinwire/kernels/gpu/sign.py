"""The scaled sign in Triton: a tile of blocks a program, as in quantize.py."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from thinwire.kernels import sign as layout
from thinwire.kernels.gpu import tile as tiles
from thinwire.kernels.gpu.launch import Call, launch, line, tiling
from thinwire.kernels.gpu.quantize import programs_for, scale_limit
from thinwire.kernels.gpu.scalar import (
    INFINITY_BITS,
    INTERPRETED,
    NONFINITE,
    ROUNDER,
    as_integer,
    bits_of,
    float_of,
    multiply_add,
    scale_code,
    scale_value,
    widen,
)
from thinwire.kernels.gpu.scratch import true_flag
from thinwire.kernels.quantize import codes_bytes

GRID = tl.constexpr(float(layout.GRID))
EACH, BUSY = 8, 1 << 13  # tiles of 16-bit values that a program handles at most; programs that keep a card busy


@triton.jit
def _mean_scale(x, count, limit, WIDE: tl.constexpr, COUNT: tl.constexpr):
    """Scale codes of the blocks' mean magnitudes, summed on the integer grid; count: values in each block; WIDE: as
    tiles.quotient takes it; COUNT: count, where it is a power of two and the same for all, else 0."""
    SMALL: tl.constexpr = x.shape[0] * x.shape[2] <= 1024  # steps are at most 2^20: 1024 of them fit 32 bits
    top = tiles.row_top(x)
    good = (top > 0) & (top < INFINITY_BITS)
    absmax = tl.where(good, float_of(top), 1.0)
    steps = _steps(tl.abs(x), absmax, WIDE)
    total = tiles.row_sum(steps if SMALL else steps.to(tl.int64)).to(tl.float64)
    if COUNT:  # an exact product then, not a division
        mean = (absmax.to(tl.float64) * total * (1.0 / (COUNT * GRID))).to(tl.float32)
    else:
        mean = (absmax.to(tl.float64) * total / (count.to(tl.float64) * GRID)).to(tl.float32)
    code = tl.where(mean > 0.0, scale_code(mean, limit, True), 0)
    return tl.where(good, code, tl.where(top == 0, 0, NONFINITE))


@triton.jit
def _steps(x, top, WIDE: tl.constexpr):
    """GRID · x / top[ROWS], the quotient rounded before the product."""
    share = tl.zeros_like(x)
    if WIDE or INTERPRETED:
        share = tiles.quotient(x, top, WIDE)
    elif tl.min(((top > 2.0**-60) & (top < 2.0**60)).to(tl.int32)) > 0:
        # of 1/top in two numbers: a rounding is all that the quotient of 11-bit numbers needs, see tiles.quotient
        inverse = tl.math.div_rn(1.0, top)
        rest = multiply_add(-top, inverse, 1.0) * inverse
        share = multiply_add(x, tiles.row(inverse), x * tiles.row(rest))
    else:
        share = tiles.quotient(x, top, WIDE)
    return as_integer(multiply_add(share, GRID, ROUNDER))


@triton.jit
def _encode_tile(
    loaded, wire, finite, tile, start, n, cut, limit, SHAPE: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr
):  # fmt: skip
    """loaded: the tile, in its own dtype."""
    values = widen(loaded)
    tiles.pack((values < 0.0).to(tl.int32), wire, tile, cut, 1, SHAPE, BLOCK, FULL)
    count = tl.minimum(tl.maximum(n - start - tl.arange(0, SHAPE[1]) * BLOCK, 1), BLOCK)
    WHOLE: tl.constexpr = BLOCK if FULL and BLOCK & (BLOCK - 1) == 0 else 0
    code = _mean_scale(values, count, limit, loaded.dtype == tl.float32, WHOLE)
    tiles.write_scales(wire + cut, code, tile, tl.cdiv(n, BLOCK), SHAPE[1])
    tiles.write_finite(finite, code == NONFINITE)


@triton.jit(do_not_specialize=["n", "cut", "limit", "each"])
def _encode(x, wire, finite, n, cut, limit, each, AHEAD: tl.constexpr, SHAPE: tl.constexpr, BLOCK: tl.constexpr):
    """each: tiles that a program handles. AHEAD: it reads one while it works on another; else it handles one."""
    STEP: tl.constexpr = SHAPE[1] * BLOCK
    if AHEAD:
        tile = tl.program_id(0).to(tl.int64) * each
        if tiles.is_full((tile + each - 1) * STEP, n, SHAPE, BLOCK):
            loaded = tiles.load(x, tile * STEP, n, SHAPE, BLOCK, True)
            for _ in range(1, each):
                following = tiles.load(x, (tile + 1) * STEP, n, SHAPE, BLOCK, True)
                _encode_tile(loaded, wire, finite, tile, tile * STEP, n, cut, limit, SHAPE, BLOCK, True)
                loaded = following
                tile += 1
            _encode_tile(loaded, wire, finite, tile, tile * STEP, n, cut, limit, SHAPE, BLOCK, True)
        else:
            for _ in range(each):
                _encode_masked(x, wire, finite, tile, n, cut, limit, SHAPE, BLOCK)
                tile += 1
    else:
        tile = tl.program_id(0).to(tl.int64)
        if tiles.is_full(tile * STEP, n, SHAPE, BLOCK):
            loaded = tiles.load(x, tile * STEP, n, SHAPE, BLOCK, True)
            _encode_tile(loaded, wire, finite, tile, tile * STEP, n, cut, limit, SHAPE, BLOCK, True)
        else:
            _encode_masked(x, wire, finite, tile, n, cut, limit, SHAPE, BLOCK)


@triton.jit
def _encode_masked(x, wire, finite, tile, n, cut, limit, SHAPE: tl.constexpr, BLOCK: tl.constexpr):
    start = tile * (SHAPE[1] * BLOCK)
    loaded = tiles.load(x, start, n, SHAPE, BLOCK, False)
    _encode_tile(loaded, wire, finite, tile, start, n, cut, limit, SHAPE, BLOCK, False)


@triton.jit
def _decode_tile(
    wire, out, tile, start, n, cut, ALIGNED: tl.constexpr, SHAPE: tl.constexpr, BLOCK: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    negative = tiles.unpack(wire, tile, cut, 1, ALIGNED, SHAPE, BLOCK, FULL)
    scale = scale_value(tiles.read_scales(wire + cut, tile, tl.cdiv(n, BLOCK), ALIGNED, SHAPE[1]))
    values = float_of(tiles.row(bits_of(scale)) ^ (negative << 31))
    tiles.write(out, values, start, n, SHAPE, BLOCK, FULL)


@triton.jit(do_not_specialize=["n", "cut"])
def _decode(wire, out, n, cut, ALIGNED: tl.constexpr, SHAPE: tl.constexpr, BLOCK: tl.constexpr):
    tile = tl.program_id(0).to(tl.int64)
    start = tile * (SHAPE[1] * BLOCK)
    if tiles.is_full(start, n, SHAPE, BLOCK):
        _decode_tile(wire, out, tile, start, n, cut, ALIGNED, SHAPE, BLOCK, True)
    else:
        _decode_tile(wire, out, tile, start, n, cut, ALIGNED, SHAPE, BLOCK, False)


def encode_sign(x, block, finite=None):
    """`encode_sign` of kernels/sign.py, by Triton."""
    size, call = _encode_plan(x.numel(), block, x.dtype)
    wire = torch.empty(size, dtype=torch.uint8, device=x.device)
    call(x, wire, true_flag(x) if finite is None else finite)
    return wire


@functools.lru_cache(maxsize=1024)
def _encode_plan(n, block, dtype):
    """(bytes of the message, the launch)."""
    tiled = encode_tiling(block, dtype.itemsize)
    programs = programs_for(n, 1, block, tiled["SHAPE"])
    ahead = dtype.itemsize == 2  # a tile of float32 more does not fit the registers
    each = min(EACH, max(programs // BUSY, 1)) if ahead else 1
    numbers = n, codes_bytes(n, 1), scale_limit(1, torch.finfo(dtype).max), each
    call = Call(_encode, triton.cdiv(programs, each), numbers, AHEAD=ahead, BLOCK=block, **tiled)
    return layout.sign_bytes(n, block, dtype), call


def encode_tiling(block, itemsize):
    """As measured on an H200. The next tile, of 16-bit values, takes 16 registers more."""
    return tiling(block, 32, tile=1024, warps=1, registers=64 if itemsize == 4 else 96)


def decode_sign(wire, n, block, dtype):
    """`decode_sign` of kernels/sign.py, by Triton."""
    wire, out = wire.contiguous(), torch.empty(n, dtype=dtype, device=wire.device)
    tiled = tiling(block, line(dtype.itemsize))
    programs = triton.cdiv(n, tiled["SHAPE"][1] * block)
    aligned = wire.data_ptr() % 4 == 0
    launch(_decode, programs, wire, out, n, codes_bytes(n, 1), ALIGNED=aligned, BLOCK=block, **tiled)
    return out
