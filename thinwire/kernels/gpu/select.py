"""Selection in Triton: compaction in index order. Only `select` waits for the card.

x is read once, to mark: a bit a value, and a count a tile. Then each tile's place in the output is known, the number
of entries before it: the marks, a small share of x's size, become indices, and the same program fetches their values.
Where the output's size is given, one pass is enough (compact.py).

The k largest of many values: a threshold that a few more than k pass comes from a sample, and the exact answer from
those. Whether they were enough is known on the card only. So the way over all values is launched too, by programs that
find at once that they have nothing to do.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from thinwire.kernels.gpu import compact
from thinwire.kernels.gpu import launch as launching
from thinwire.kernels.gpu import tile as tiles
from thinwire.kernels.gpu.launch import launch
from thinwire.kernels.gpu.radix import LOOKING, histogram, kth_bits, unless
from thinwire.kernels.gpu.scalar import INTERPRETED, MAGNITUDE, bits_of, narrow, widen

__all__ = ["histogram", "kth_magnitude", "scatter_add", "select", "select_into", "top"]

SIZE, MARK_WARPS = 8192, 8  # values a program marks
ADD, ADD_WARPS = 256, 4  # entries a program adds
TINY = tl.constexpr(7.888609052210118e-31)  # 2^-100: denormals lie below its last bit, and no difference from it is one
TILE, PLACE_WARPS = 16384, 1  # values whose entries a program places; SIZE divides TILE
LARGE, FEW = 1 << 22, 32  # from so many values on, k of them at most one in so many: by way of a sample,
EVERY, RUN = 64, 256  # one in so many, in runs of so many,
AIM, MOST = 1.1, 1.25  # from which a threshold is taken that so many k may pass; more than MOST do not fit
GROUP = 256  # tiles counted together: a program adds up the groups before its own, then the tiles before it


@triton.jit
def _ones(word):
    """How many bits of a uint32 are set."""
    pairs = word - ((word >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    return ((((fours + (fours >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _write_marks(chosen, marks, counts, start, count, TILE: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr):
    """bool[SIZE] from value `start` on → bytes of `marks`; adds to the count of its tile and of its group."""
    eights = tl.reshape(chosen.to(tl.int32), [SIZE // 8, 8]) << tl.arange(0, 8)[None, :]
    bytes_ = tl.sum(eights, axis=1)
    tl.store(marks + start // 8 + tl.arange(0, SIZE // 8), bytes_.to(tl.uint8))
    entries = tl.sum(_ones(bytes_.to(tl.uint32))).to(tl.int64)
    tl.atomic_add(counts + start // TILE, entries, sem="relaxed")
    tl.atomic_add(counts + count + start // (TILE * GROUP), entries, sem="relaxed")


@triton.jit(do_not_specialize=["n", "count", "programs"])
def _mark(
    x, limit, marks, counts, skip, n, count, programs, LOW: tl.constexpr, TIES: tl.constexpr, TILE: tl.constexpr,
    GROUP: tl.constexpr, SIZE: tl.constexpr, GUARDED: tl.constexpr,
):  # fmt: skip
    """Mark |x| ≥ limit, NaN left out. With TIES: magnitudes whose bits without the LOW last are above limit[0], NaN
    above all; and, in a second row of marks and counts, those whose bits are equal to it. count: tiles in all.
    GUARDED: nothing where skip[0]."""
    n = unless(skip, n, GUARDED)
    start = tl.program_id(0).to(tl.int64) * SIZE
    while start < n:
        _mark_tile(x, limit, marks, counts, start, n, count, LOW, TIES, TILE, GROUP, SIZE)
        start += programs.to(tl.int64) * SIZE


@triton.jit
def _mark_tile(
    x, limit, marks, counts, start, n, count,
    LOW: tl.constexpr, TIES: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    values = widen(tiles.read_run(x, start, n, SIZE))
    if TIES:
        bits, edge = (bits_of(values) & MAGNITUDE) >> LOW, tl.load(limit).to(tl.int32)
        if start + SIZE > n:
            bits = tl.where(start + tl.arange(0, SIZE) < n, bits, -1)
        _write_marks(bits > edge, marks, counts, start, count, TILE, GROUP, SIZE)
        marks, counts = _second_row(marks, counts, count, TILE, GROUP)
        _write_marks(bits == edge, marks, counts, start, count, TILE, GROUP, SIZE)
    else:
        if start + SIZE > n:
            values = tl.where(start + tl.arange(0, SIZE) < n, values, float("nan"))
        _write_marks(tl.abs(values) >= widen(tl.load(limit)), marks, counts, start, count, TILE, GROUP, SIZE)


@triton.jit
def _second_row(marks, counts, count, TILE: tl.constexpr, GROUP: tl.constexpr):
    return marks + count * (TILE // 8), counts + count + tl.cdiv(count, GROUP)


@triton.jit
def _before(counts, tile, count, GROUP: tl.constexpr):
    """Entries in the tiles before `tile`."""
    group = tile // GROUP
    near = group * GROUP + tl.arange(0, GROUP)
    total = tl.sum(tl.load(counts + near, mask=near < tile, other=0))
    for first in range(0, group, GROUP):
        far = first + tl.arange(0, GROUP)
        total += tl.sum(tl.load(counts + count + far, mask=far < group, other=0))
    return total


@triton.jit
def _ranked(marks, counts, tile, n, count, TILE: tl.constexpr, GROUP: tl.constexpr):
    """(words of the tile's marks, uint32[TILE / 32]; entries in each, and before each; entries before the tile)."""
    word = tile * (TILE // 32) + tl.arange(0, TILE // 32)
    words = tl.load(marks.to(tl.pointer_type(tl.uint32)) + word, mask=word * 32 < n, other=0)
    ones = _ones(words)
    return words, ones, tl.cumsum(ones, axis=0) - ones, _before(counts, tile, count, GROUP)


@triton.jit(do_not_specialize=["n", "room", "count"])
def _place(
    marks, counts, limit, x, index, values, skip, n, room, count,
    TIES: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, GUARDED: tl.constexpr,
):  # fmt: skip
    """Indices and values of the first `room` entries: all that are marked and, with TIES, the first limit[1] of the
    second row. GUARDED: nothing where skip[0]."""
    n = unless(skip, n, GUARDED)
    tile = tl.program_id(0).to(tl.int64)
    if tile * TILE < n:
        _place_tile(marks, counts, limit, x, index, values, tile, n, room, count, TIES, TILE, GROUP)


@triton.jit
def _place_tile(
    marks, counts, limit, x, index, values, tile, n, room, count,
    TIES: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    words, ones, rank, before = _ranked(marks, counts, tile, n, count, TILE, GROUP)
    if TIES:
        marks, counts = _second_row(marks, counts, count, TILE, GROUP)
        equal, more, ties, ties_before = _ranked(marks, counts, tile, n, count, TILE, GROUP)
        quota = tl.load(limit + 1)
        before += tl.minimum(ties_before, quota)
        left = tl.minimum(tl.maximum(quota - ties_before, 0), TILE).to(tl.int32)  # ties that this tile may take
        rank += tl.minimum(ties, left)
        words, ones = words | equal, ones + more
    free = tl.minimum(tl.maximum(room - before, 0), TILE).to(tl.int32)
    first = tl.arange(0, TILE // 32) * 32
    for _ in range(tl.max(ones)):  # a bit of every word at a time, the lowest first
        bit = words & (~words + 1)
        taken = bit != 0
        if TIES:
            tie = (equal & bit) != 0
            taken = taken & ((ties < left) | (tie == 0))
            ties += tie.to(tl.int32)
        place = tile * TILE + first + ((bits_of(bit.to(tl.float32)) >> 23) - 127)
        taken_here = taken & (rank < free)
        tl.store(index + before + rank, place, mask=taken_here)
        tl.store(values + before + rank, tl.load(x + place, mask=taken_here, other=0), mask=taken_here)
        rank += taken.to(tl.int32)
        words = words ^ bit


@triton.jit(do_not_specialize=["n", "k"])
def _scatter_add(out, index, values, n, k, SIZE: tl.constexpr):
    """By additions in the L2 cache, which nothing waits for."""
    i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    place = tl.load(index + i, mask=i < k, other=-1)
    value = tl.load(values + i, mask=i < k, other=0)  # beside the index, not after it
    inside = (place >= 0) & (place < n)
    value = narrow(widen(value), out.dtype.element_ty)
    if INTERPRETED:
        _add_here(out + place, value, inside)
    elif out.dtype.element_ty == tl.float32:
        # that addition takes denormals for zeros: none can matter, or come out, where a value is not tiny
        tiny = tl.abs(value) < TINY
        tl.atomic_add(out + place, value, mask=inside & (tiny == 0), sem="relaxed")
        _add_here(out + place, value, inside & tiny)
    else:
        _add_half(out + place, value, inside, out.dtype.element_ty == tl.bfloat16)


@triton.jit
def _add_here(target, value, mask):
    """target[…] += value, by a load and a store."""
    total = widen(tl.load(target, mask=mask, other=0)) + widen(value)
    tl.store(target, narrow(total, target.dtype.element_ty), mask=mask)


@triton.jit
def _add_half(target, value, mask, BRAIN: tl.constexpr):
    """The same of 16-bit values, in the cache: the hardware adds to words, so −0 is added to the other half."""
    address, bits = target.to(tl.int64), value.to(tl.uint16, bitcast=True).to(tl.uint32)
    word = tl.where((address & 2) == 0, bits | 0x80000000, (bits << 16) | 0x8000)
    KIND: tl.constexpr = "bf16x2" if BRAIN else "f16x2"
    add: tl.constexpr = (
        "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p red.relaxed.gpu.global.add.noftz." + KIND + " [$1], $2;"
        " mov.u32 $0, 0; }"
    )
    arguments = [address & -4, word, mask.to(tl.int32)]
    tl.inline_asm_elementwise(add, "=r,l,r,r", arguments, tl.int32, is_pure=False, pack=1)


def kth_magnitude(x, k):
    """`kth_magnitude` of kernels/select.py, by Triton."""
    if launching.new_kernels == "expect":  # larger tensors may come
        _kth_sampled(x, k)
    return _kth_sampled(x, k) if _is_large(x, k) else _kth(x, k)


def top(x, k):
    """No host synchronisation: the output has k entries whatever x holds (NaN counts as the largest)."""
    if launching.new_kernels == "expect":
        _top_sampled(x, k)
    if _is_large(x, k):
        return _top_sampled(x, k)
    index, values = _room(x, k)
    _write_top(x, *kth_bits(x, k), index, values)
    return index, values


def _kth_sampled(x, k):
    (_, candidates), skip = _candidates(x, k)
    return torch.where(skip, _kth(candidates, k), _kth(x, k, skip))


def _top_sampled(x, k):
    index, values = _room(x, k)
    (places, candidates), skip = _candidates(x, k)
    _write_top(candidates, *kth_bits(candidates, k), index, values)
    index = places[index]
    _write_top(x, *kth_bits(x, k, skip), index, values, skip)
    return index, values


def _is_large(x, k):
    return x.numel() >= LARGE and k <= x.numel() // FEW


def _candidates(x, k):
    """((indices, values) that pass a threshold from a sample, in padded memory; 0-d bool: the k largest are among
    them)."""
    runs, share = x.numel() // (EVERY * RUN), k / EVERY
    sample = x[: runs * EVERY * RUN].view(runs, EVERY * RUN)[:, :RUN].reshape(-1) if runs else x
    limit = _kth(sample, min(int(AIM * share + 5 * math.sqrt(share)) + 8, sample.numel()), rough=True)
    held = _room(x, int(MOST * k) + 64 * EVERY)
    found = compact.select_into(x, limit, *held, nans=True)
    return held, (found >= k) & (found <= held[0].numel())


def _kth(x, k, skip=None, rough=False):
    """The k-th largest magnitude; rough: a little less, by its leading 21 bits."""
    state, low = kth_bits(x, k, skip, rough)
    return (state[0] << low).to(torch.int32).view(torch.float32).to(x.dtype)


def _write_top(x, state, low, index, values, skip=None):
    """The k largest, of which kth_bits has given (state, low)."""
    _written(x, _marked(x, state, low, ties=True, skip=skip), state, index, values, ties=True, skip=skip)


def select(x, threshold, cap):
    """One host synchronisation, for the number of entries found."""
    limit = _limit(x, threshold)
    marked = _marked(x, limit)
    index, values = _room(x, min(cap, int(marked[1][0, _tiles(x) :].sum())))
    _written(x, marked, limit, index, values)
    return index, values


def select_into(x, threshold, index, values):
    """No host synchronisation."""
    return compact.select_into(x, _limit(x, threshold), index, values)


def _limit(x, threshold):
    """The threshold on the card, rounded to x's dtype."""
    if isinstance(threshold, torch.Tensor):
        return threshold.to(x.device, x.dtype)
    return torch.full((), threshold, dtype=x.dtype, device=x.device)


def _room(x, k):
    return torch.empty(k, dtype=torch.int64, device=x.device), torch.empty(k, dtype=x.dtype, device=x.device)


def _tiles(x):
    return triton.cdiv(x.numel(), TILE)


def _marked(x, limit, low=0, ties=False, skip=None):
    """(marks, a bit a value; counts: int64[rows, tiles, then groups])."""
    n, count = x.numel(), _tiles(x)
    marks = torch.empty((1 + ties) * count * TILE // 8, dtype=torch.uint8, device=x.device)
    counts = torch.zeros(1 + ties, count + triton.cdiv(count, GROUP), dtype=torch.int64, device=x.device)
    constants = {"LOW": low, "TIES": ties, "TILE": TILE, "GROUP": GROUP, "SIZE": SIZE, "GUARDED": skip is not None}
    programs = triton.cdiv(n, SIZE) if skip is None else min(LOOKING, triton.cdiv(n, SIZE))
    arguments = x, limit, marks, counts, x if skip is None else skip, n, count, programs
    launch(_mark, programs, *arguments, **constants, warps=MARK_WARPS)
    return marks, counts


def _written(x, marked, limit, index, values, ties=False, skip=None):
    """Fill index and values."""
    n, room, count = x.numel(), index.numel(), _tiles(x)
    constants = {"TIES": ties, "TILE": TILE, "GROUP": GROUP, "GUARDED": skip is not None}
    arguments = *marked, limit, x, index, values, x if skip is None else skip, n, room, count
    launch(_place, count, *arguments, **constants, warps=PLACE_WARPS)


def scatter_add(out, index, values):
    """An index outside `out` is skipped: to raise would need a host synchronisation."""
    k = index.numel()
    launch(_scatter_add, triton.cdiv(k, ADD), out, index, values, out.numel(), k, SIZE=ADD, warps=ADD_WARPS)
    return out
