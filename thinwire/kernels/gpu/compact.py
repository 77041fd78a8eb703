"""Threshold selection into given memory: x is read once, and entries are set aside while they are in cache.

1. A program selects from a tile and puts its entries where there is always room for the usual number of them: a segment
   of ROOM entries for every ROWS-th part of the tile. It counts what it found.
2. Now each tile's place in the output is known, and programs bring the segments of several tiles there. Where a segment
   was too short, they select from x again.

A tile is four chunks of ROWS · LANES · EACH values: of every lane the EACH values, 16 bytes, that it loads at a time. A
lane's marks are one word, a byte a chunk, and what is counted of the four chunks are four 16-bit fields of one integer:
a value costs few instructions, which is what selection from 16-bit values is short of.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from thinwire.kernels.gpu.launch import launch
from thinwire.kernels.gpu.scalar import bits_of, widen

ROWS = 8  # warps of a program, each with a segment of its own
LANES, CHUNKS = tl.constexpr(32), tl.constexpr(4)
SHARE = 16  # a segment has room for one in so many values
TILES, BRING_WARPS = 16, 4  # tiles whose segments a program brings to their place
GROUP = 256  # such programs counted together: one adds up the groups before its own, then the programs before it
PAD = 4096  # places left over that a program fills


@triton.jit
def _marks(x, limit, start, n, ROWS: tl.constexpr, EACH: tl.constexpr):
    """uint32[ROWS, LANES]: a byte a chunk, a bit a value with |x| ≥ limit; NaN has none."""
    SIZE: tl.constexpr = CHUNKS * ROWS * LANES * EACH
    place = start + tl.arange(0, SIZE)
    if start + SIZE <= n:
        run = widen(tl.load(x + place))
    else:
        run = widen(tl.load(x + place, mask=place < n, other=float("nan")))
    chosen = tl.reshape((tl.abs(run) >= widen(tl.load(limit))).to(tl.uint32), [CHUNKS, ROWS * LANES, EACH])
    bytes_ = tl.sum(chosen << tl.arange(0, EACH)[None, None, :], axis=2)
    word = tl.sum(bytes_ << (tl.arange(0, CHUNKS) * 8)[:, None], axis=0)
    return tl.reshape(word, [ROWS, LANES])


@triton.jit
def _marks_of_pairs(x, limit, start, ROWS: tl.constexpr, EACH: tl.constexpr, INF: tl.constexpr):
    """The same for full tiles of 16-bit values, aligned to 4 bytes: two in a register, magnitudes compared as integers.

    INF: the bits of infinity. A half's top bit is set by adding what its magnitude lacks to 2¹⁵: nothing is carried.
    """
    edge = widen(tl.load(limit))
    bits = tl.load(limit).to(tl.uint16, bitcast=True).to(tl.uint32)
    least = tl.where(edge > 0, bits, tl.where(edge == edge, 0, 0x8000).to(tl.uint32))  # NaN as limit: nothing passes
    first = (x + start).to(tl.pointer_type(tl.uint32))
    sizes = tl.load(first + tl.arange(0, CHUNKS * ROWS * LANES * EACH // 2)) & 0x7FFF7FFF
    tops = (sizes + (0x8000 - least) * 0x10001) & ~(sizes + (0x8000 - INF - 1) * 0x10001) & 0x80008000
    pairs = tl.reshape(tops, [CHUNKS, ROWS * LANES, EACH // 2])
    halves = tl.sum(pairs >> (15 - tl.arange(0, EACH // 2))[None, None, :], axis=2)  # even values; odd ones 16 bits up
    bytes_ = (halves | (halves >> (16 - EACH // 2))) & 0xFF
    word = tl.sum(bytes_ << (tl.arange(0, CHUNKS) * 8)[:, None], axis=0)
    swap = (word ^ (word >> 2)) & 0x0C0C0C0C  # 0 2 4 6 1 3 5 7 → 0 2 1 3 4 6 5 7
    word ^= swap ^ (swap << 2)
    swap = (word ^ (word >> 1)) & 0x22222222  # → 0 1 2 3 4 5 6 7
    return tl.reshape(word ^ swap ^ (swap << 1), [ROWS, LANES])


@triton.jit
def _any_marks(x, limit, start, n, ROWS: tl.constexpr, EACH: tl.constexpr, INF: tl.constexpr):
    """INF: 0, where only the first way will do."""
    if INF > 0:
        if start + CHUNKS * ROWS * LANES * EACH <= n:
            marks = _marks_of_pairs(x, limit, start, ROWS, EACH, INF)
        else:
            marks = _marks(x, limit, start, n, ROWS, EACH)
    else:
        marks = _marks(x, limit, start, n, ROWS, EACH)
    return marks


@triton.jit
def _shift(chunk):
    """Where a chunk's field begins: fields are those of chunks 0, 2, 1, 3."""
    return ((chunk & 1) << 5) | ((chunk & 2) << 3)


