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

from thinwire.kernels.gpu.scalar import INTERPRETED, MAGNITUDE, bits_of, hash32, hash32_near, narrow, widen


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
def hashes(start, k0, k1, SHAPE: tl.constexpr, BLOCK: tl.constexpr):
    """uint32[PARTS, ROWS, WIDTH]: hash32 of the places of a tile that begins at value `start`."""
    if (SHAPE[1] * BLOCK) & (SHAPE[1] * BLOCK - 1) == 0:  # no carry into the high word inside a tile
        return hash32_near(start, offsets(SHAPE, BLOCK), k0, k1)
    return hash32(start + offsets(SHAPE, BLOCK), k0, k1)


@triton.jit
def is_full(start, n, SHAPE: tl.constexpr, BLOCK: tl.constexpr):
    """Does the tile at `start` lie within n values, in whole blocks?"""
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
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def row_top(x):
    """float32 tile → int32[ROWS]: bits of max|x|, above those of infinity where there is a NaN.

    On the card by the float maximum, whose operands take an absolute value for nothing.
    """
    if INTERPRETED:
        top = row_max(bits_of(x) & MAGNITUDE)
    else:
        top = bits_of(tl.reduce(tl.reduce(tl.abs(x), 0, _larger), 1, _larger))
    return top


@triton.jit
def row_sum(x):
    """The sum over each block."""
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
    """Write a tile; what lies beyond n is left out."""
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
def pack(
    codes, wire, tile, size, BITS: tl.constexpr, SHAPE: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr,
    BIAS: tl.constexpr = 0,
):  # fmt: skip
    """int32[PARTS, ROWS, WIDTH]: codes + BIAS → the tile's bytes, of `size` bytes in all; zero where outside.

    Eight codes make a word of BITS bytes, or four one of four bytes, so that words change threads, never values: a
    store of single bytes would make Triton give each thread 16 values in a row, loads included. The wire is our
    own allocation, so its words are aligned.
    """
    EACH: tl.constexpr = 4 if BITS == 8 else 8
    BYTES: tl.constexpr = EACH * BITS // 8
    WORD: tl.constexpr = 32 if BYTES <= 4 else 64
    ONES: tl.constexpr = ((1 << (BITS * EACH)) - 1) // ((1 << BITS) - 1)  # 1 in each code of a word
    first = tile * (SHAPE[1] * (BLOCK // 8 * BITS))
    wide = codes.to(tl.uint32 if WORD == 32 else tl.uint64)
    some = tl.reshape(wide, [SHAPE[0] * SHAPE[1], SHAPE[2] // EACH, EACH])
    words = tl.sum(some << (tl.arange(0, EACH) * BITS)[None, None, :], axis=2)
    words += (BIAS * ONES) & ((1 << WORD) - 1)
    places, column = _lines(SHAPE, BLOCK // EACH, SHAPE[2] // EACH)
    if FULL and BYTES == 4:
        tl.store((wire + first).to(tl.pointer_type(tl.uint32)) + places, words)
    elif FULL and BYTES == 2:
        tl.store((wire + first).to(tl.pointer_type(tl.uint16)) + places, words.to(tl.uint16))
    else:
        for i in tl.static_range(BYTES):
            place, byte = places * BYTES + i, (words >> (8 * i)).to(tl.uint8)
            used = (column < BLOCK // EACH) & (first + place < size)
            tl.store(wire + first + place, byte, mask=None if FULL else used)


@triton.jit
def unpack(
    wire, tile, size, BITS: tl.constexpr, ALIGNED: tl.constexpr, SHAPE: tl.constexpr, BLOCK: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """The inverse: int32[PARTS, ROWS, WIDTH]. ALIGNED: the wire may be read in words (a message lies anywhere)."""
    EACH: tl.constexpr = 4 if BITS == 8 else 8
    BYTES: tl.constexpr = EACH * BITS // 8
    first = tile * (SHAPE[1] * (BLOCK // 8 * BITS))
    places, column = _lines(SHAPE, BLOCK // EACH, SHAPE[2] // EACH)
    if FULL and ALIGNED and BYTES == 4:
        words = tl.load((wire + first).to(tl.pointer_type(tl.uint32)) + places)
    elif FULL and ALIGNED and BYTES == 2:
        words = tl.load((wire + first).to(tl.pointer_type(tl.uint16)) + places).to(tl.uint32)
    else:
        words = tl.zeros([SHAPE[0] * SHAPE[1], SHAPE[2] // EACH], tl.uint32 if BYTES <= 4 else tl.uint64)
        for i in tl.static_range(BYTES):
            place = places * BYTES + i
            used = (column < BLOCK // EACH) & (first + place < size)
            byte = tl.load(wire + first + place) if FULL else tl.load(wire + first + place, mask=used, other=0)
            words |= byte.to(words.dtype) << (8 * i)
    some = (words[:, :, None] >> (tl.arange(0, EACH) * BITS)[None, None, :]) & ((1 << BITS) - 1)
    return tl.reshape(some, [SHAPE[0], SHAPE[1], SHAPE[2]]).to(tl.int32)


@triton.jit
def write_scales(tail, codes, tile, blocks, ROWS: tl.constexpr):
    """int32[ROWS] scale codes → 16 bits each. A tail begins at an even byte of our own allocation."""
    row = tile * ROWS + tl.arange(0, ROWS)
    tl.store(tail.to(tl.pointer_type(tl.uint16)) + row, codes.to(tl.uint16), mask=row < blocks)


@triton.jit
def read_scales(tail, tile, blocks, ALIGNED: tl.constexpr, ROWS: tl.constexpr):
    """The bits of the scales of a tile's blocks, from the end of a message."""
    row = tile * ROWS + tl.arange(0, ROWS)
    if ALIGNED:
        return tl.load(tail.to(tl.pointer_type(tl.uint16)) + row, mask=row < blocks, other=0).to(tl.int32)
    low = tl.load(tail + 2 * row, mask=row < blocks, other=0).to(tl.int32)
    return low | (tl.load(tail + 2 * row + 1, mask=row < blocks, other=0).to(tl.int32) << 8)
