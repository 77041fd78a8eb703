"""Threshold selection into given memory: x is read once, and entries are set aside while they are in cache.

1. A program of one warp selects from a tile and puts its entries into the tile's segment, which has room for the usual
   number of them. It counts what it found.
2. From the counts follows each tile's place in the output, and programs bring the segments of many tiles there. Where a
   segment was too short, they select from x again.

A tile is four chunks: of every lane the EACH values, 16 bytes, that it loads at a time. A lane's marks are one word, a
byte a chunk, and what is counted of the four chunks are four 16-bit fields of one integer: a value costs few
instructions, which is what selection from 16-bit values is short of.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from thinwire.kernels.gpu.launch import launch
from thinwire.kernels.gpu.scalar import bits_of, widen

LANES, CHUNKS = tl.constexpr(32), tl.constexpr(4)
SHARE = 16  # a segment has room for one in so many values
TILES, WIDTH, WARPS = 64, 4, 4  # tiles whose segments a program brings to their place, WIDTH entries at a time
PAD = 4096  # places left over that a program fills


@triton.jit
def _passes(run, limit, NANS: tl.constexpr):
    """bool: |run| ≥ limit; NANS: or NaN."""
    edge = widen(tl.load(limit))
    return (tl.abs(run) < edge) == 0 if NANS else tl.abs(run) >= edge


@triton.jit
def _marks(x, limit, start, n, EACH: tl.constexpr, NANS: tl.constexpr):
    """uint32[LANES]: a byte a chunk, a bit a value with |x| ≥ limit; NaN has none, or one with NANS."""
    place = start + tl.arange(0, CHUNKS * LANES * EACH)
    run = widen(tl.load(x + place, mask=place < n, other=0))
    chosen = tl.reshape((_passes(run, limit, NANS) & (place < n)).to(tl.uint32), [CHUNKS, LANES, EACH])
    bytes_ = tl.sum(chosen << tl.arange(0, EACH)[None, None, :], axis=2)
    return tl.sum(bytes_ << (tl.arange(0, CHUNKS) * 8)[:, None], axis=0)


@triton.jit
def _marks_of_full(x, limit, start, EACH: tl.constexpr, NANS: tl.constexpr):
    """The same for full tiles."""
    run = widen(tl.load(x + start + tl.arange(0, CHUNKS * LANES * EACH)))
    chosen = tl.reshape(_passes(run, limit, NANS).to(tl.uint32), [CHUNKS, LANES, EACH])
    bytes_ = tl.sum(chosen << tl.arange(0, EACH)[None, None, :], axis=2)
    return tl.sum(bytes_ << (tl.arange(0, CHUNKS) * 8)[:, None], axis=0)


@triton.jit
def _marks_of_pairs(x, limit, start, EACH: tl.constexpr, INF: tl.constexpr, NANS: tl.constexpr):
    """The same for full tiles of 16-bit values, aligned to 4 bytes: two in a register, magnitudes compared as integers.

    INF: the bits of infinity. A half's top bit is set by adding what its magnitude lacks to 2¹⁵: nothing is carried.
    """
    edge = widen(tl.load(limit))
    bits = tl.load(limit).to(tl.uint16, bitcast=True).to(tl.uint32)
    least = tl.where(edge > 0, bits, tl.where(edge == edge, 0, 0x8000).to(tl.uint32))  # NaN as limit: nothing passes
    first = (x + start).to(tl.pointer_type(tl.uint32))
    sizes = tl.load(first + tl.arange(0, CHUNKS * LANES * EACH // 2)) & 0x7FFF7FFF
    tops = (sizes + (0x8000 - least) * 0x10001) & 0x80008000
    if not NANS:
        tops = tops & ~(sizes + (0x8000 - INF - 1) * 0x10001)
    pairs = tl.reshape(tops, [CHUNKS, LANES, EACH // 2])
    halves = tl.sum(pairs >> (15 - tl.arange(0, EACH // 2))[None, None, :], axis=2)  # even values; odd ones 16 bits up
    bytes_ = (halves | (halves >> (16 - EACH // 2))) & 0xFF
    word = tl.sum(bytes_ << (tl.arange(0, CHUNKS) * 8)[:, None], axis=0)
    swap = (word ^ (word >> 2)) & 0x0C0C0C0C  # 0 2 4 6 1 3 5 7 → 0 2 1 3 4 6 5 7
    word ^= swap ^ (swap << 2)
    swap = (word ^ (word >> 1)) & 0x22222222  # → 0 1 2 3 4 5 6 7
    return word ^ swap ^ (swap << 1)


@triton.jit
def _shift(chunk):
    """Where a chunk's field begins: fields are those of chunks 0, 2, 1, 3."""
    return ((chunk & 1) << 5) | ((chunk & 2) << 3)


