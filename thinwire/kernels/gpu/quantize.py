"""Block-scaled quantisation in Triton: each program reads a tile of blocks once and writes its message."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from thinwire.kernels import quantize as layout
from thinwire.kernels import scales
from thinwire.kernels.gpu import tile as tiles
from thinwire.kernels.gpu.launch import Call, signed, tiling
from thinwire.kernels.gpu.scalar import (
    NONFINITE,
    ROUNDER,
    ROUNDER_BITS,
    SIGN,
    as_float,
    as_integer,
    bits_of,
    block_scale,
    drawn_up,
    float_of,
    multiply_add,
    reciprocal,
    rounded,
    scale_value,
)  # fmt: skip
from thinwire.kernels.gpu.scratch import true_flag
from thinwire.kernels.random import split

NEAREST, STOCHASTIC, LEAST_SQUARES, FULL_GRID = (tl.constexpr(mode) for mode in range(4))
CANDIDATES = tl.constexpr(len(layout.FINE))
COARSE, FINE = (tl.constexpr(float(grid)) for grid in layout.GRIDS)
COARSE_MOST = tl.constexpr(layout.qmax(layout.COARSE))


@triton.jit
def best_shrink(x, extreme, QMAX: tl.constexpr, TABLE: tl.constexpr):
    """layout.best_shrink; extreme: float32[ROWS], max|x| with its sign; TABLE: the candidates."""
    GRID: tl.constexpr = COARSE if QMAX <= COARSE_MOST else FINE
    lift, inverse = reciprocal(extreme)
    t = as_float(rounded((x * tiles.row(lift)) * tiles.row(inverse * GRID)))
    best = tl.full([x.shape[1]], float("inf"), tl.float64 if x.shape[0] * x.shape[2] > 128 else tl.float32)
    shrink = tl.full([x.shape[1]], 1.0, tl.float32)
    for j in tl.static_range(CANDIDATES):
        q = multiply_add(t, TABLE[j][1], ROUNDER)
        if GRID * TABLE[j][1] >= QMAX + 0.5:
            q = tl.maximum(q, ROUNDER - QMAX)
        if GRID * TABLE[j][1] >= QMAX + 1.5:
            q = tl.minimum(q, ROUNDER + QMAX + 1)
        off = multiply_add(as_float(q), TABLE[j][0] * -1.0, t)
        squares = off * off
        if x.shape[0] * x.shape[2] > 128:  # more than float32 can add up exactly
            squares = squares.to(tl.float64)
        error = tiles.row_sum(squares)
        shrink = tl.where(error < best, TABLE[j][2], shrink)
        best = tl.minimum(best, error)
    return shrink


@triton.jit
def quantize_tile(
    x, start, limit, half, k0, k1,
    QMAX: tl.constexpr, MODE: tl.constexpr, TABLE: tl.constexpr, SHAPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x: float32 tile → (signed codes, lifted; scale codes; scales). A block with NaN or Inf: any, NONFINITE, NaN."""
    top = tiles.row_top(x)
    if MODE == LEAST_SQUARES:
        roomy = float_of(top) <= half  # false for NaN
        negative = roomy & (tiles.row_max(bits_of(x)) != top)  # as signed integers: is +max absent?
        extreme = tl.where(roomy & (top > 0), float_of(top), 1.0)
        shrink = best_shrink(x, tl.where(negative, -extreme, extreme), QMAX, TABLE)
        code = block_scale(top, tl.where(roomy, shrink, 1.0), limit, QMAX)
        code = tl.where(negative & (code > 0), code + SIGN, code)
    elif MODE == FULL_GRID:
        code = block_scale(top, 1.0, limit, QMAX + 1)
        code = tl.where((code > 0) & (code != NONFINITE), code + SIGN, code)
    else:
        code = block_scale(top, 1.0, limit, QMAX)
    scale = scale_value(code)
    lift, r = reciprocal(scale)
    t = (x * tiles.row(lift)) * tiles.row(r)
    if MODE == STOCHASTIC:
        t = tl.clamp(t, -QMAX * 1.0, QMAX * 1.0)
        return drawn_up(t, tiles.hash_sums(start, k0, SHAPE, BLOCK), k1), code, scale
    if MODE == LEAST_SQUARES:
        most = tl.where(roomy, QMAX + 1.0, QMAX * 1.0)
        t = tl.minimum(tl.maximum(t, -QMAX * 1.0), tiles.row(most))
    elif MODE == FULL_GRID:
        t = tl.minimum(tl.maximum(t, -QMAX * 1.0), QMAX + 1.0)
    elif QMAX >= 32:  # a scale one step too small (near the dtype's limit) overshoots by 1/64: less than half here
        t = tl.clamp(t, -QMAX * 1.0, QMAX * 1.0)
    return rounded(t), code, scale


