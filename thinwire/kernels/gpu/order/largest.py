"""The k largest in Triton, once radix.py has the k-th: each tile counts, then it writes to its place.

Both kernels read candidates, if they hold the k largest, or all values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from thinwire.kernels.gpu.launch import launch
from thinwire.kernels.gpu.order import radix
from thinwire.kernels.gpu.order.radix import PREFIX, RANK, fits
from thinwire.kernels.gpu.scalar import MAGNITUDE, bits_of, widen

SIZE, WARPS, PROGRAMS = 2048, 4, 2112


@triton.jit
def _above_and_ties(x, place, n, state, LOW: tl.constexpr):
    """(the values at `place`; bool: above the k-th largest, as large as it)."""
    values = tl.load(x + place, mask=place < n, other=0)
    bits, edge = (bits_of(widen(values)) & MAGNITUDE) >> LOW, tl.load(state + PREFIX).to(tl.int32)
    return values, (place < n) & (bits > edge), (place < n) & (bits == edge)


@triton.jit
def _count_of(x, state, counts, n, tiles, programs, LOW: tl.constexpr, SIZE: tl.constexpr):
    tile = tl.program_id(0).to(tl.int64)
    while tile * SIZE < n:
        _, above, ties = _above_and_ties(x, tile * SIZE + tl.arange(0, SIZE), n, state, LOW)
        tl.store(counts + tile, tl.sum(above.to(tl.int32)))
        tl.store(counts + tiles + tile, tl.sum(ties.to(tl.int32)))
        tile += programs


@triton.jit(do_not_specialize=["n", "room", "k", "tiles", "programs"])
def _count(
    x, others, found, state, counts, n, room, k, tiles, programs, EITHER: tl.constexpr, LOW: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """counts: of each tile those above the k-th largest; in a second row those as large as it. EITHER: of the values
    others[: found[0]], if these hold the k largest; what counts say of further tiles is void then."""
    if EITHER:
        if fits(found, k, room):
            _count_of(others, state, counts, tl.load(found), tiles, programs, LOW, SIZE)
        else:
            _count_of(x, state, counts, n.to(tl.int64), tiles, programs, LOW, SIZE)
    else:
        _count_of(x, state, counts, n.to(tl.int64), tiles, programs, LOW, SIZE)


@triton.jit
def _write_of(
    x, places, state, counts, ends, index, out, n, tiles, programs, LOW: tl.constexpr, NAMED: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    tile, quota = tl.program_id(0).to(tl.int64), tl.load(state + RANK)
    while tile * SIZE < n:
        place = tile * SIZE + tl.arange(0, SIZE)
        values, above, ties = _above_and_ties(x, place, n, state, LOW)
        before = tl.load(ends + tile) - tl.load(counts + tile)
        ties_before = tl.load(ends + tiles + tile) - tl.load(counts + tiles + tile) - tl.load(ends + tiles - 1)
        ones = ties.to(tl.int32)
        taken = above | (ties & (ties_before + tl.cumsum(ones, axis=0) <= quota))
        chosen = taken.to(tl.int32)
        to = before + tl.minimum(ties_before, quota) + tl.cumsum(chosen, axis=0) - 1
        tl.store(index + to, tl.load(places + place, mask=taken, other=0) if NAMED else place, mask=taken)
        tl.store(out + to, values, mask=taken)
        tile += programs


@triton.jit(do_not_specialize=["n", "room", "k", "tiles", "programs"])
def _write(
    x, others, places, found, state, counts, ends, index, out, n, room, k, tiles, programs, EITHER: tl.constexpr,
    LOW: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """index, out: those above the k-th largest, and the first state[RANK] of those as large as it. ends: sums of
    `counts` up to and including each, of both rows as one. places: the indices of `others`."""
    if EITHER:
        if fits(found, k, room):
            few = tl.load(found)
            _write_of(others, places, state, counts, ends, index, out, few, tiles, programs, LOW, True, SIZE)
        else:
            _write_of(x, places, state, counts, ends, index, out, n.to(tl.int64), tiles, programs, LOW, False, SIZE)
    else:
        _write_of(x, places, state, counts, ends, index, out, n.to(tl.int64), tiles, programs, LOW, False, SIZE)


def write(x, k, places, few, index, values):
    """(index, values): filled with the k largest of x, in order. places, few: indices of candidates and what radix.kth
    takes by that name; or None."""
    _, state, low = radix.kth(x, k, few)
    n, tiles = x.numel(), triton.cdiv(x.numel(), SIZE)
    counts = torch.empty(2, tiles, dtype=torch.int32, device=x.device)
    others, found = (x, state) if few is None else few
    programs = min(tiles, PROGRAMS)
    numbers = n, others.numel(), k, tiles, programs
    constants = {"EITHER": few is not None, "LOW": low, "SIZE": SIZE, "warps": WARPS}
    launch(_count, programs, x, others, found, state, counts, *numbers, **constants)
    ends = counts.view(-1).cumsum(0)  # of each row by itself torch takes one program per row
    named = state if places is None else places
    launch(_write, programs, x, others, named, found, state, counts, ends, index, values, *numbers, **constants)
    return index, values
