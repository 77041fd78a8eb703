"""The fused activation delta in Triton: one pass reads x and h, and writes message and new mirror."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from thinwire.kernels import delta as layout
from thinwire.kernels import quantize as codes_layout
from thinwire.kernels.gpu import tile as tiles
from thinwire.kernels.gpu.launch import launch, tiling
from thinwire.kernels.gpu.quantize import dequantize_tile, encode_arguments, programs_for, quantize_tile
from thinwire.kernels.gpu.scalar import INFINITY_BITS, MAGNITUDE, bits_of, integer

GATE_ROWS = 8  # a tile has at least as many blocks as a byte of the gate bitmap


@triton.jit
def _absmax_bits(x):
    """int32[ROWS]: bits of max|x|; as integers NaN is above Inf and both are above all else."""
    return tl.max(bits_of(x) & MAGNITUDE, axis=1)


@triton.jit
def _write_gate(gate, phi, tile, blocks, ROWS: tl.constexpr):
    """bool[ROWS] → ROWS / 8 bytes."""
    row = tile * ROWS + tl.arange(0, ROWS)
    eights = tl.reshape((phi & (row < blocks)).to(tl.int32), [ROWS // 8, 8])
    bytes_ = tl.sum(eights << tl.arange(0, 8)[None, :], axis=1)
    place = tile * (ROWS // 8) + tl.arange(0, ROWS // 8)
    tl.store(gate + place, bytes_.to(tl.uint8), mask=place * 8 < blocks)


@triton.jit
def _read_gate(gate, tile, blocks, ROWS: tl.constexpr):
    """bool[ROWS]."""
    row = tile * ROWS + tl.arange(0, ROWS)
    return (tl.load(gate + (row >> 3), mask=row < blocks, other=0).to(tl.int32) >> (row & 7)) & 1 == 1


@triton.jit
def _encode_tile(
    x, h, out, wire, tile, start, n, cut, end, limit, half, k0, k1,
    GATE: tl.constexpr, BITS: tl.constexpr, MODE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, TABLE: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    QMAX: tl.constexpr = (1 << (BITS - 1)) - 1
    values = tiles.read(x, start, n, ROWS, COLUMNS, BLOCK, FULL)
    base = tiles.read(h, start, n, ROWS, COLUMNS, BLOCK, FULL)
    u = values - base
    if GATE:
        top = _absmax_bits(values)
        phi = (_absmax_bits(u) <= top) & (top <= INFINITY_BITS)  # a NaN compares false, as in the reference
        base = tl.where(phi[:, None], base, 0.0)
        u = values - base
        _write_gate(wire + end, phi, tile, tl.cdiv(n, BLOCK), ROWS)
    q, code, scale = quantize_tile(u, start, limit, half, k0, k1, QMAX, MODE, BLOCK, TABLE)
    tiles.write(out, base + q * scale[:, None], start, n, ROWS, COLUMNS, BLOCK, FULL)
    codes = integer(q) + QMAX
    if not FULL:
        codes = tl.where(tiles.inside(start, n, ROWS, COLUMNS, BLOCK), codes, 0)
    tiles.pack(codes, wire, tile, cut, BITS, ROWS, COLUMNS, BLOCK, FULL)
    tiles.write_scales(wire + cut, code, tile, tl.cdiv(n, BLOCK), ROWS)


@triton.jit(do_not_specialize=["n", "cut", "end", "limit", "k0", "k1"])
def _encode(
    x, h, out, wire, n, cut, end, limit, half, k0, k1,
    GATE: tl.constexpr, BITS: tl.constexpr, MODE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    start = tile * (ROWS * BLOCK)
    if (start + ROWS * BLOCK <= n) & (COLUMNS == BLOCK):
        _encode_tile(
            x, h, out, wire, tile, start, n, cut, end, limit, half, k0, k1,
            GATE, BITS, MODE, BLOCK, ROWS, COLUMNS, TABLE, True,
        )  # fmt: skip
    else:
        _encode_tile(
            x, h, out, wire, tile, start, n, cut, end, limit, half, k0, k1,
            GATE, BITS, MODE, BLOCK, ROWS, COLUMNS, TABLE, False,
        )  # fmt: skip


@triton.jit
def _decode_tile(
    wire, h, out, y, tile, start, n, cut, end, GATE: tl.constexpr, BITS: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    base = tiles.read(h, start, n, ROWS, COLUMNS, BLOCK, FULL)
    if GATE:
        base = tl.where(_read_gate(wire + end, tile, tl.cdiv(n, BLOCK), ROWS)[:, None], base, 0.0)
    values = base + dequantize_tile(wire, tile, n, cut, BITS, ALIGNED, BLOCK, ROWS, COLUMNS, FULL)
    tiles.write(y, values, start, n, ROWS, COLUMNS, BLOCK, FULL)
    tiles.write(out, values, start, n, ROWS, COLUMNS, BLOCK, FULL)


@triton.jit(do_not_specialize=["n", "cut", "end"])
def _decode(
    wire, h, out, y, n, cut, end, GATE: tl.constexpr, BITS: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    start = tile * (ROWS * BLOCK)
    if (start + ROWS * BLOCK <= n) & (COLUMNS == BLOCK):
        _decode_tile(
            wire, h, out, y, tile, start, n, cut, end, GATE, BITS, ALIGNED, BLOCK, ROWS, COLUMNS, True
        )
    else:
        _decode_tile(
            wire, h, out, y, tile, start, n, cut, end, GATE, BITS, ALIGNED, BLOCK, ROWS, COLUMNS, False
        )


def encode_delta(x, h, out, bits, block, gate, stochastic, mse, seed):
    n, cut = x.numel(), codes_layout.codes_bytes(x.numel(), bits)
    wire = torch.empty(layout.delta_bytes(n, bits, block, x.dtype, gate), dtype=torch.uint8, device=x.device)
    scalars, constants, rows = encode_arguments(bits, block, x.dtype, stochastic, mse, seed, GATE_ROWS)
    end = codes_layout.quantized_bytes(n, bits, block, x.dtype)
    programs = programs_for(n, bits, block, rows)
    launch(_encode, programs, x, h, out, wire, n, cut, end, *scalars, GATE=gate, **constants)
    return wire


def decode_delta(wire, h, out, bits, block, dtype, gate):
    n = h.numel()
    y = torch.empty(n, dtype=dtype, device=wire.device)
    rows, columns, warps = tiling(block)
    cut, end = codes_layout.codes_bytes(n, bits), codes_layout.quantized_bytes(n, bits, block, dtype)
    launch(
        _decode, triton.cdiv(n, rows * block), wire.contiguous(), h, out, y, n, cut, end,
        GATE=gate, BITS=bits, ALIGNED=wire.data_ptr() % 4 == 0, BLOCK=block, ROWS=rows, COLUMNS=columns,
        warps=warps,
    )  # fmt: skip
    return y
