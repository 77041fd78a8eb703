"""Tiles of whole blocks: [PARTS, ROWS, WIDTH], one row a block, starting at block `tile · ROWS`.

A block is PARTS segments of WIDTH values, 128 bytes each. That shape makes Triton give eight lanes to a block,
not a whole warp: reads stay coalesced, most of a reduction happens inside a thread, and the arithmetic on a
block's scale, which all its lanes repeat, is done for four blocks at a time. SHAPE is (PARTS, ROWS, WIDTH).

Tiles inside the tensor take the path FULL, without masks: only then are loads and stores 16 bytes wide. The
last tile, and every tile of a block that is no power of two, takes the masked path.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thinwire.kernels.gpu.scalar import narrow, widen


@triton.jit
def _lines(SHAPE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """(places, columns), int32[PARTS · ROWS, WIDTH]: relative to the tile's first value; inside the block.

    Memory is read and written in this form, whose layout is the same in every version of Triton, and reshaped.
    """
    line = tl.arange(0, SHAPE[0] * SHAPE[1])[:, None]
    column = line // SHAPE[1] * WIDTH + tl.arange(0, WIDTH)[None, :]
    return line % SHAPE[1] * BLOCK + column, column


@triton.jit
def columns(SHAPE: tl.constexpr):
    """int32[PARTS, 1, WIDTH]: places inside a block."""
    return tl.arange(0, SHAPE[0])[:, None, None] * SHAPE[2] + tl.arange(0, SHAPE[2])[None, None, :]


@triton.jit
def offsets(SHAPE: tl.constexpr, BLOCK: tl.constexpr):
    """int32[PARTS, ROWS, WIDTH]: places relative to the tile's first value."""
    return tl.arange(0, SHAPE[1])[None, :, None] * BLOCK + columns(SHAPE)


@triton.jit
def inside(start, n, SHAPE: tl.constexpr, BLOCK: tl.constexpr):
    """bool[PARTS, ROWS, WIDTH]: which places of the tile that begins at value `start` hold one of n values."""
    left = tl.minimum(n - start, SHAPE[1] * BLOCK).to(tl.int32)
    return (offsets(SHAPE, BLOCK) < left) & (columns(SHAPE) < BLOCK)


@triton.jit
def is_full(start, n, SHAPE: tl.constexpr, BLOCK: tl.constexpr):
    return (start + SHAPE[1] * BLOCK <= n) & (SHAPE[0] * SHAPE[2] == BLOCK)


@triton.jit
def row(x):
    """[ROWS] → [1, ROWS, 1]."""
    return x[None, :, None]


@triton.jit
def row_max(x):
    """[PARTS, ROWS, WIDTH] → [ROWS]."""
    return tl.max(tl.max(x, axis=0), axis=1)


@triton.jit
def row_sum(x):
    return tl.sum(tl.sum(x, axis=0), axis=1)


@triton.jit
def load(source, start, n, SHAPE: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr):
    """A tile in the source's dtype; zero outside."""
    places, column = _lines(SHAPE, BLOCK, SHAPE[2])
    if FULL:
        lines = tl.load(source + start + places)
    else:
        left = tl.minimum(n - start, SHAPE[1] * BLOCK).to(tl.int32)
        lines = tl.load(source + start + places, mask=(places < left) & (column < BLOCK), other=0)
    return tl.reshape(lines, [SHAPE[0], SHAPE[1], SHAPE[2]])


@triton.jit
def store(target, values, start, n, SHAPE: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr):
    places, column = _lines(SHAPE, BLOCK, SHAPE[2])
    lines = tl.reshape(values, [SHAPE[0] * SHAPE[1], SHAPE[2]])
    if FULL:
        tl.store(target + start + places, lines)
    else:
        left = tl.minimum(n - start, SHAPE[1] * BLOCK).to(tl.int32)
        tl.store(target + start + places, lines, mask=(places < left) & (column < BLOCK))


