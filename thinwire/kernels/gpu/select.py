"""Selection in Triton: compaction in index order. Only `select` waits for the card.

x is read once, to mark: a bit a value, and a count a tile. Then each tile's place in the output is known, the number
of entries before it: the marks, a small share of x's size, become indices, and the same program fetches their values.
Where the output's size is given, one pass is enough (compact.py).

The k largest of many values: a threshold that a few more than k pass comes from a sample, and the exact answer from
those (order/). Whether they were enough is known on the card only: if not, the same kernels read all.
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
from thinwire.kernels.gpu.order import largest, radix
from thinwire.kernels.gpu.order.radix import histogram
from thinwire.kernels.gpu.scalar import bits_of, widen
from thinwire.kernels.gpu.scatter import scatter_add

__all__ = ["histogram", "kth_magnitude", "scatter_add", "select", "select_into", "top"]

SIZE, MARK_WARPS = 8192, 8  # values a program marks
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


@triton.jit(do_not_specialize=["n", "count"])
def _mark(
    x, limit, marks, counts, n, count, TILE: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """Mark |x| ≥ limit, NaN left out. count: tiles in all."""
    start = tl.program_id(0).to(tl.int64) * SIZE
    values = widen(tiles.read_run(x, start, n, SIZE))
    if start + SIZE > n:
        values = tl.where(start + tl.arange(0, SIZE) < n, values, float("nan"))
    _write_marks(tl.abs(values) >= widen(tl.load(limit)), marks, counts, start, count, TILE, GROUP, SIZE)


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


@triton.jit(do_not_specialize=["n", "room", "count"])
def _place(
    marks, counts, x, index, values, n, room, count, TILE: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Indices and values of the first `room` entries that are marked."""
    tile = tl.program_id(0).to(tl.int64)
    word = tile * (TILE // 32) + tl.arange(0, TILE // 32)
    words = tl.load(marks.to(tl.pointer_type(tl.uint32)) + word, mask=word * 32 < n, other=0)
    ones = _ones(words)
    rank, before = tl.cumsum(ones, axis=0) - ones, _before(counts, tile, count, GROUP)
    free = tl.minimum(tl.maximum(room - before, 0), TILE).to(tl.int32)
    first = tl.arange(0, TILE // 32) * 32
    for _ in range(tl.max(ones)):  # a bit of every word at a time, the lowest first
        bit = words & (~words + 1)
        place = tile * TILE + first + ((bits_of(bit.to(tl.float32)) >> 23) - 127)
        here = (bit != 0) & (rank < free)
        tl.store(index + before + rank, place, mask=here)
        tl.store(values + before + rank, tl.load(x + place, mask=here, other=0), mask=here)
        rank += (bit != 0).to(tl.int32)
        words = words ^ bit


def kth_magnitude(x, k):
    """`kth_magnitude` of kernels/select.py, by Triton."""
    if launching.new_kernels == "expect":  # larger tensors may come
        radix.kth(x, k, _candidates(x, k)[1])
    return radix.kth(x, k, _candidates(x, k)[1] if _is_large(x, k) else None)[0]


def top(x, k):
    """No host synchronisation: the output has k entries whatever x holds (NaN counts as the largest)."""
    if launching.new_kernels == "expect":
        largest.write(x, k, *_candidates(x, k), *_room(x, k))
    return largest.write(x, k, *(_candidates(x, k) if _is_large(x, k) else (None, None)), *_room(x, k))


def _is_large(x, k):
    return x.numel() >= LARGE and k <= x.numel() // FEW


def _candidates(x, k):
    """(indices, (values, how many there are)) that pass a threshold from a sample, in padded memory."""
    share, sampled = k / EVERY, x.numel() // (EVERY * RUN) * RUN
    rank = min(int(AIM * share + 5 * math.sqrt(share)) + 8, sampled)
    limit, _, _ = radix.kth(x, rank, every=EVERY, run=RUN, rough=True)
    index, values = _room(x, int(MOST * k) + 64 * EVERY)
    return index, (values, compact.bring_together(x, limit, index, values, nans=True))


def select(x, threshold, cap):
    """One host synchronisation, for the number of entries found."""
    limit = _limit(x, threshold)
    marked = _marked(x, limit)
    index, values = _room(x, min(cap, int(marked[1][_tiles(x) :].sum())))
    arguments = *marked, x, index, values, x.numel(), index.numel(), _tiles(x)
    launch(_place, _tiles(x), *arguments, TILE=TILE, GROUP=GROUP, warps=PLACE_WARPS)
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


def _marked(x, limit):
    """(marks, a bit a value; counts: int64[tiles, then groups])."""
    n, count = x.numel(), _tiles(x)
    marks = torch.empty(count * TILE // 8, dtype=torch.uint8, device=x.device)
    counts = torch.zeros(count + triton.cdiv(count, GROUP), dtype=torch.int64, device=x.device)
    constants = {"TILE": TILE, "GROUP": GROUP, "SIZE": SIZE, "warps": MARK_WARPS}
    launch(_mark, triton.cdiv(n, SIZE), x, limit, marks, counts, n, count, **constants)
    return marks, counts
