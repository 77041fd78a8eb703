"""Bit packing of small codes in Triton: eight codes make `bits` bytes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from thinwire.kernels.bits import packed_bytes
from thinwire.kernels.gpu import tile as tiles
from thinwire.kernels.gpu.launch import launch, tiling

ROW = 128  # codes a row of a tile; packing has no blocks, any multiple of 8 would do


@triton.jit
def _pack_tile(codes, wire, tile, start, n, size, BITS: tl.constexpr, ROWS: tl.constexpr, ROW: tl.constexpr,
               FULL: tl.constexpr):  # fmt: skip
    values = tiles.load(codes, start, n, ROWS, ROW, ROW, FULL)
    tiles.pack(values.to(tl.int32), wire, tile, size, BITS, ROWS, ROW, ROW, FULL)


@triton.jit(do_not_specialize=["n", "size"])
def _pack(codes, wire, n, size, BITS: tl.constexpr, ROWS: tl.constexpr, ROW: tl.constexpr):
    tile = tl.program_id(0).to(tl.int64)
    start = tile * (ROWS * ROW)
    if start + ROWS * ROW <= n:
        _pack_tile(codes, wire, tile, start, n, size, BITS, ROWS, ROW, True)
    else:
        _pack_tile(codes, wire, tile, start, n, size, BITS, ROWS, ROW, False)


@triton.jit
def _unpack_tile(wire, codes, tile, start, n, size, BITS: tl.constexpr, ALIGNED: tl.constexpr,
                 ROWS: tl.constexpr, ROW: tl.constexpr, FULL: tl.constexpr):  # fmt: skip
    values = tiles.unpack(wire, tile, size, BITS, ALIGNED, ROWS, ROW, ROW, FULL).to(tl.uint8)
    tiles.store(codes, values, start, n, ROWS, ROW, ROW, FULL)


@triton.jit(do_not_specialize=["n", "size"])
def _unpack(wire, codes, n, size, BITS: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr,
            ROW: tl.constexpr):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    start = tile * (ROWS * ROW)
    if start + ROWS * ROW <= n:
        _unpack_tile(wire, codes, tile, start, n, size, BITS, ALIGNED, ROWS, ROW, True)
    else:
        _unpack_tile(wire, codes, tile, start, n, size, BITS, ALIGNED, ROWS, ROW, False)


def pack(codes, bits):
    n, size = codes.numel(), packed_bytes(codes.numel(), bits)
    wire = torch.empty(size, dtype=torch.uint8, device=codes.device)
    rows, _, warps = tiling(ROW)
    programs = triton.cdiv(n, rows * ROW)
    launch(_pack, programs, codes, wire, n, size, BITS=bits, ROWS=rows, ROW=ROW, warps=warps)
    return wire


def unpack(wire, n, bits):
    codes = torch.empty(n, dtype=torch.uint8, device=wire.device)
    rows, _, warps = tiling(ROW)
    constants = {"BITS": bits, "ALIGNED": wire.data_ptr() % 4 == 0, "ROWS": rows, "ROW": ROW}
    launch(_unpack, triton.cdiv(n, rows * ROW), wire, codes, n, wire.numel(), **constants, warps=warps)
    return codes
