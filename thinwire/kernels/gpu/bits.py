"""Bit packing of small codes in Triton: eight codes make `bits` bytes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from thinwire.kernels.bits import packed_bytes
from thinwire.kernels.gpu import tile as tiles
from thinwire.kernels.gpu.launch import launch, line, tiling

ROW = 128  # packing has no blocks: any multiple of 8 would do
TILED = tiling(ROW, line(1))
VALUES = TILED["SHAPE"][1] * ROW  # a program handles


@triton.jit
def _pack_tile(
    codes, wire, tile, start, n, size,
    BITS: tl.constexpr, SHAPE: tl.constexpr, ROW: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    values = tiles.load(codes, start, n, SHAPE, ROW, FULL)
    tiles.pack(values.to(tl.int32), wire, tile, size, BITS, SHAPE, ROW, FULL)


@triton.jit(do_not_specialize=["n", "size"])
def _pack(codes, wire, n, size, BITS: tl.constexpr, SHAPE: tl.constexpr, ROW: tl.constexpr):
    tile = tl.program_id(0).to(tl.int64)
    start = tile * (SHAPE[1] * ROW)
    if tiles.is_full(start, n, SHAPE, ROW):
        _pack_tile(codes, wire, tile, start, n, size, BITS, SHAPE, ROW, True)
    else:
        _pack_tile(codes, wire, tile, start, n, size, BITS, SHAPE, ROW, False)


@triton.jit
def _unpack_tile(
    wire, codes, tile, start, n, size, BITS: tl.constexpr, ALIGNED: tl.constexpr,
    SHAPE: tl.constexpr, ROW: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    values = tiles.unpack(wire, tile, size, BITS, ALIGNED, SHAPE, ROW, FULL)
    tiles.store(codes, values.to(tl.uint8), start, n, SHAPE, ROW, FULL)


@triton.jit(do_not_specialize=["n", "size"])
def _unpack(wire, codes, n, size, BITS: tl.constexpr, ALIGNED: tl.constexpr, SHAPE: tl.constexpr, ROW: tl.constexpr):
    tile = tl.program_id(0).to(tl.int64)
    start = tile * (SHAPE[1] * ROW)
    if tiles.is_full(start, n, SHAPE, ROW):
        _unpack_tile(wire, codes, tile, start, n, size, BITS, ALIGNED, SHAPE, ROW, True)
    else:
        _unpack_tile(wire, codes, tile, start, n, size, BITS, ALIGNED, SHAPE, ROW, False)


def pack(codes, bits):
    """`pack` of kernels/bits.py, by Triton."""
    n, size = codes.numel(), packed_bytes(codes.numel(), bits)
    wire = torch.empty(size, dtype=torch.uint8, device=codes.device)
    launch(_pack, triton.cdiv(n, VALUES), codes, wire, n, size, BITS=bits, ROW=ROW, **TILED)
    return wire


def unpack(wire, n, bits):
    """`unpack` of kernels/bits.py, by Triton."""
    codes = torch.empty(n, dtype=torch.uint8, device=wire.device)
    aligned = wire.data_ptr() % 4 == 0
    launch(_unpack, triton.cdiv(n, VALUES), wire, codes, n, wire.numel(), BITS=bits, ALIGNED=aligned, ROW=ROW, **TILED)
    return codes
