"""The fused activation delta in Triton: one pass reads x and h, and writes message and new mirror."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from thinwire.kernels import delta as layout
from thinwire.kernels import quantize as codes_layout
from thinwire.kernels.gpu import tile as tiles
from thinwire.kernels.gpu.launch import Call, tiling
from thinwire.kernels.gpu.quantize import (
    dequantize_tile,
    encode_arguments,
    message,
    programs_for,
    quantize_tile,
    random_keys,
    write_codes,
)
from thinwire.kernels.gpu.scalar import INFINITY_BITS, as_float
from thinwire.kernels.gpu.scratch import true_flag

WIDTH = 64  # values in a segment: a line of a bfloat16 mirror
GATE_ROWS = 8  # a tile has at least as many blocks as a byte of the gate bitmap


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
    x, h, out, wire, finite, tile, start, n, cut, end, limit, half, k0, k1,
    GATE: tl.constexpr, BITS: tl.constexpr, MODE: tl.constexpr, TABLE: tl.constexpr,
    SHAPE: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    QMAX: tl.constexpr = (1 << (BITS - 1)) - 1
    values = tiles.read(x, start, n, SHAPE, BLOCK, FULL)
    base = tiles.read(h, start, n, SHAPE, BLOCK, FULL)
    u = values - base
    if GATE:
        top = tiles.row_top(values)
        phi = (tiles.row_top(u) <= top) & (top <= INFINITY_BITS)  # a NaN compares false, as in the reference
        base = tl.where(tiles.row(phi), base, 0.0)
        u = values - base
        _write_gate(wire + end, phi, tile, tl.cdiv(n, BLOCK), SHAPE[1])
    q, code, scale = quantize_tile(u, start, limit, half, k0, k1, QMAX, MODE, TABLE, SHAPE, BLOCK)
    tiles.write(out, base + as_float(q) * tiles.row(scale), start, n, SHAPE, BLOCK, FULL)
    write_codes(q, code, wire, finite, tile, start, n, cut, BITS, SHAPE, BLOCK, FULL)


@triton.jit(do_not_specialize=["n", "cut", "end", "limit", "k0", "k1"])
def _encode(
    x, h, out, wire, finite, n, cut, end, limit, half, k0, k1,
    GATE: tl.constexpr, BITS: tl.constexpr, MODE: tl.constexpr, TABLE: tl.constexpr,
    SHAPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    start = tile * (SHAPE[1] * BLOCK)
    if tiles.is_full(start, n, SHAPE, BLOCK):
        _encode_tile(
            x, h, out, wire, finite, tile, start, n, cut, end, limit, half, k0, k1,
            GATE, BITS, MODE, TABLE, SHAPE, BLOCK, True,
        )  # fmt: skip
    else:
        _encode_tile(
            x, h, out, wire, finite, tile, start, n, cut, end, limit, half, k0, k1,
            GATE, BITS, MODE, TABLE, SHAPE, BLOCK, False,
        )  # fmt: skip


@triton.jit
def _decode_tile(
    wire, h, out, y, tile, start, n, cut, end, GATE: tl.constexpr, BITS: tl.constexpr, ALIGNED: tl.constexpr,
    SHAPE: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    base = tiles.read(h, start, n, SHAPE, BLOCK, FULL)
    if GATE:
        phi = _read_gate(wire + end, tile, tl.cdiv(n, BLOCK), SHAPE[1])
        base = tl.where(tiles.row(phi), base, 0.0)
    values = base + dequantize_tile(wire, tile, n, cut, BITS, ALIGNED, SHAPE, BLOCK, FULL)
    tiles.write(y, values, start, n, SHAPE, BLOCK, FULL)
    tiles.write(out, values, start, n, SHAPE, BLOCK, FULL)


@triton.jit(do_not_specialize=["n", "cut", "end"])
def _decode(
    wire, h, out, y, n, cut, end, GATE: tl.constexpr, BITS: tl.constexpr, ALIGNED: tl.constexpr,
    SHAPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    start = tile * (SHAPE[1] * BLOCK)
    if tiles.is_full(start, n, SHAPE, BLOCK):
        _decode_tile(wire, h, out, y, tile, start, n, cut, end, GATE, BITS, ALIGNED, SHAPE, BLOCK, True)
    else:
        _decode_tile(wire, h, out, y, tile, start, n, cut, end, GATE, BITS, ALIGNED, SHAPE, BLOCK, False)


def encode_delta(x, h, out, bits, block, gate, mode, seed, wire=None, finite=None):
    """`encode_delta` of kernels/delta.py, by Triton."""
    size, call = _encode_plan(x.numel(), bits, block, x.dtype, gate, mode)
    wire = message(size, x.device, wire)
    call(x, h, out, wire, true_flag(x) if finite is None else finite, keys=random_keys(mode, seed))
    return wire


@functools.lru_cache(maxsize=1024)
def _encode_plan(n, bits, block, dtype, gate, mode):
    """(bytes of the message, the launch)."""
    tiled, (scalars, constants) = encode_tiling(block, mode), encode_arguments(bits, dtype, mode)
    numbers = n, codes_layout.codes_bytes(n, bits), codes_layout.quantized_bytes(n, bits, block, dtype), *scalars
    programs = programs_for(n, bits, block, tiled["SHAPE"])
    call = Call(_encode, programs, numbers, GATE=gate, BLOCK=block, **constants, **tiled)
    return layout.delta_bytes(n, bits, block, dtype, gate), call


def encode_tiling(block, mode):
    """Segments of a bfloat16 mirror's line, and whole bytes of the gate."""
    registers = 64 if mode == codes_layout.NEAREST else None
    return tiling(block, WIDTH, tile=2048, registers=registers, least_rows=GATE_ROWS)


def decode_delta(wire, h, out, bits, block, dtype, gate, y=None):
    """`decode_delta` of kernels/delta.py, by Triton."""
    n, wire = h.numel(), wire.contiguous()
    y = torch.empty(n, dtype=dtype, device=wire.device) if y is None else y
    _decode_plan(n, bits, block, dtype, gate, wire.data_ptr() % 4 == 0)(wire, h, out, y)
    return y


@functools.lru_cache(maxsize=1024)
def _decode_plan(n, bits, block, dtype, gate, aligned):
    tiled = tiling(block, WIDTH, tile=1024)
    numbers = n, codes_layout.codes_bytes(n, bits), codes_layout.quantized_bytes(n, bits, block, dtype)
    constants = {"GATE": gate, "BITS": bits, "ALIGNED": aligned, "BLOCK": block}
    return Call(_decode, triton.cdiv(n, tiled["SHAPE"][1] * block), numbers, **constants, **tiled)
