"""The k-th largest magnitude in Triton: 11 leading bits, then 10, then 10, without a host synchronisation. Of bfloat16
only four bits are left after the first 11, of float16 seven.

On a card every program counts in a table of its shared memory (shared_table.py). The interpreter takes another way:
the first histogram counts a tile by ballots, over a window of 16 octaves below the tile's largest value; smaller
values, rarely there, take another round. The refining ones see few values, those that share the leading bits. Few bins
they count by ballots, many they add straight to the table in memory, all but the smallest and largest bin of the tile:
zeros, and tensors of few values, would queue at one address.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from thinwire.kernels.gpu import shared_table
from thinwire.kernels.gpu import tile as tiles
from thinwire.kernels.gpu.launch import launch
from thinwire.kernels.gpu.scalar import MAGNITUDE, bits_of, widen
from thinwire.kernels.select import BINS, HISTOGRAM_SHIFT

SIZE = 4096  # values a program handles
WINDOW = 128  # bins counted at a time, eight to an octave
REFINE = {torch.float32: (10, 10), torch.float16: (7,), torch.bfloat16: (4,)}  # bits that each later one resolves
FEW = 128  # bins that are counted by ballots
SHARED = True  # count in shared memory, but for the interpreter
SHARED_SIZE, SHARED_WARPS, SHARED_PROGRAMS = 4096, 8, 528  # values at a time, warps of a program, programs


@triton.jit
def unless(skip, n, GUARDED: tl.constexpr):
    """n as int64; with GUARDED zero where skip[0]."""
    if GUARDED:
        return tl.where(tl.load(skip), 0, n).to(tl.int64)
    return n.to(tl.int64)


@triton.jit(do_not_specialize=["n", "programs"])
def _histogram_shared(
    x, counts, skip, n, programs, SHIFT: tl.constexpr, SIZE: tl.constexpr, GUARDED: tl.constexpr, THREADS: tl.constexpr
):  # fmt: skip
    """`_histogram`, in shared memory."""
    n = unless(skip, n, GUARDED)
    start = tl.program_id(0).to(tl.int64) * SIZE
    if start < n:
        table = shared_table.new_table(THREADS)
        while start < n:
            bins = (bits_of(widen(tiles.read_run(x, start, n, SIZE))) & MAGNITUDE) >> SHIFT
            if start + SIZE > n:
                shared_table.add_some(table, bins, start + tl.arange(0, SIZE) < n)
            else:
                shared_table.add_ones(table, bins)
            start += programs.to(tl.int64) * SIZE
        shared_table.add_to_memory(table, counts, 1 << (31 - SHIFT))


@triton.jit(do_not_specialize=["n", "programs"])
def _refine_shared(
    x, counts, state, skip, n, programs, SHIFT: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
    GUARDED: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """`_refine`, in shared memory."""
    n = unless(skip, n, GUARDED)
    start = tl.program_id(0).to(tl.int64) * SIZE
    if start < n:
        table = shared_table.new_table(THREADS)
        prefix = tl.load(state).to(tl.int32)
        while start < n:
            bits = bits_of(widen(tiles.read_run(x, start, n, SIZE))) & MAGNITUDE
            match = (start + tl.arange(0, SIZE) < n) & ((bits >> (SHIFT + WIDTH)) == prefix)
            shared_table.add_some(table, (bits >> SHIFT) & ((1 << WIDTH) - 1), match)
            start += programs.to(tl.int64) * SIZE
        shared_table.add_to_memory(table, counts, 1 << WIDTH)


@triton.jit(do_not_specialize=["n", "programs"])
def _histogram(
    x, counts, skip, n, programs, SHIFT: tl.constexpr, WINDOW: tl.constexpr, SIZE: tl.constexpr, GUARDED: tl.constexpr
):  # fmt: skip
    """counts[|x| bits >> SHIFT] += 1. GUARDED: nothing where skip[0]."""
    n = unless(skip, n, GUARDED)
    start = tl.program_id(0).to(tl.int64) * SIZE
    while start < n:
        inside = start + tl.arange(0, SIZE) < n
        bins = (bits_of(widen(tiles.read_run(x, start, n, SIZE))) & MAGNITUDE) >> SHIFT
        tl.atomic_add(counts, tl.sum((inside & (bins == 0)).to(tl.int32)).to(tl.int64), sem="relaxed")
        top = tl.max(bins)  # bins beyond n hold zeros
        while top > 0:
            low = tl.maximum(top - (WINDOW - 1), 1)
            found = tl.histogram(bins - low, WINDOW, mask=(bins >= low) & (bins <= top))
            place = low + tl.arange(0, WINDOW)
            tl.atomic_add(counts + place, found.to(tl.int64), mask=found > 0, sem="relaxed")
            top = tl.max(tl.where(bins < low, bins, 0))
        start += programs.to(tl.int64) * SIZE


@triton.jit(do_not_specialize=["n", "programs"])
def _refine(
    x, counts, state, skip, n, programs, SHIFT: tl.constexpr, WIDTH: tl.constexpr, FEW: tl.constexpr,
    SIZE: tl.constexpr, GUARDED: tl.constexpr,
):  # fmt: skip
    """counts[(|x| bits >> SHIFT) mod 2^WIDTH] += 1 for the values whose bits before those are state[0]."""
    n = unless(skip, n, GUARDED)
    start = tl.program_id(0).to(tl.int64) * SIZE
    while start < n:
        bits = bits_of(widen(tiles.read_run(x, start, n, SIZE))) & MAGNITUDE
        match = (start + tl.arange(0, SIZE) < n) & ((bits >> (SHIFT + WIDTH)) == tl.load(state).to(tl.int32))
        bins = (bits >> SHIFT) & ((1 << WIDTH) - 1)
        if 1 << WIDTH <= FEW:
            found = tl.histogram(bins, 1 << WIDTH, mask=match)
            tl.atomic_add(counts + tl.arange(0, 1 << WIDTH), found.to(tl.int64), mask=found > 0, sem="relaxed")
        else:
            _add_spread(counts, bins, match, WIDTH, SIZE)
        start += programs.to(tl.int64) * SIZE


@triton.jit
def _add_spread(counts, bins, match, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """counts[bins] += 1 where `match`, straight in memory but for the smallest and the largest bin."""
    least, most = tl.min(tl.where(match, bins, 1 << WIDTH)), tl.max(tl.where(match, bins, -1))
    if most >= 0:
        smallest = tl.sum((match & (bins == least)).to(tl.int32)).to(tl.int64)
        tl.atomic_add(counts + least, smallest, sem="relaxed")
        if most > least:
            largest = tl.sum((match & (bins == most)).to(tl.int32)).to(tl.int64)
            tl.atomic_add(counts + most, largest, sem="relaxed")
            between = match & (bins > least) & (bins < most)
            tl.atomic_add(counts + bins, tl.full([SIZE], 1, tl.int64), mask=between, sem="relaxed")


@triton.jit(do_not_specialize=["k"])
def _narrow(counts, state, k, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    """Append the bin that holds the k-th largest to the bits state[0]; state[1]: its rank inside that bin."""
    bins = tl.arange(0, 1 << WIDTH)
    count = tl.load(counts + bins)
    rank = k if FIRST else tl.load(state + 1)
    prefix = 0 if FIRST else tl.load(state)
    at_or_above = tl.sum(count) - tl.cumsum(count, axis=0) + count
    place = tl.sum((at_or_above >= rank).to(tl.int32)) - 1
    tl.store(state, (prefix << WIDTH) | place)
    tl.store(state + 1, rank - tl.sum(tl.where(bins > place, count, 0)))


def histogram(x):
    """`histogram` of kernels/select.py, by Triton."""
    counts = torch.zeros(BINS, dtype=torch.int64, device=x.device)
    _count_leading(x, counts)
    return counts


LOOKING = 528  # programs that look whether there is anything to do


def _count_leading(x, counts, skip=None):
    _count(_histogram, _histogram_shared, x, (counts,), skip, {"WINDOW": WINDOW}, {"SHIFT": HISTOGRAM_SHIFT})


def _count(by_ballots, in_shared_memory, x, tensors, skip, of_ballots, constants):
    """Launch one of the two."""
    n, size, guarded = x.numel(), SIZE, {"GUARDED": skip is not None}
    shared = SHARED and not isinstance(in_shared_memory, InterpretedFunction)
    if shared:
        size, kernel, more = SHARED_SIZE, in_shared_memory, {"THREADS": 32 * SHARED_WARPS, "warps": SHARED_WARPS}
    else:
        kernel, more = by_ballots, of_ballots
    programs = triton.cdiv(n, size)
    if skip is not None or shared:
        programs = min(programs, LOOKING if skip is not None else SHARED_PROGRAMS)
    given = x, *tensors, x if skip is None else skip, n, programs
    launch(kernel, programs, *given, **constants, SIZE=size, **guarded, **more)


def kth_bits(x, k, skip=None, rough=False):
    """(int64[2] on the device: the k-th largest magnitude's bits without the last `low`, and how many of the
    entries equal to it belong to the k largest; low). skip: 0-d bool on the device; where true nothing is done.
    rough: 21 leading bits are enough."""
    widths = REFINE[x.dtype][:1] if rough else REFINE[x.dtype]
    counts = torch.zeros(BINS + sum(1 << width for width in widths), dtype=torch.int64, device=x.device)
    state = torch.empty(2, dtype=torch.int64, device=x.device)
    _count_leading(x, counts, skip)
    launch(_narrow, 1, counts, state, k, FIRST=True, WIDTH=31 - HISTOGRAM_SHIFT, warps=8)
    low, table = HISTOGRAM_SHIFT, counts[BINS:]
    for width in widths:
        low -= width
        _count(_refine, _refine_shared, x, (table, state), skip, {"FEW": FEW}, {"SHIFT": low, "WIDTH": width})
        launch(_narrow, 1, table, state, k, FIRST=False, WIDTH=width)
        table = table[1 << width :]
    return state, low
