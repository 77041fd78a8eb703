"""The k-th largest magnitude in Triton: 11 leading bits, then 10, then 10, without a host synchronisation. Of bfloat16
only four bits are left after the first 11, of float16 seven.

One kernel per round: every program counts in a table of its shared memory (shared_table.py) and adds that to one table
in memory; the program that comes last looks in which bin the k-th lies. A round may read all values, a sample of them,
or candidates, if they hold the k largest, which is known on the card only, and all values if not.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from thinwire.kernels.gpu.launch import launch
from thinwire.kernels.gpu.order import shared_table
from thinwire.kernels.gpu.scalar import INTERPRETED, MAGNITUDE, bits_of, widen
from thinwire.kernels.select import BINS, HISTOGRAM_SHIFT

REFINE = {torch.float32: (10, 10), torch.float16: (7,), torch.bfloat16: (4,)}  # bits that each later round resolves
SIZE, WARPS, PROGRAMS = 4096, 8, 528  # values at a time, warps of a program, programs
PREFIX, RANK, DONE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # what `state` holds
STATE = 3


@triton.jit
def fits(found, k, room):
    """Do found[0] candidates, for whom there was `room`, hold the k largest?"""
    count = tl.load(found)
    return (count >= k) & (count <= room)


@triton.jit
def _bins(values, SHIFT: tl.constexpr):
    return (bits_of(widen(values)) & MAGNITUDE) >> SHIFT


@triton.jit
def _count_part(x, table, counts, place, n, prefix, SHIFT: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr):
    """Count values at `place`, of those whose bits before the WIDTH counted ones are `prefix`. FULL: all are below n,
    and there are no bits before."""
    if FULL and not INTERPRETED:
        shared_table.add_ones(table, _bins(tl.load(x + place), SHIFT))
    else:
        bits = _bins(tl.load(x + place, mask=place < n, other=0), SHIFT)
        bins, match = bits & ((1 << WIDTH) - 1), (place < n) & ((bits >> WIDTH) == prefix)
        if INTERPRETED:
            found = tl.histogram(bins, 1 << WIDTH, mask=match)
            tl.atomic_add(counts + tl.arange(0, 1 << WIDTH), found.to(tl.int64), mask=found > 0, sem="relaxed")
        else:
            shared_table.add_some(table, bins, match)


@triton.jit
def _count_all(
    x, table, counts, n, programs, prefix, SHIFT: tl.constexpr, WIDTH: tl.constexpr, RUN: tl.constexpr,
    EVERY: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """A program's share. EVERY: only the first RUN of every EVERY · RUN values; n: of the values that are counted."""
    start = tl.program_id(0).to(tl.int64) * SIZE
    while start < n:
        place = start + tl.arange(0, SIZE)
        if EVERY > 1:
            at = place // RUN * (RUN * EVERY) + place % RUN
            _count_part(x, table, counts, at, n * EVERY, prefix, SHIFT, WIDTH, False)
        elif SHIFT + WIDTH == 31 and start + SIZE <= n:
            _count_part(x, table, counts, place, n, prefix, SHIFT, WIDTH, True)
        else:
            _count_part(x, table, counts, place, n, prefix, SHIFT, WIDTH, False)
        start += programs.to(tl.int64) * SIZE


@triton.jit
def _narrow(counts, state, rank, prefix, WIDTH: tl.constexpr):
    """Append the bin that holds the `rank`-th largest to the bits `prefix`; its rank inside that bin. Both are kept."""
    bins = tl.arange(0, 1 << WIDTH)
    count = tl.load(counts + bins, volatile=True)
    at_or_above = tl.sum(count) - tl.cumsum(count, axis=0) + count
    place = tl.sum((at_or_above >= rank).to(tl.int32)) - 1
    whole = (prefix.to(tl.int64) << WIDTH) | place
    tl.store(state + PREFIX, whole)
    tl.store(state + RANK, rank - tl.sum(tl.where(bins > place, count, 0)))
    return whole


