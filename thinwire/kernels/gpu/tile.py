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

from thinwire.kernels.gpu.scalar import (
    INTERPRETED,
    MAGNITUDE,
    bits_of,
    golden,
    hash_start,
    multiply_add,
    narrow,
    reciprocal,
    widen,
)


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
def hash_sums(start, k0, SHAPE: tl.constexpr, BLOCK: tl.constexpr):
    """uint32[PARTS, ROWS, WIDTH]: what `hash_sum` takes, of the places of a tile that begins at value `start`."""
    if (SHAPE[1] * BLOCK) & (SHAPE[1] * BLOCK - 1) == 0:  # no carry into the high word inside a tile
        rows = golden(tl.arange(0, SHAPE[1]) * BLOCK) + hash_start(start, k0)
        parts, width = golden(tl.arange(0, SHAPE[0]) * SHAPE[2]), golden(tl.arange(0, SHAPE[2]))
        return parts[:, None, None] + width[None, None, :] + rows[None, :, None]
    return hash_start(start + offsets(SHAPE, BLOCK), k0)


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
def quotient(x, top, WIDE: tl.constexpr):
    """x / top[ROWS] with |x| ≤ top, rounded as a division is, at least where it is above 2⁻³⁰. One division per block.

    Multiplied by 1/top, x is off by less than two units in the last place; each remainder times 1/top corrects it, and
    the second correction is rounded from the true quotient (Markstein). Of numbers with 11 bits the first is: their
    quotients keep 2⁻³⁶ away from where rounding changes. WIDE: they have more. lift keeps all within float32's range.
    """
    if INTERPRETED:  # which has no multiplication with an addition in one rounding
        return tl.math.div_rn(x, row(top))
    lift, inverse = reciprocal(top)
    x, top, inverse = x * row(lift), row(-top * lift), row(inverse)
    q = x * inverse
    q = multiply_add(multiply_add(q, top, x), inverse, q)
    if WIDE:
        q = multiply_add(multiply_add(q, top, x), inverse, q)
    return q


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
    BIAS: tl.constexpr = 0, bad=None, ZERO: tl.constexpr = 0,
):  # fmt: skip
    """int32[PARTS, ROWS, WIDTH]: codes + BIAS → the tile's bytes, of `size` bytes in all; zero where outside.

    bad: bool[ROWS], blocks all of whose codes are ZERO instead.

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
    if bad is not None:
        lines = tl.reshape(tl.broadcast_to(bad[None, :], [SHAPE[0], SHAPE[1]]), [SHAPE[0] * SHAPE[1]])
        words = tl.where(lines[:, None], tl.full([], ZERO * ONES, words.dtype), words)
    places, column = _lines(SHAPE, BLOCK // EACH, SHAPE[2] // EACH)
    if FULL and BYTES == 4:
        tl.store((wire + first).to(tl.pointer_type(tl.uint32)) + places, words)
    elif FULL and BYTES == 2:
        tl.store((wire + first).to(tl.pointer_type(tl.uint16)) + places, words.to(tl.uint16))
    elif FULL and BYTES == 3 and SHAPE[2] % 32 == 0 and BLOCK % 32 == 0:
        _store_threes(wire + first, words, SHAPE, BLOCK)
    elif FULL and BYTES == 1 and SHAPE[2] % 32 == 0 and BLOCK % 32 == 0:
        _store_ones(wire + first, words, SHAPE, BLOCK)
    else:
        for i in tl.static_range(BYTES):
            place, byte = places * BYTES + i, (words >> (8 * i)).to(tl.uint8)
            used = (column < BLOCK // EACH) & (first + place < size)
            tl.store(wire + first + place, byte, mask=None if FULL else used)


@triton.jit
def _fours(words, SHAPE: tl.constexpr):
    """The first, second, third and last of every four words."""
    even, odd = tl.split(tl.reshape(words, [SHAPE[0] * SHAPE[1], SHAPE[2] // 32, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _store_ones(wire, words, SHAPE: tl.constexpr, BLOCK: tl.constexpr):
    """Words of 8 bits, four of which make one of 32."""
    a, b, c, d = _fours(words, SHAPE)
    places, _ = _lines(SHAPE, BLOCK // 32, SHAPE[2] // 32)
    tl.store(wire.to(tl.pointer_type(tl.uint32)) + places, a | (b << 8) | (c << 16) | (d << 24))


@triton.jit
def _store_threes(wire, words, SHAPE: tl.constexpr, BLOCK: tl.constexpr):
    """Words of 24 bits, four of which make three of 32."""
    a, b, c, d = _fours(words, SHAPE)
    places, _ = _lines(SHAPE, BLOCK // 32, SHAPE[2] // 32)
    target = wire.to(tl.pointer_type(tl.uint32)) + places * 3
    tl.store(target, a | (b << 24))
    tl.store(target + 1, (b >> 8) | (c << 16))
    tl.store(target + 2, (c >> 16) | (d << 8))


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
def write_finite(finite, bad):
    """bool[ROWS]: the flag becomes false where any is true."""
    none = bad.to(tl.int32) * 0
    tl.store(finite + none, none > 0, mask=bad)


@triton.jit
def read_scales(tail, tile, blocks, ALIGNED: tl.constexpr, ROWS: tl.constexpr):
    """The bits of the scales of a tile's blocks, from the end of a message."""
    row = tile * ROWS + tl.arange(0, ROWS)
    if ALIGNED:
        return tl.load(tail.to(tl.pointer_type(tl.uint16)) + row, mask=row < blocks, other=0).to(tl.int32)
    low = tl.load(tail + 2 * row, mask=row < blocks, other=0).to(tl.int32)
    return low | (tl.load(tail + 2 * row + 1, mask=row < blocks, other=0).to(tl.int32) << 8)
