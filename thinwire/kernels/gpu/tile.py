"""Tiles of whole blocks: int or float [ROWS, COLUMNS], the first BLOCK columns in use, at row `tile · ROWS`.

Tiles inside the tensor take the path FULL, without masks: only then are loads and stores 16 bytes wide. The
last tile, and every tile of a block that is no power of two, takes the masked path.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thinwire.kernels.gpu.scalar import narrow, widen


@triton.jit
def offsets(ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """int32[ROWS, COLUMNS]: positions relative to the tile's first value."""
    return tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def inside(start, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """bool[ROWS, COLUMNS]: which places of the tile that begins at value `start` hold one of the n values."""
    left = tl.minimum(n - start, ROWS * BLOCK).to(tl.int32)
    return (offsets(ROWS, COLUMNS, BLOCK) < left) & (tl.arange(0, COLUMNS)[None, :] < BLOCK)


@triton.jit
def load(
    source, start, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr
):
    """The source's dtype [ROWS, COLUMNS]; zero outside."""
    place = source + start + offsets(ROWS, COLUMNS, BLOCK)
    if FULL:
        return tl.load(place)
    return tl.load(place, mask=inside(start, n, ROWS, COLUMNS, BLOCK), other=0)


@triton.jit
def store(
    target, values, start, n,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    place = target + start + offsets(ROWS, COLUMNS, BLOCK)
    if FULL:
        tl.store(place, values)
    else:
        tl.store(place, values, mask=inside(start, n, ROWS, COLUMNS, BLOCK))


@triton.jit
def read(
    source, start, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr
):
    """float32[ROWS, COLUMNS]; zero outside."""
    return widen(load(source, start, n, ROWS, COLUMNS, BLOCK, FULL))


@triton.jit
def write(
    target, values, start, n,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Store a float32 tile in the target's own dtype, rounded half to even."""
    store(target, narrow(values, target.dtype.element_ty), start, n, ROWS, COLUMNS, BLOCK, FULL)


@triton.jit
def read_run(source, start, n, SIZE: tl.constexpr):
    """SIZE values in the source's dtype from `start`; zero beyond n."""
    place = start + tl.arange(0, SIZE)
    if start + SIZE <= n:
        values = tl.load(source + place)
    else:
        values = tl.load(source + place, mask=place < n, other=0)
    return values


@triton.jit
def pack(
    codes, wire, tile, size,
    BITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """codes: int32[ROWS, COLUMNS], zero outside → the tile's bytes, of `size` bytes in all.

    Eight codes make BITS bytes. The wire is our own allocation, so its words are aligned.
    """
    wire += tile * (ROWS * BLOCK // 8 * BITS)
    if BITS == 8 and FULL:
        tl.store(wire + offsets(ROWS, COLUMNS, BLOCK), codes.to(tl.uint8))
    else:
        wide = codes.to(tl.uint32 if BITS <= 4 else tl.uint64)
        eights = tl.reshape(wide, [ROWS, COLUMNS // 8, 8])
        words = tl.sum(eights << (tl.arange(0, 8) * BITS)[None, None, :], axis=2)
        group = offsets(ROWS, COLUMNS // 8, BLOCK // 8)
        if BITS == 4 and FULL:
            tl.store(wire.to(tl.pointer_type(tl.uint32)) + group, words)
        elif BITS == 2 and FULL:
            tl.store(wire.to(tl.pointer_type(tl.uint16)) + group, words.to(tl.uint16))
        else:
            left = tl.minimum(size - tile * (ROWS * BLOCK // 8 * BITS), ROWS * BLOCK * BITS).to(tl.int32)
            used = (tl.arange(0, COLUMNS // 8) < BLOCK // 8)[None, :]
            for i in tl.static_range(BITS):
                place, byte = group * BITS + i, (words >> (8 * i)).to(tl.uint8)
                if FULL:
                    tl.store(wire + place, byte)
                else:
                    tl.store(wire + place, byte, mask=used & (place < left))


@triton.jit
def unpack(
    wire, tile, size, BITS: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """The inverse: int32[ROWS, COLUMNS]. ALIGNED: the wire may be read in words (a message lies anywhere)."""
    wire += tile * (ROWS * BLOCK // 8 * BITS)
    if BITS == 8 and FULL:
        return tl.load(wire + offsets(ROWS, COLUMNS, BLOCK)).to(tl.int32)
    group = offsets(ROWS, COLUMNS // 8, BLOCK // 8)
    if BITS == 4 and FULL and ALIGNED:
        words = tl.load(wire.to(tl.pointer_type(tl.uint32)) + group)
    elif BITS == 2 and FULL and ALIGNED:
        words = tl.load(wire.to(tl.pointer_type(tl.uint16)) + group).to(tl.uint32)
    else:
        left = tl.minimum(size - tile * (ROWS * BLOCK // 8 * BITS), ROWS * BLOCK * BITS).to(tl.int32)
        used = (tl.arange(0, COLUMNS // 8) < BLOCK // 8)[None, :]
        words = tl.zeros([ROWS, COLUMNS // 8], tl.uint32 if BITS <= 4 else tl.uint64)
        for i in tl.static_range(BITS):
            place = group * BITS + i
            if FULL:
                byte = tl.load(wire + place)
            else:
                byte = tl.load(wire + place, mask=used & (place < left), other=0)
            words |= byte.to(words.dtype) << (8 * i)
    eights = (words[:, :, None] >> (tl.arange(0, 8) * BITS)[None, None, :]) & ((1 << BITS) - 1)
    return tl.reshape(eights, [ROWS, COLUMNS]).to(tl.int32)


@triton.jit
def write_scales(tail, codes, tile, blocks, ROWS: tl.constexpr):
    """int32[ROWS] scale codes → 16 bits each. A tail begins at an even byte of our own allocation."""
    row = tile * ROWS + tl.arange(0, ROWS)
    tl.store(tail.to(tl.pointer_type(tl.uint16)) + row, codes.to(tl.uint16), mask=row < blocks)


@triton.jit
def read_scales(tail, tile, blocks, ALIGNED: tl.constexpr, ROWS: tl.constexpr):
    row = tile * ROWS + tl.arange(0, ROWS)
    if ALIGNED:
        return tl.load(tail.to(tl.pointer_type(tl.uint16)) + row, mask=row < blocks, other=0).to(tl.int32)
    low = tl.load(tail + 2 * row, mask=row < blocks, other=0).to(tl.int32)
    return low | (tl.load(tail + 2 * row + 1, mask=row < blocks, other=0).to(tl.int32) << 8)
