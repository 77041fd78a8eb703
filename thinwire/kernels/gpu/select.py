"""Selection in Triton: compaction in index order. Only `select` waits for the card.

x is read twice, to count and to write: a tile's place in the output is the number of entries before it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from thinwire.kernels.gpu import tile as tiles
from thinwire.kernels.gpu.launch import launch
from thinwire.kernels.gpu.radix import histogram, kth_bits
from thinwire.kernels.gpu.scalar import INFINITY_BITS, MAGNITUDE, bits_of, narrow, widen

__all__ = ["histogram", "kth_magnitude", "scatter_add", "select", "top"]

SIZE = 4096  # values a program handles


@triton.jit
def _classes(values, start, n, state, LOW: tl.constexpr, NAN: tl.constexpr, SIZE: tl.constexpr):
    """(above, equal) as int32[SIZE]: |values| against the bits state[0], which lack the LOW last."""
    bits = bits_of(widen(values)) & MAGNITUDE
    limit = tl.load(state).to(tl.int32)
    counted = start + tl.arange(0, SIZE) < n
    if not NAN:
        counted &= bits <= INFINITY_BITS
    return (counted & ((bits >> LOW) > limit)).to(tl.int32), (counted & ((bits >> LOW) == limit)).to(tl.int32)


@triton.jit(do_not_specialize=["n"])
def _count(x, state, counts, n, LOW: tl.constexpr, NAN: tl.constexpr, SIZE: tl.constexpr):
    """counts[0, tile], counts[1, tile]: entries above the limit, entries equal to it."""
    tile = tl.program_id(0)
    start = tile.to(tl.int64) * SIZE
    above, equal = _classes(tiles.read_run(x, start, n, SIZE), start, n, state, LOW, NAN, SIZE)
    tl.store(counts + tile, tl.sum(above).to(tl.int64))
    tl.store(counts + tl.num_programs(0) + tile, tl.sum(equal).to(tl.int64))


@triton.jit(do_not_specialize=["n", "room"])
def _compact(x, state, ends, index, values, n, room, LOW: tl.constexpr, NAN: tl.constexpr, SIZE: tl.constexpr):
    """Write the entries above, and the first state[1] of those equal; ends: running sums of the counts."""
    tile = tl.program_id(0)
    start = tile.to(tl.int64) * SIZE
    found = tiles.read_run(x, start, n, SIZE)
    above, equal = _classes(found, start, n, state, LOW, NAN, SIZE)
    before = tl.load(ends + tile) - tl.sum(above)
    ties_before = tl.load(ends + tl.num_programs(0) + tile) - tl.sum(equal)
    quota = tl.load(state + 1)
    # both running counts in one scan: SIZE < 2^16
    ranks = tl.cumsum(above + (equal << 16), axis=0)
    ties = ties_before + (ranks >> 16) - equal
    place = before + (ranks & 0xFFFF) - above + tl.minimum(ties, quota)
    taken = ((above == 1) | ((equal == 1) & (ties < quota))) & (place < room)
    tl.store(index + place, start + tl.arange(0, SIZE), mask=taken)
    tl.store(values + place, found, mask=taken)


@triton.jit(do_not_specialize=["n", "k"])
def _scatter_add(out, index, values, n, k, SIZE: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    place = tl.load(index + i, mask=i < k, other=-1)
    inside = (place >= 0) & (place < n)
    value = narrow(widen(tl.load(values + i, mask=inside, other=0)), out.dtype.element_ty)
    total = widen(tl.load(out + place, mask=inside, other=0)) + widen(value)
    tl.store(out + place, narrow(total, out.dtype.element_ty), mask=inside)


def kth_magnitude(x, k):
    state, low = kth_bits(x, k)
    return (state[0] << low).to(torch.int32).view(torch.float32).to(x.dtype)


def top(x, k):
    """No host synchronisation: the output has k entries whatever x holds (NaN counts as the largest)."""
    state, low = kth_bits(x, k)
    ends = _ends(x, state, low, nan=True)
    return _gather(x, state, ends, k, low, nan=True)


def select(x, threshold, cap):
    """One host synchronisation, for the number of entries found."""
    limit = int(torch.tensor(max(threshold, 0.0), dtype=x.dtype).float().view(torch.int32)) - 1
    state = torch.zeros(2, dtype=torch.int64, device=x.device)  # above the limit, and none of those equal to it
    state[0].fill_(limit)
    ends = _ends(x, state, 0, nan=False)
    found = int(ends[0, -1]) if x.numel() else 0
    return _gather(x, state, ends, min(cap, found), 0, nan=False)


def _ends(x, state, low, nan):
    """int64[2, tiles]: entries above and equal, up to and including each tile."""
    programs = triton.cdiv(x.numel(), SIZE)
    counts = torch.empty(2, programs, dtype=torch.int64, device=x.device)
    launch(_count, programs, x, state, counts, x.numel(), LOW=low, NAN=nan, SIZE=SIZE)
    return counts.cumsum(dim=1)


def _gather(x, state, ends, size, low, nan):
    index = torch.empty(size, dtype=torch.int64, device=x.device)
    values = torch.empty(size, dtype=x.dtype, device=x.device)
    programs = triton.cdiv(x.numel(), SIZE)
    launch(_compact, programs, x, state, ends, index, values, x.numel(), size, LOW=low, NAN=nan, SIZE=SIZE)
    return index, values


def scatter_add(out, index, values):
    """An index outside `out` is skipped: to raise would need a host synchronisation."""
    k = index.numel()
    launch(_scatter_add, triton.cdiv(k, SIZE), out, index, values, out.numel(), k, SIZE=SIZE)
    return out