@triton.jit
def _encode_tile(
    x, wire, finite, tile, start, n, cut, limit, half, k0, k1, BITS: tl.constexpr, MODE: tl.constexpr,
    TABLE: tl.constexpr, SHAPE: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    QMAX: tl.constexpr = (1 << (BITS - 1)) - 1
    values = tiles.read(x, start, n, SHAPE, BLOCK, FULL)
    q, code, _ = quantize_tile(values, start, limit, half, k0, k1, QMAX, MODE, TABLE, SHAPE, BLOCK)
    write_codes(q, code, wire, finite, tile, start, n, cut, BITS, SHAPE, BLOCK, FULL)


@triton.jit
def write_codes(
    q, code, wire, finite, tile, start, n, cut, BITS: tl.constexpr, SHAPE: tl.constexpr, BLOCK: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """The tile's part of the message: codes q (lifted), zeros where a block is not finite, and scale codes."""
    QMAX: tl.constexpr = (1 << (BITS - 1)) - 1
    bad = code == NONFINITE
    if FULL:
        tiles.pack(bits_of(q), wire, tile, cut, BITS, SHAPE, BLOCK, FULL, QMAX - ROUNDER_BITS, bad, QMAX)
    else:
        codes = tl.where(tiles.row(bad), 0, as_integer(q)) + QMAX
        codes = tl.where(tiles.inside(start, n, SHAPE, BLOCK), codes, 0)
        tiles.pack(codes, wire, tile, cut, BITS, SHAPE, BLOCK, FULL)
    tiles.write_scales(wire + cut, code, tile, tl.cdiv(n, BLOCK), SHAPE[1])
    tiles.write_finite(finite, bad)


@triton.jit(do_not_specialize=["n", "cut", "limit", "k0", "k1"])
def _quantize(
    x, wire, finite, n, cut, limit, half, k0, k1, BITS: tl.constexpr, MODE: tl.constexpr,
    TABLE: tl.constexpr, SHAPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    start = tile * (SHAPE[1] * BLOCK)
    if tiles.is_full(start, n, SHAPE, BLOCK):
        _encode_tile(x, wire, finite, tile, start, n, cut, limit, half, k0, k1, BITS, MODE, TABLE, SHAPE, BLOCK, True)
    else:
        _encode_tile(x, wire, finite, tile, start, n, cut, limit, half, k0, k1, BITS, MODE, TABLE, SHAPE, BLOCK, False)


@triton.jit
def dequantize_tile(
    wire, tile, n, cut, BITS: tl.constexpr, ALIGNED: tl.constexpr,
    SHAPE: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """float32 tile: code · scale, an exact product."""
    codes = tiles.unpack(wire, tile, cut, BITS, ALIGNED, SHAPE, BLOCK, FULL)
    scale = scale_value(tiles.read_scales(wire + cut, tile, tl.cdiv(n, BLOCK), ALIGNED, SHAPE[1]))
    return (codes - ((1 << (BITS - 1)) - 1)).to(tl.float32) * tiles.row(scale)


@triton.jit
def _decode_tile(
    wire, out, tile, start, n, cut, BITS: tl.constexpr, ALIGNED: tl.constexpr, ADD: tl.constexpr,
    SHAPE: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    values = dequantize_tile(wire, tile, n, cut, BITS, ALIGNED, SHAPE, BLOCK, FULL)
    if ADD:
        values = tiles.read(out, start, n, SHAPE, BLOCK, FULL) + values
    tiles.write(out, values, start, n, SHAPE, BLOCK, FULL)


@triton.jit(do_not_specialize=["n", "cut"])
def _dequantize(
    wire, out, n, cut, BITS: tl.constexpr, ALIGNED: tl.constexpr, ADD: tl.constexpr,
    SHAPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    start = tile * (SHAPE[1] * BLOCK)
    if tiles.is_full(start, n, SHAPE, BLOCK):
        _decode_tile(wire, out, tile, start, n, cut, BITS, ALIGNED, ADD, SHAPE, BLOCK, True)
    else:
        _decode_tile(wire, out, tile, start, n, cut, BITS, ALIGNED, ADD, SHAPE, BLOCK, False)


@functools.cache
def candidates(bits):
    """The least-squares candidates, for the kernel to unroll: (step, 1/step, c) each."""
    return tuple(layout.shrink_candidates(bits))


@functools.cache
def scale_limit(factor, fmax):
    """The largest scale code whose scale · factor does not exceed fmax: decoding is monotonous."""
    codes = torch.arange(scales.LARGEST + 1, dtype=torch.int32)
    return int((scales.decode_scale(codes) * factor <= fmax).sum()) - 1


def encode_tiling(block, itemsize, mode):
    """As measured on an H200: 32 values a thread, in segments of 32 so that four lanes or eight share a block."""
    if mode == layout.LEAST_SQUARES:  # bound by arithmetic
        return tiling(block, 32, tile=2048, warps=2)
    if mode == layout.STOCHASTIC and itemsize == 2:
        return tiling(block, 32, tile=2048, warps=2, registers=80)
    if mode == layout.STOCHASTIC:
        return tiling(block, 16, tile=2048, warps=2, registers=64)
    return tiling(block, 32, tile=2048, warps=2, registers=64)


def encode_arguments(bits, dtype, mode):
    """What the encoding kernels share: (scalars before the random keys, constants)."""
    fmax = torch.finfo(dtype).max
    steps = layout.qmax(bits) + (mode == layout.FULL)
    table = candidates(bits) if mode == layout.LEAST_SQUARES else 0
    return (scale_limit(steps, fmax), fmax / 2), {"BITS": bits, "MODE": mode, "TABLE": table}


def random_keys(mode, seed):
    """The last arguments of the encoding kernels."""
    return tuple(map(signed, split(seed))) if mode == layout.STOCHASTIC else (0, 0)


def programs_for(n, bits, block, shape):
    """Programs that cover all blocks, and the padding byte even where that begins a new row."""
    return triton.cdiv(layout.codes_bytes(n, bits), shape[1] * block * bits // 8)


def quantize(x, bits, block, mode, seed, out=None, finite=None):
    """`quantize` of kernels/quantize.py, by Triton."""
    size, call = _encode_plan(x.numel(), bits, block, x.dtype, mode)
    wire = message(size, x.device, out)
    call(x, wire, true_flag(x) if finite is None else finite, keys=random_keys(mode, seed))
    return wire


@functools.lru_cache(maxsize=1024)
def _encode_plan(n, bits, block, dtype, mode):
    """(bytes of the message, the launch)."""
    tiled = encode_tiling(block, dtype.itemsize, mode)
    scalars, constants = encode_arguments(bits, dtype, mode)
    numbers = n, layout.codes_bytes(n, bits), *scalars
    call = Call(_quantize, programs_for(n, bits, block, tiled["SHAPE"]), numbers, BLOCK=block, **constants, **tiled)
    return layout.quantized_bytes(n, bits, block, dtype), call


def message(size, device, out):
    """uint8[size], to be written in words: `out`, or new memory."""
    if out is None:
        return torch.empty(size, dtype=torch.uint8, device=device)
    if out.numel() != size or out.data_ptr() % 4:
        raise ValueError(f"out must be {size} bytes from a multiple of 4 on, not {out.numel()} from {out.data_ptr()}")
    return out


def dequantize(wire, n, bits, block, dtype, onto, out=None):
    """`dequantize` of kernels/quantize.py, by Triton."""
    wire = wire.contiguous()
    if onto is not None or out is None:
        out = torch.empty(n, dtype=dtype, device=wire.device) if onto is None else onto
    _decode_plan(n, bits, block, out.dtype, wire.data_ptr() % 4 == 0, onto is not None)(wire, out)
    return out


@functools.lru_cache(maxsize=1024)
def _decode_plan(n, bits, block, dtype, aligned, add):
    tiled = tiling(block, 32, tile=1024, warps=dtype.itemsize)  # a thread writes 32 bytes
    programs, numbers = triton.cdiv(n, tiled["SHAPE"][1] * block), (n, layout.codes_bytes(n, bits))
    return Call(_dequantize, programs, numbers, BITS=bits, ALIGNED=aligned, ADD=add, BLOCK=block, **tiled)