@triton.jit
def _ones(marks):
    """(int64: fields, how many bits of each byte are set; int32: how many in all)."""
    pairs = marks - ((marks >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    bytes_ = (fours + (fours >> 4)) & 0x0F0F0F0F
    low, high = bytes_ & 0xFF00FF, (bytes_ >> 8) & 0xFF00FF
    return low.to(tl.int64) | (high.to(tl.int64) << 32), ((bytes_ * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _chunks_before(fields):
    """(fields: the sum of those of the chunks before; the sum of all four)."""
    zero, one, two = fields & 0xFFFF, (fields >> 32) & 0xFFFF, (fields >> 16) & 0xFFFF
    three = zero + one + two
    return (zero << 32) | ((zero + one) << 16) | (three << 48), three + (fields >> 48)


@triton.jit
def _write(
    marks, rank, most, x, start, first, places, values, base, room, ROWS: tl.constexpr, EACH: tl.constexpr
):  # fmt: skip
    """Entry `rank` to base + rank, while below `room`: its place in the tile plus `first`, and its value."""
    lane = tl.arange(0, ROWS)[:, None] * (LANES * EACH) + tl.arange(0, LANES)[None, :] * EACH
    for _ in range(most):  # a bit of every word at a time, the lowest first
        bit = marks & (~marks + 1)
        at = (bits_of(bit.to(tl.float32)) >> 23) - 127
        chunk = (at >> 3) & (CHUNKS - 1)
        place = chunk * (ROWS * LANES * EACH) + lane + (at & 7)
        to = ((rank >> _shift(chunk)) & 0xFFFF).to(tl.int32)
        here = (bit != 0) & (to < room)
        tl.store(places + base + to, (first + place).to(places.dtype.element_ty), mask=here)
        tl.store(values + base + to, tl.load(x + start + place, mask=here, other=0), mask=here)
        rank += tl.full([], 1, tl.int64) << _shift(chunk)
        marks = marks ^ bit


@triton.jit(do_not_specialize=["n", "programs"])
def _set_aside(
    x, limit, places, values, counts, sums, n, programs,
    ROOM: tl.constexpr, TILES: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, EACH: tl.constexpr, INF: tl.constexpr,
):  # fmt: skip
    """places, values: ROOM for every row of every tile; counts: fields of every row; sums: of TILES tiles, then of
    GROUP times as many."""
    tile = tl.program_id(0).to(tl.int64)
    start = tile * (CHUNKS * ROWS * LANES * EACH)
    marks = _any_marks(x, limit, start, n, ROWS, EACH, INF)
    ones, of_lane = _ones(marks)
    of_row = tl.sum(ones, axis=1)
    before, in_row = _chunks_before(of_row)
    row = tile * ROWS + tl.arange(0, ROWS)
    tl.store(counts + row, of_row)
    own = tl.sum(in_row)
    tl.atomic_add(sums + tile // TILES, own, sem="relaxed")
    tl.atomic_add(sums + programs + tile // (TILES * GROUP), own, sem="relaxed")
    rank = tl.cumsum(ones, axis=1) - ones + before[:, None]
    _write(marks, rank, tl.max(of_lane), x, start, 0, places, values, (row * ROOM)[:, None], ROOM, ROWS, EACH)


@triton.jit
def _sum_before(sums, program, programs, GROUP: tl.constexpr):
    """Entries of the programs before."""
    group = program // GROUP
    near = group * GROUP + tl.arange(0, GROUP)
    total = tl.sum(tl.load(sums + near, mask=near < program, other=0))
    for first in range(0, group, GROUP):
        far = first + tl.arange(0, GROUP)
        total += tl.sum(tl.load(sums + programs + far, mask=far < group, other=0))
    return total


@triton.jit(do_not_specialize=["n", "room", "tiles", "programs"])
def _bring(
    x, limit, places, values, counts, sums, index, out, found, n, room, tiles, programs,
    ROOM: tl.constexpr, TILES: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, EACH: tl.constexpr, INF: tl.constexpr,
):  # fmt: skip
    """The segments of TILES tiles, in index order: of each tile chunk after chunk, of each chunk row after row."""
    SIZE: tl.constexpr = CHUNKS * ROWS * LANES * EACH
    program = tl.program_id(0).to(tl.int64)
    base = _sum_before(sums, program, programs, GROUP)
    own = tl.load(sums + program)
    if program == programs - 1:
        tl.store(found, base + own)
    part = program * TILES * ROWS * CHUNKS + tl.arange(0, TILES * CHUNKS * ROWS)  # tile, chunk, row
    tile, chunk, row = part // (CHUNKS * ROWS), part // ROWS % CHUNKS, part % ROWS
    fields = tl.load(counts + tile * ROWS + row, mask=tile < tiles, other=0)
    before, in_row = _chunks_before(fields)
    if tl.max(in_row) <= ROOM:
        count = ((fields >> _shift(chunk)) & 0xFFFF).to(tl.int32)
        source = (tile * ROWS + row) * ROOM + ((before >> _shift(chunk)) & 0xFFFF)
        rank = tl.cumsum(count, axis=0) - count
        free = tl.minimum(tl.maximum(room - base, 0), TILES * SIZE).to(tl.int32)
        for i in range(tl.max(count)):
            here = (i < count) & (rank + i < free)
            place = tl.load(places + source + i, mask=here, other=0).to(tl.int64) + tile * SIZE
            tl.store(index + base + rank + i, place, mask=here)
            tl.store(out + base + rank + i, tl.load(values + source + i, mask=here, other=0), mask=here)
    else:
        for i in range(TILES):
            start = (program * TILES + i) * SIZE
            marks = _any_marks(x, limit, start, n, ROWS, EACH, INF)
            ones, of_lane = _ones(marks)
            of_row = tl.sum(ones, axis=1)
            first, of_tile = _chunks_before(tl.sum(of_row))
            rank = tl.cumsum(ones, axis=1) - ones + (tl.cumsum(of_row, axis=0) - of_row)[:, None] + first
            free = tl.minimum(tl.maximum(room - base, 0), SIZE).to(tl.int32)
            _write(marks, rank, tl.max(of_lane), x, start, start, index, out, base, free, ROWS, EACH)
            base += of_tile


@triton.jit(do_not_specialize=["room"])
def _pad(index, values, found, room, SIZE: tl.constexpr):
    """Index −1 and value 0 from entry `found` on."""
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    left = (place >= tl.load(found)) & (place < room)
    tl.store(index + place, place * 0 - 1, mask=left)
    tl.store(values + place, tl.zeros([SIZE], values.dtype.element_ty), mask=left)


def select_into(x, limit, index, values):
    """limit: 0-d, on x's device, in x's dtype. No host synchronisation."""
    n, room, each = x.numel(), index.numel(), 16 // x.element_size()
    inf = int(torch.tensor(torch.inf, dtype=x.dtype).view(torch.int16)) if each == 8 and x.data_ptr() % 4 == 0 else 0
    segment = 4 * 32 * each // SHARE
    tiles = triton.cdiv(n, 4 * ROWS * 32 * each)
    programs = triton.cdiv(tiles, TILES)
    constants = {"ROOM": segment, "TILES": TILES, "GROUP": GROUP, "ROWS": ROWS, "EACH": each, "INF": inf}
    places = torch.empty(tiles * ROWS * segment, dtype=torch.int16, device=x.device)
    held = torch.empty(tiles * ROWS * segment, dtype=x.dtype, device=x.device)
    counts = torch.empty(tiles * ROWS, dtype=torch.int64, device=x.device)
    sums = torch.zeros(programs + triton.cdiv(programs, GROUP) + 1, dtype=torch.int64, device=x.device)
    found, aside = sums[-1], (x, limit, places, held, counts, sums)
    launch(_set_aside, tiles, *aside, n, programs, **constants, warps=ROWS)
    launch(_bring, programs, *aside, index, values, found, n, room, tiles, programs, **constants, warps=BRING_WARPS)
    launch(_pad, triton.cdiv(room, PAD), index, values, found, room, SIZE=PAD)
    return found
