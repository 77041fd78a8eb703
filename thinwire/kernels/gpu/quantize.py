"""Block-scaled quantisation in Triton: each program reads a tile of blocks once and writes its message."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from thinwire.kernels import quantize as layout
from thinwire.kernels import scales
from thinwire.kernels.gpu import tile as tiles
from thinwire.kernels.gpu.launch import TILE, launch, signed, tiling
from thinwire.kernels.gpu.scalar import (
    INFINITY_BITS,
    MAGNITUDE,
    SIGN,
    bits_of,
    block_scale,
    float_of,
    hash32,
    integer,
    reciprocal,
    round_even,
    scale_value,
    uniform,
)  # fmt: skip
from thinwire.kernels.random import split

NEAREST, STOCHASTIC, LEAST_SQUARES = (tl.constexpr(mode) for mode in range(3))
GRID, SHRINKS = tl.constexpr(float(layout.GRID)), tl.constexpr(layout.SHRINKS)
SEARCH_TILE = 1024  # the search is bound by arithmetic and unrolled: a small tile compiles four times faster


@triton.jit
def best_shrink(x, extreme, QMAX: tl.constexpr, TABLE: tl.constexpr):
    """layout.best_shrink; extreme: float32[ROWS], max|x| with its sign; TABLE: the candidates."""
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    t = round_even(tl.math.div_rn(x, extreme[:, None]) * GRID)
    grid = integer(t)
    best = tl.full([ROWS], 1 << 62, tl.int64)
    shrink = tl.full([ROWS], 1.0, tl.float32)
    for j in tl.static_range(SHRINKS):
        q = tl.minimum(tl.maximum(t * TABLE[j][1], -QMAX * 1.0), QMAX + 1.0)
        off = grid - integer(q) * TABLE[j][0]
        # eight squares below 2^28 fit 32 bits: the sum goes on in 64 only across groups
        eights = tl.sum(tl.reshape(off * off, [ROWS, COLUMNS // 8, 8]), axis=2)
        error = tl.sum(eights.to(tl.int64), axis=1)
        shrink = tl.where(error < best, TABLE[j][2], shrink)
        best = tl.minimum(best, error)
    return shrink


@triton.jit
def quantize_tile(
    x, start, limit, half, k0, k1,
    QMAX: tl.constexpr, MODE: tl.constexpr, BLOCK: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """x: float32[ROWS, COLUMNS] → (signed codes as float32, scale codes, scales). NaN or Inf: zeros."""
    bits = bits_of(x)
    top = tl.max(bits & MAGNITUDE, axis=1)
    if MODE == LEAST_SQUARES:
        roomy = float_of(top) <= half  # false for NaN
        negative = roomy & (tl.max(bits, axis=1) != top)  # as signed integers: is +max absent?
        extreme = tl.where(roomy & (top > 0), float_of(top), 1.0)
        shrink = best_shrink(x, tl.where(negative, -extreme, extreme), QMAX, TABLE)
        code = block_scale(top, tl.where(roomy, shrink, 1.0), limit, QMAX)
        code = tl.where(negative & (code > 0), code + SIGN, code)
    else:
        code = block_scale(top, 1.0, limit, QMAX)
    scale = scale_value(code)
    lift, r = reciprocal(scale)
    t = (x * lift[:, None]) * r[:, None]
    t = tl.where((top < INFINITY_BITS)[:, None], t, 0.0)
    if MODE == STOCHASTIC:
        near = round_even(t)
        low = near - (near > t).to(tl.float32)
        position = start + tiles.offsets(x.shape[0], x.shape[1], BLOCK)
        t = low + (uniform(hash32(position, k0, k1)) < t - low).to(tl.float32)
    if MODE == LEAST_SQUARES:
        t = tl.minimum(t, tl.where(roomy, QMAX + 1.0, QMAX * 1.0)[:, None])
    else:
        t = tl.minimum(t, QMAX * 1.0)
    return round_even(tl.maximum(t, -QMAX * 1.0)), code, scale


@triton.jit
def _encode_tile(
    x, wire, tile, start, n, cut, limit, half, k0, k1, BITS: tl.constexpr, MODE: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TABLE: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    QMAX: tl.constexpr = (1 << (BITS - 1)) - 1
    values = tiles.read(x, start, n, ROWS, COLUMNS, BLOCK, FULL)
    q, code, _ = quantize_tile(values, start, limit, half, k0, k1, QMAX, MODE, BLOCK, TABLE)
    codes = integer(q) + QMAX
    if not FULL:
        codes = tl.where(tiles.inside(start, n, ROWS, COLUMNS, BLOCK), codes, 0)
    tiles.pack(codes, wire, tile, cut, BITS, ROWS, COLUMNS, BLOCK, FULL)
    tiles.write_scales(wire + cut, code, tile, tl.cdiv(n, BLOCK), ROWS)


@triton.jit(do_not_specialize=["n", "cut", "limit", "k0", "k1"])
def _quantize(
    x, wire, n, cut, limit, half, k0, k1, BITS: tl.constexpr, MODE: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    start = tile * (ROWS * BLOCK)
    if (start + ROWS * BLOCK <= n) & (COLUMNS == BLOCK):
        _encode_tile(
            x, wire, tile, start, n, cut, limit, half, k0, k1, BITS, MODE, BLOCK, ROWS, COLUMNS, TABLE, True
        )
    else:
        _encode_tile(
            x, wire, tile, start, n, cut, limit, half, k0, k1, BITS, MODE, BLOCK, ROWS, COLUMNS, TABLE, False
        )


@triton.jit
def dequantize_tile(
    wire, tile, n, cut, BITS: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """float32[ROWS, COLUMNS]: code · scale, an exact product."""
    codes = tiles.unpack(wire, tile, cut, BITS, ALIGNED, ROWS, COLUMNS, BLOCK, FULL)
    scale = scale_value(tiles.read_scales(wire + cut, tile, tl.cdiv(n, BLOCK), ALIGNED, ROWS))
    return (codes - ((1 << (BITS - 1)) - 1)).to(tl.float32) * scale[:, None]


@triton.jit
def _decode_tile(
    wire, out, tile, start, n, cut, BITS: tl.constexpr, ALIGNED: tl.constexpr, ADD: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    values = dequantize_tile(wire, tile, n, cut, BITS, ALIGNED, BLOCK, ROWS, COLUMNS, FULL)
    if ADD:
        values = tiles.read(out, start, n, ROWS, COLUMNS, BLOCK, FULL) + values
    tiles.write(out, values, start, n, ROWS, COLUMNS, BLOCK, FULL)


@triton.jit(do_not_specialize=["n", "cut"])
def _dequantize(
    wire, out, n, cut, BITS: tl.constexpr, ALIGNED: tl.constexpr, ADD: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    start = tile * (ROWS * BLOCK)
    if (start + ROWS * BLOCK <= n) & (COLUMNS == BLOCK):
        _decode_tile(wire, out, tile, start, n, cut, BITS, ALIGNED, ADD, BLOCK, ROWS, COLUMNS, True)
    else:
        _decode_tile(wire, out, tile, start, n, cut, BITS, ALIGNED, ADD, BLOCK, ROWS, COLUMNS, False)


def mode_of(stochastic, mse):
    return STOCHASTIC if stochastic else LEAST_SQUARES if mse else NEAREST


@functools.cache
def candidates(bits):
    """The least-squares candidates, for the kernel to unroll: (step, 1/step, c) each."""
    return tuple(layout.shrink_candidate(j, bits) for j in range(layout.SHRINKS))


@functools.cache
def scale_limit(factor, fmax):
    """The largest scale code whose scale · factor does not exceed fmax: decoding is monotonous."""
    codes = torch.arange(scales.LARGEST + 1, dtype=torch.int32)
    return int((scales.decode_scale(codes) * factor <= fmax).sum()) - 1


def encode_arguments(bits, block, dtype, stochastic, mse, seed, least_rows=1):
    """What the encoding kernels share: (scalars, constants, rows of a tile)."""
    fmax = torch.finfo(dtype).max
    rows, columns, warps = tiling(block, least_rows, SEARCH_TILE if mse and not stochastic else TILE)
    scalars = (scale_limit(layout.qmax(bits), fmax), fmax / 2, *map(signed, split(seed)))
    constants = {"BITS": bits, "MODE": mode_of(stochastic, mse).value, "BLOCK": block, "ROWS": rows}
    return scalars, constants | {"COLUMNS": columns, "TABLE": candidates(bits), "warps": warps}, rows


def programs_for(n, bits, block, rows):
    """Programs that cover all blocks, and the padding byte even where that begins a new row."""
    return triton.cdiv(layout.codes_bytes(n, bits), rows * block * bits // 8)


def quantize(x, bits, block, stochastic, mse, seed):
    n, cut = x.numel(), layout.codes_bytes(x.numel(), bits)
    wire = torch.empty(layout.quantized_bytes(n, bits, block, x.dtype), dtype=torch.uint8, device=x.device)
    scalars, constants, rows = encode_arguments(bits, block, x.dtype, stochastic, mse, seed)
    launch(_quantize, programs_for(n, bits, block, rows), x, wire, n, cut, *scalars, **constants)
    return wire


def dequantize(wire, n, bits, block, dtype, onto):
    out = torch.empty(n, dtype=dtype, device=wire.device) if onto is None else onto
    rows, columns, warps = tiling(block)
    constants = {"BITS": bits, "ALIGNED": wire.data_ptr() % 4 == 0, "ADD": onto is not None, "BLOCK": block}
    launch(
        _dequantize, triton.cdiv(n, rows * block), wire.contiguous(), out, n, layout.codes_bytes(n, bits),
        ROWS=rows, COLUMNS=columns, warps=warps, **constants,
    )  # fmt: skip
    return out
