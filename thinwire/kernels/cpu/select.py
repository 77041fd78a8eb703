"""Selection on the CPU: a histogram per run, then two passes (count, write) so that runs work in parallel."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from thinwire.kernels.cpu.compile import array, inline, parallel
from thinwire.kernels.cpu.scalar import INFINITY_BITS, MAGNITUDE, as_bits, read, write
from thinwire.kernels.select import BINS, HISTOGRAM_SHIFT

RUN = 1 << 16  # values a loop iteration handles
REFINE = 10  # bits resolved by each of the two refining histograms (31 = 11 + 10 + 10)


@inline
def magnitude(x, i):
    """|x[i]| as the bits of a float without sign, which compare like the values."""
    return np.int32(as_bits(read(x, i)) & MAGNITUDE)


@parallel
def _histogram(x, counts, prefix, prefix_shift, shift, mask):
    """counts[run, (|x| bits >> shift) & mask] of the values whose leading bits equal `prefix`."""
    for run in prange(counts.shape[0]):
        row = counts[run]
        per = (x.size + counts.shape[0] - 1) // counts.shape[0]
        part = x[run * per : (run + 1) * per]
        for i in range(part.size):
            bits = magnitude(part, i)
            if (bits >> prefix_shift) == prefix:
                row[(bits >> shift) & mask] += 1


@parallel
def _count(x, at_least, limit, counts):
    """counts[run] = (entries above the bits `at_least` and at most `limit`, entries equal to `at_least`)."""
    for run in prange(counts.shape[0]):
        part = x[run * RUN : (run + 1) * RUN]
        above, equal = 0, 0
        for i in range(part.size):
            bits = magnitude(part, i)
            above += at_least < bits <= limit
            equal += bits == at_least
        counts[run, 0] = above
        counts[run, 1] = equal


@parallel
def _compact(x, at_least, limit, starts, ties, index, values):
    """Write run by run: entries above, and the first ties[run] of those equal, in index order, while room is left."""
    for run in prange(starts.size):
        part = x[run * RUN : (run + 1) * RUN]
        place, left = starts[run], ties[run]
        for i in range(part.size):
            bits = magnitude(part, i)
            if at_least <= bits <= limit and place < index.size:
                if bits == at_least:
                    if left == 0:
                        continue
                    left -= 1
                index[place] = run * RUN + i
                values[place] = part[i]
                place += 1


@parallel
def _scatter_add(out, index, values):
    for run in prange((index.size + RUN - 1) // RUN):
        for i in range(run * RUN, min(index.size, (run + 1) * RUN)):
            write(out, index[i], read(out, index[i]) + read(values, i))


def histogram(x):
    """`histogram` of kernels/select.py, by Numba."""
    x = _native(x)
    counts = np.zeros((_runs(x.numel()), BINS), np.int64)
    _histogram(array(x), counts, 0, 31, HISTOGRAM_SHIFT, BINS - 1)
    return torch.from_numpy(counts.sum(axis=0))


def kth_magnitude(x, k):
    """`kth_magnitude` of kernels/select.py, by Numba."""
    bits = _kth_bits(array(_native(x)), k)
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32).to(x.dtype)


def _kth_bits(x, k):
    """The k-th largest magnitude as bits: 11 leading bits, then 10, then 10."""
    prefix, above = 0, 0
    for shift, width in ((HISTOGRAM_SHIFT, 31 - HISTOGRAM_SHIFT), (REFINE, REFINE), (0, REFINE)):
        counts = np.zeros((_runs(x.size), 1 << width), np.int64)
        _histogram(x, counts, prefix, shift + width, shift, (1 << width) - 1)
        at_or_above = np.cumsum(counts.sum(axis=0)[::-1])[::-1]
        place = int(np.count_nonzero(at_or_above >= k - above)) - 1
        above += int(at_or_above[place + 1]) if place + 1 < at_or_above.size else 0
        prefix = prefix << width | place
    return prefix


def select(x, threshold, cap):
    """`select` of kernels/select.py, by Numba."""
    native = array(_native(x))
    at_least = int(torch.tensor(max(threshold, 0.0)).to(x.dtype).float().view(torch.int32))  # in x's own precision
    counts = _counts(native, at_least, INFINITY_BITS)  # NaN is not at or above anything
    total = min(cap, int(counts.sum()))
    return _gather(x, native, at_least, INFINITY_BITS, counts.sum(axis=1), counts[:, 1], total)


def top(x, k):
    """`top` of kernels/select.py, by Numba."""
    native = array(_native(x))
    at_least = _kth_bits(native, k)
    counts = _counts(native, at_least, MAGNITUDE)
    quota = k - int(counts[:, 0].sum())
    before = np.cumsum(counts[:, 1]) - counts[:, 1]
    ties = np.clip(quota - before, 0, counts[:, 1])
    return _gather(x, native, at_least, MAGNITUDE, counts[:, 0] + ties, ties, k)


def _counts(native, at_least, limit):
    counts = np.empty((-(-native.size // RUN), 2), np.int64)
    _count(native, np.int32(at_least), limit, counts)
    return counts


def _gather(x, native, at_least, limit, per_run, ties, total):
    index, values = torch.empty(total, dtype=torch.int64), torch.empty(total, dtype=x.dtype)
    place = array(torch.empty(total, dtype=torch.float32)) if x.dtype == torch.float16 else array(values)
    starts = np.cumsum(per_run) - per_run
    _compact(native, np.int32(at_least), limit, starts, np.ascontiguousarray(ties), array(index), place)
    if x.dtype == torch.float16:
        values.copy_(torch.from_numpy(place))
    return index, values


def scatter_add(out, index, values):
    """`scatter_add` of kernels/select.py, by Numba."""
    if index.numel() and (int(index.min()) < 0 or int(index.max()) >= out.numel()):
        raise IndexError(f"index outside 0…{out.numel() - 1}")
    if out.dtype == torch.float16:
        return out.index_add_(0, index, values.to(out.dtype))
    _scatter_add(array(out), array(index), array(values.to(out.dtype)))
    return out


def _native(x):
    return x.float() if x.dtype in (torch.float16, torch.float64) else x


def _runs(n):
    """One histogram per thread, but not more than there is work."""
    return max(1, min(torch.get_num_threads(), n // RUN))