@triton.jit
def read(source, start, n, SHAPE: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr):
    """A tile as float32; zero outside."""
    return widen(load(source, start, n, SHAPE, BLOCK, FULL))


@triton.jit
def write(target, values, start, n, SHAPE: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr):
    """Store a float32 tile in the target's own dtype, rounded half to even."""
    store(target, narrow(values, target.dtype.element_ty), start, n, SHAPE, BLOCK, FULL)


@triton.jit
def read_run(source, start, n, SIZE: tl.constexpr):
    """SIZE values in the source's dtype from `start`; zero beyond n."""
    place = start + tl.arange(0, SIZE)
    if start + SIZE <= n:  # noqa: SIM108 — Triton has no conditional expression on a run-time value
        values = tl.load(source + place)
    else:
        values = tl.load(source + place, mask=place < n, other=0)
    return values


@triton.jit
def pack(codes, wire, tile, size, BITS: tl.constexpr, SHAPE: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr):
    """codes: int32[PARTS, ROWS, WIDTH], zero outside → the tile's bytes, of `size` bytes in all.

    Eight codes make BITS bytes. The wire is our own allocation, so its words are aligned.
    """
    first = tile * (SHAPE[1] * (BLOCK // 8 * BITS))
    if BITS == 8:
        store(wire, codes.to(tl.uint8), first, size, SHAPE, BLOCK, FULL)
    else:
        wide = codes.to(tl.uint32 if BITS <= 4 else tl.uint64)
        eights = tl.reshape(wide, [SHAPE[0] * SHAPE[1], SHAPE[2] // 8, 8])
        words = tl.sum(eights << (tl.arange(0, 8) * BITS)[None, None, :], axis=2)
        places, column = _lines(SHAPE, BLOCK // 8, SHAPE[2] // 8)
        if BITS == 4 and FULL:
            tl.store((wire + first).to(tl.pointer_type(tl.uint32)) + places, words)
        elif BITS == 2 and FULL:
            tl.store((wire + first).to(tl.pointer_type(tl.uint16)) + places, words.to(tl.uint16))
        else:
            for i in tl.static_range(BITS):
                place, byte = places * BITS + i, (words >> (8 * i)).to(tl.uint8)
                used = (column < BLOCK // 8) & (first + place < size)
                tl.store(wire + first + place, byte, mask=None if FULL else used)


@triton.jit
def unpack(
    wire, tile, size, BITS: tl.constexpr, ALIGNED: tl.constexpr, SHAPE: tl.constexpr, BLOCK: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """The inverse: int32[PARTS, ROWS, WIDTH]. ALIGNED: the wire may be read in words (a message lies anywhere)."""
    first = tile * (SHAPE[1] * (BLOCK // 8 * BITS))
    if BITS == 8:
        return load(wire, first, size, SHAPE, BLOCK, FULL).to(tl.int32)
    places, column = _lines(SHAPE, BLOCK // 8, SHAPE[2] // 8)
    if BITS == 4 and FULL and ALIGNED:
        words = tl.load((wire + first).to(tl.pointer_type(tl.uint32)) + places)
    elif BITS == 2 and FULL and ALIGNED:
        words = tl.load((wire + first).to(tl.pointer_type(tl.uint16)) + places).to(tl.uint32)
    else:
        words = tl.zeros([SHAPE[0] * SHAPE[1], SHAPE[2] // 8], tl.uint32 if BITS <= 4 else tl.uint64)
        for i in tl.static_range(BITS):
            place = places * BITS + i
            used = (column < BLOCK // 8) & (first + place < size)
            byte = tl.load(wire + first + place) if FULL else tl.load(wire + first + place, mask=used, other=0)
            words |= byte.to(words.dtype) << (8 * i)
    eights = (words[:, :, None] >> (tl.arange(0, 8) * BITS)[None, None, :]) & ((1 << BITS) - 1)
    return tl.reshape(eights, [SHAPE[0], SHAPE[1], SHAPE[2]]).to(tl.int32)


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
