"""Threshold selection into given memory in one pass over x: each program writes its entries while they are in cache.

Where its entries go depends on all programs before it. It publishes how many it has, then looks back over what those
before it have published, until it meets one that already knows its total (decoupled look-back). Programs take their
tiles in the order in which they begin, so whoever is waited for is running.

A tile is four chunks of LANES · EACH values: the 16 bytes that a lane loads at a time, EACH values, of every lane.
A lane's marks are one word, a byte a chunk, and what is counted of the four chunks are four 16-bit fields of one
integer: a value costs few instructions, which is what selection from 16-bit values is short of.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from thinwire.kernels.gpu.launch import launch
from thinwire.kernels.gpu.scalar import bits_of, widen

WARPS = 8
CHUNKS = tl.constexpr(4)
WINDOW = 32  # tiles looked back over at a time: one a lane, so that no warp waits for another while it looks
PAD = 4096  # places left over that a program fills
OWN, TOTAL = tl.constexpr(1), tl.constexpr(2)  # what a published word holds, in its last two bits; 0: nothing yet


@triton.jit
def _before(states, tile, own, WINDOW: tl.constexpr):
    """Entries in the tiles before `tile`, which has `own`."""
    total = tl.zeros([], tl.int64)
    if tile > 0:
        tl.atomic_xchg(states + tile, own * 4 + OWN, sem="relaxed")
        end = tile
        while end > 0:
            back = tl.arange(0, WINDOW)
            words = tl.load(states + end - 1 - back, mask=back < end, other=TOTAL, volatile=True)
            known = tl.min(tl.where((words & 3) == TOTAL, back, WINDOW))  # the nearest that knows its total
            missing = tl.min(tl.where(words == 0, back, WINDOW))
            if missing >= known:
                total += tl.sum(tl.where(back <= known, words >> 2, 0))
                end = tl.where(known < WINDOW, 0, end - WINDOW)
    tl.atomic_xchg(states + tile, (total + own) * 4 + TOTAL, sem="relaxed")
    return total


@triton.jit
def _marks(x, limit, start, n, LANES: tl.constexpr, EACH: tl.constexpr):
    """uint32[LANES]: a byte a chunk, a bit a value with |x| ≥ limit; NaN has none."""
    SIZE: tl.constexpr = CHUNKS * LANES * EACH
    place = start + tl.arange(0, SIZE)
    if start + SIZE <= n:
        run = widen(tl.load(x + place))
    else:
        run = widen(tl.load(x + place, mask=place < n, other=float("nan")))
    chosen = tl.reshape((tl.abs(run) >= widen(tl.load(limit))).to(tl.uint32), [CHUNKS, LANES, EACH])
    bytes_ = tl.sum(chosen << tl.arange(0, EACH)[None, None, :], axis=2)
    return tl.sum(bytes_ << (tl.arange(0, CHUNKS) * 8)[:, None], axis=0)


@triton.jit
def _marks_of_pairs(x, limit, start, LANES: tl.constexpr, EACH: tl.constexpr, INF: tl.constexpr):
    """The same for full tiles of 16-bit values, aligned to 4 bytes: two in a register, magnitudes compared as integers.

    INF: the bits of infinity. A half's top bit is set by adding what its magnitude lacks to 2¹⁵: nothing is carried.
    """
    edge = widen(tl.load(limit))
    bits = tl.load(limit).to(tl.uint16, bitcast=True).to(tl.uint32)
    least = tl.where(edge > 0, bits, tl.where(edge == edge, 0, 0x8000).to(tl.uint32))  # NaN as limit: nothing passes
    first = (x + start).to(tl.pointer_type(tl.uint32))
    sizes = tl.load(first + tl.arange(0, CHUNKS * LANES * EACH // 2)) & 0x7FFF7FFF
    tops = (sizes + (0x8000 - least) * 0x10001) & ~(sizes + (0x8000 - INF - 1) * 0x10001) & 0x80008000
    pairs = tl.reshape(tops, [CHUNKS, LANES, EACH // 2])
    halves = tl.sum(pairs >> (15 - tl.arange(0, EACH // 2))[None, None, :], axis=2)  # even values; odd ones 16 bits up
    bytes_ = (halves | (halves >> (16 - EACH // 2))) & 0xFF
    word = tl.sum(bytes_ << (tl.arange(0, CHUNKS) * 8)[:, None], axis=0)
    swap = (word ^ (word >> 2)) & 0x0C0C0C0C  # 0 2 4 6 1 3 5 7 → 0 2 1 3 4 6 5 7
    word ^= swap ^ (swap << 2)
    swap = (word ^ (word >> 1)) & 0x22222222  # → 0 1 2 3 4 5 6 7
    return word ^ swap ^ (swap << 1)


@triton.jit
def _fields(bytes_):
    """uint32 of four bytes → int64 of four 16-bit fields, those of chunks 0, 2, 1, 3."""
    low, high = bytes_ & 0xFF00FF, (bytes_ >> 8) & 0xFF00FF
    return low.to(tl.int64) | (high.to(tl.int64) << 32)


@triton.jit
def _shift(chunk):
    """Where its field begins."""
    return ((chunk & 1) << 5) | ((chunk & 2) << 3)


@triton.jit(do_not_specialize=["n", "room"])
def _select(
    x, limit, index, values, states, n, room,
    LANES: tl.constexpr, EACH: tl.constexpr, INF: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """states: how many programs have begun; entries in all; then a word a tile. All are zero before. INF: 0, or that
    of _marks_of_pairs."""
    SIZE: tl.constexpr = CHUNKS * LANES * EACH
    tile = tl.atomic_add(states, 1, sem="relaxed")
    start = tile * SIZE
    if INF > 0:
        if start + SIZE <= n:
            marks = _marks_of_pairs(x, limit, start, LANES, EACH, INF)
        else:
            marks = _marks(x, limit, start, n, LANES, EACH)
    else:
        marks = _marks(x, limit, start, n, LANES, EACH)
    pairs = marks - ((marks >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    ones = (fours + (fours >> 4)) & 0x0F0F0F0F  # of each byte
    counts = _fields(ones)
    rank, all_ = tl.cumsum(counts, axis=0) - counts, tl.sum(counts)
    first, second, third = all_ & 0xFFFF, (all_ >> 32) & 0xFFFF, (all_ >> 16) & 0xFFFF
    rank += (first << 32) + ((first + second) << 16) + ((first + second + third) << 48)
    own = first + second + third + (all_ >> 48)
    before = _before(states + 2, tile, own, WINDOW)
    if start + SIZE >= n:
        tl.store(states + 1, before + own)
    free = tl.minimum(tl.maximum(room - before, 0), SIZE).to(tl.int32)
    lane = tl.arange(0, LANES) * EACH
    for _ in range(tl.max(((ones * 0x01010101) >> 24).to(tl.int32))):  # a bit of every word at a time, the lowest first
        bit = marks & (~marks + 1)
        at = (bits_of(bit.to(tl.float32)) >> 23) - 127
        chunk = (at >> 3) & (CHUNKS - 1)
        place = chunk * (LANES * EACH) + lane + (at & 7)
        to = ((rank >> _shift(chunk)) & 0xFFFF).to(tl.int32)
        here = (bit != 0) & (to < free)
        tl.store(index + before + to, start + place, mask=here)
        tl.store(values + before + to, tl.load(x + start + place, mask=here, other=0), mask=here)
        rank += tl.full([], 1, tl.int64) << _shift(chunk)
        marks = marks ^ bit


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
    constants = {"LANES": 32 * WARPS, "EACH": each, "INF": inf, "WINDOW": WINDOW}
    programs = triton.cdiv(n, 4 * 32 * WARPS * each)
    states = torch.zeros(2 + programs, dtype=torch.int64, device=x.device)
    launch(_select, programs, x, limit, index, values, states, n, room, **constants, warps=WARPS)
    launch(_pad, triton.cdiv(room, PAD), index, values, states[1], room, SIZE=PAD)
    return states[1]