@triton.jit
def _write_value(out, prefix, SHIFT: tl.constexpr):
    """out[0]: the magnitude with the leading bits `prefix`."""
    bits = (prefix << SHIFT).to(tl.int32)
    if out.dtype.element_ty == tl.bfloat16:
        tl.store(out, (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True))
    else:
        tl.store(out, bits.to(tl.float32, bitcast=True).to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["n", "room", "programs", "k"])
def _count(
    x, others, found, counts, state, out, n, room, programs, k, SHIFT: tl.constexpr, WIDTH: tl.constexpr,
    NARROW: tl.constexpr, EITHER: tl.constexpr, RUN: tl.constexpr, EVERY: tl.constexpr, SIZE: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    """counts[(|x| bits >> SHIFT) mod 2^WIDTH] += 1 for the values whose bits before those are state[PREFIX]. EITHER: of
    others[: found[0]] if these hold the k largest. NARROW: what _narrow and _write_value do, by the last program."""
    FIRST: tl.constexpr = SHIFT + WIDTH == 31
    prefix = 0 if FIRST else tl.load(state + PREFIX).to(tl.int32)
    rank = k.to(tl.int64) if FIRST else tl.load(state + RANK)
    table = 0 if INTERPRETED else shared_table.new_table(THREADS)
    if EITHER:
        if fits(found, k, room):
            few = tl.load(found)
            _count_all(others, table, counts, few, programs, prefix, SHIFT, WIDTH, RUN, EVERY, SIZE)
        else:
            _count_all(x, table, counts, n, programs, prefix, SHIFT, WIDTH, RUN, EVERY, SIZE)
    else:
        _count_all(x, table, counts, n, programs, prefix, SHIFT, WIDTH, RUN, EVERY, SIZE)
    if not INTERPRETED:
        shared_table.add_to_memory(table, counts, 1 << WIDTH)
    if NARROW:
        tl.debug_barrier()
        if tl.atomic_add(state + DONE, 1, sem="acq_rel") == programs - 1:
            tl.store(state + DONE, 0)
            whole = _narrow(counts, state, rank, tl.full([], 0, tl.int32) + prefix, WIDTH)
            _write_value(out, whole, SHIFT)


def histogram(x):
    """`histogram` of kernels/select.py, by Triton."""
    counts = torch.zeros(BINS + STATE, dtype=torch.int64, device=x.device)
    _round(x, counts, counts[BINS:], x, 0, HISTOGRAM_SHIFT, 31 - HISTOGRAM_SHIFT, NARROW=False)
    return counts[:BINS]


def kth(x, k, few=None, every=1, run=1, rough=False):
    """(0-d, x's dtype: the k-th largest magnitude; state, int64 on the card: its bits without the last `low`, and how
    many of the entries equal to it belong to the k largest; low).

    few: (candidates, int64[1] on the card: how many of them there are), which are read instead if they hold the k
    largest. every, run: of the first `run` of every `every · run` values only. rough: 21 leading bits are enough.
    """
    widths = (31 - HISTOGRAM_SHIFT, *(REFINE[x.dtype][:1] if rough else REFINE[x.dtype]))
    counts = torch.zeros(STATE + sum(1 << width for width in widths), dtype=torch.int64, device=x.device)
    out, low, table, state = torch.empty((), dtype=x.dtype, device=x.device), 31, counts[STATE:], counts
    for width in widths:
        low -= width
        _round(x, table, state, out, k, low, width, few, every, run, NARROW=True)
        table = table[1 << width :]
    return out, state, low


def _round(x, counts, state, out, k, shift, width, few=None, every=1, run=1, **constants):
    """One launch of `_count`."""
    n = x.numel() // (every * run) * run if every > 1 else x.numel()
    others, found = (x, state) if few is None else few
    programs = max(min(triton.cdiv(n, SIZE), PROGRAMS), 1)
    arguments = x, others, found, counts, state, out, n, others.numel(), programs, k
    constants |= {"SHIFT": shift, "WIDTH": width, "EITHER": few is not None, "RUN": run, "EVERY": every}
    launch(_count, programs, *arguments, **constants, SIZE=SIZE, THREADS=32 * WARPS, warps=WARPS)
