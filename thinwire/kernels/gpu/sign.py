"""The scaled sign in Triton: a tile of blocks a program, as in quantize.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from thinwire.kernels import sign as layout
from thinwire.kernels.gpu import tile as tiles
from thinwire.kernels.gpu.launch import launch, tiling
from thinwire.kernels.gpu.quantize import programs_for, scale_limit
from thinwire.kernels.gpu.scalar import (
    INFINITY_BITS,
    MAGNITUDE,
    NONFINITE,
    bits_of,
    float_of,
    integer,
    round_even,
    scale_code,
    scale_value,
)
from thinwire.kernels.quantize import codes_bytes

GRID = tl.constexpr(float(layout.GRID))


@triton.jit
def _mean_scale(x, count, limit):
    """Scale codes of the blocks' mean magnitudes, summed on the integer grid; count: values in each block."""
    COLUMNS: tl.constexpr = x.shape[1]
    top = tl.max(bits_of(x) & MAGNITUDE, axis=1)
    good = (top > 0) & (top < INFINITY_BITS)
    absmax = tl.where(good, float_of(top), 1.0)
    steps = integer(
        round_even(tl.math.div_rn(tl.where(good[:, None], tl.abs(x), 0.0), absmax[:, None]) * GRID)
    )
    # a step is at most 2^20: 1024 of them fit 32 bits
    total = tl.sum(steps if COLUMNS <= 1024 else steps.to(tl.int64), axis=1).to(tl.float64)
    mean = (absmax.to(tl.float64) * total / (count.to(tl.float64) * GRID)).to(tl.float32)
    code = tl.where(mean > 0.0, scale_code(mean, limit, True), 0)
    return tl.where(good, code, tl.where(top == 0, 0, NONFINITE))


@triton.jit
def _encode_tile(x, wire, tile, start, n, cut, limit, BLOCK: tl.constexpr, ROWS: tl.constexpr,
                 COLUMNS: tl.constexpr, FULL: tl.constexpr):  # fmt: skip
    values = tiles.read(x, start, n, ROWS, COLUMNS, BLOCK, FULL)
    tiles.pack((values < 0.0).to(tl.int32), wire, tile, cut, 1, ROWS, COLUMNS, BLOCK, FULL)
    count = tl.minimum(tl.maximum(n - start - tl.arange(0, ROWS) * BLOCK, 1), BLOCK)
    code = _mean_scale(values, count, limit)
    tiles.write_scales(wire + cut, code, tile, tl.cdiv(n, BLOCK), ROWS)


@triton.jit(do_not_specialize=["n", "cut", "limit"])
def _encode(x, wire, n, cut, limit, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    tile = tl.program_id(0).to(tl.int64)
    start = tile * (ROWS * BLOCK)
    if (start + ROWS * BLOCK <= n) & (COLUMNS == BLOCK):
        _encode_tile(x, wire, tile, start, n, cut, limit, BLOCK, ROWS, COLUMNS, True)
    else:
        _encode_tile(x, wire, tile, start, n, cut, limit, BLOCK, ROWS, COLUMNS, False)


@triton.jit
def _decode_tile(wire, out, tile, start, n, cut, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
                 ROWS: tl.constexpr, COLUMNS: tl.constexpr, FULL: tl.constexpr):  # fmt: skip
    negative = tiles.unpack(wire, tile, cut, 1, ALIGNED, ROWS, COLUMNS, BLOCK, FULL)
    scale = scale_value(tiles.read_scales(wire + cut, tile, tl.cdiv(n, BLOCK), ALIGNED, ROWS))
    values = float_of(bits_of(scale)[:, None] ^ (negative << 31))
    tiles.write(out, values, start, n, ROWS, COLUMNS, BLOCK, FULL)


@triton.jit(do_not_specialize=["n", "cut"])
def _decode(wire, out, n, cut, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
            COLUMNS: tl.constexpr):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    start = tile * (ROWS * BLOCK)
    if (start + ROWS * BLOCK <= n) & (COLUMNS == BLOCK):
        _decode_tile(wire, out, tile, start, n, cut, ALIGNED, BLOCK, ROWS, COLUMNS, True)
    else:
        _decode_tile(wire, out, tile, start, n, cut, ALIGNED, BLOCK, ROWS, COLUMNS, False)


def encode_sign(x, block):
    n = x.numel()
    wire = torch.empty(layout.sign_bytes(n, block, x.dtype), dtype=torch.uint8, device=x.device)
    rows, columns, warps = tiling(block)
    launch(
        _encode, programs_for(n, 1, block, rows), x, wire, n, codes_bytes(n, 1),
        scale_limit(1, torch.finfo(x.dtype).max), BLOCK=block, ROWS=rows, COLUMNS=columns, warps=warps,
    )  # fmt: skip
    return wire


def decode_sign(wire, n, block, dtype):
    out = torch.empty(n, dtype=dtype, device=wire.device)
    rows, columns, warps = tiling(block)
    launch(
        _decode, triton.cdiv(n, rows * block), wire.contiguous(), out, n, codes_bytes(n, 1),
        ALIGNED=wire.data_ptr() % 4 == 0, BLOCK=block, ROWS=rows, COLUMNS=columns, warps=warps,
    )  # fmt: skip
    return out