@triton.jit
def _select(
    x, limit, tile, n, first, places, values, base, room, EACH: tl.constexpr, INF: tl.constexpr, NANS: tl.constexpr
):  # fmt: skip
    """Entries of a tile from places[base] on, the first `room` of them: place in the tile plus `first`, and value.

    INF: that of _marks_of_pairs, or 0 where it will not do. Returns how many entries there are.
    """
    start = tile * (CHUNKS * LANES * EACH)
    if start + CHUNKS * LANES * EACH > n:
        marks = _marks(x, limit, start, n, EACH, NANS)
    elif INF > 0:
        marks = _marks_of_pairs(x, limit, start, EACH, INF, NANS)
    else:
        marks = _marks_of_full(x, limit, start, EACH, NANS)
    pairs = marks - ((marks >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    bytes_ = (fours + (fours >> 4)) & 0x0F0F0F0F  # of each byte, how many bits are set
    ones = (bytes_ & 0xFF00FF).to(tl.int64) | (((bytes_ >> 8) & 0xFF00FF).to(tl.int64) << 32)
    total = tl.sum(ones)
    zero, one, two = total & 0xFFFF, (total >> 32) & 0xFFFF, (total >> 16) & 0xFFFF
    rank = tl.cumsum(ones, axis=0) - ones + ((zero << 32) | ((zero + one) << 16) | ((zero + one + two) << 48))
    for _ in range(tl.max(((bytes_ * 0x01010101) >> 24).to(tl.int32))):  # a bit of every word, the lowest first
        bit = marks & (~marks + 1)
        at = (bits_of(bit.to(tl.float32)) >> 23) - 127
        chunk = (at >> 3) & (CHUNKS - 1)
        place = chunk * (LANES * EACH) + tl.arange(0, LANES) * EACH + (at & 7)
        to = ((rank >> _shift(chunk)) & 0xFFFF).to(tl.int32)
        here = (bit != 0) & (to < room)
        tl.store(places + base + to, (first + place).to(places.dtype.element_ty), mask=here)
        tl.store(values + base + to, tl.load(x + start + place, mask=here, other=0), mask=here)
        rank += tl.full([], 1, tl.int64) << _shift(chunk)
        marks = marks ^ bit
    return zero + one + two + (total >> 48)


@triton.jit(do_not_specialize=["n"])
def _set_aside(
    x, limit, places, values, counts, n,
    ROOM: tl.constexpr, EACH: tl.constexpr, INF: tl.constexpr, NANS: tl.constexpr,
):  # fmt: skip
    """places, values: a segment of ROOM for every tile; counts: of every tile."""
    tile = tl.program_id(0).to(tl.int64)
    count = _select(x, limit, tile, n, 0, places, values, tile * ROOM, ROOM, EACH, INF, NANS)
    tl.store(counts + tile, count.to(tl.int32))


@triton.jit(do_not_specialize=["n", "room", "tiles"])
def _bring(
    x, limit, places, values, counts, ends, index, out, n, room, tiles,
    ROOM: tl.constexpr, EACH: tl.constexpr, INF: tl.constexpr, NANS: tl.constexpr, TILES: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """The segments of TILES tiles to their places; ends: entries up to and including each tile's."""
    SIZE: tl.constexpr = CHUNKS * LANES * EACH
    first = tl.program_id(0).to(tl.int64) * TILES
    tile = first + tl.arange(0, TILES)
    count = tl.load(counts + tile, mask=tile < tiles, other=0)
    before = tl.load(ends + tile, mask=tile < tiles, other=0) - count
    most = tl.max(count)
    if most <= ROOM:
        for i in range(0, most, WIDTH):
            slot = i + tl.arange(0, WIDTH)[None, :]
            to = before[:, None] + slot
            here = (slot < count[:, None]) & (to < room)
            source = tile[:, None] * ROOM + slot
            place = tl.load(places + source, mask=here, other=0).to(tl.int64) + tile[:, None] * SIZE
            value = tl.load(values + source, mask=here, other=0)
            tl.store(index + to, place, mask=here)
            tl.store(out + to, value, mask=here)
    else:
        base = tl.load(ends + first) - tl.load(counts + first)
        for i in range(TILES):
            left = tl.minimum(tl.maximum(room - base, 0), SIZE).to(tl.int32)
            base += _select(x, limit, first + i, n, (first + i) * SIZE, index, out, base, left, EACH, INF, NANS)


@triton.jit(do_not_specialize=["room"])
def _pad(index, values, found, room, SIZE: tl.constexpr):
    """Index −1 and value 0 from entry `found` on."""
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    left = (place >= tl.load(found)) & (place < room)
    tl.store(index + place, place * 0 - 1, mask=left)
    tl.store(values + place, tl.zeros([SIZE], values.dtype.element_ty), mask=left)


def select_into(x, limit, index, values):
    """limit: 0-d, on x's device, in x's dtype. No host synchronisation."""
    found = bring_together(x, limit, index, values)
    launch(_pad, triton.cdiv(index.numel(), PAD), index, values, found, index.numel(), SIZE=PAD)
    return found[0]


def bring_together(x, limit, index, values, nans=False):
    """select_into, but for the padding, as int64[1]. nans: NaN passes too."""
    n, room, each = x.numel(), index.numel(), 16 // x.element_size()
    inf = int(torch.tensor(torch.inf, dtype=x.dtype).view(torch.int16)) if each == 8 and x.data_ptr() % 4 == 0 else 0
    segment, tiles = 4 * 32 * each // SHARE, triton.cdiv(n, 4 * 32 * each)
    constants = {"ROOM": segment, "EACH": each, "INF": inf, "NANS": nans}
    places = torch.empty(tiles * segment, dtype=torch.int16, device=x.device)
    held = torch.empty(tiles * segment, dtype=x.dtype, device=x.device)
    counts = (torch.empty if tiles else torch.zeros)(max(tiles, 1), dtype=torch.int32, device=x.device)
    aside = x, limit, places, held, counts
    launch(_set_aside, tiles, *aside, n, **constants, warps=1)
    ends = counts.cumsum(0)
    constants |= {"TILES": TILES, "WIDTH": WIDTH}
    launch(_bring, triton.cdiv(tiles, TILES), *aside, ends, index, values, n, room, tiles, **constants, warps=WARPS)
    return ends[-1:]
