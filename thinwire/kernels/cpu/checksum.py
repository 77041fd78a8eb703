"""The checksum on the CPU: 32-bit products summed in halves, so nothing overflows and any order will do."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from thinwire.kernels.checksum import PRIME, SEED, weight
from thinwire.kernels.cpu.compile import inline, parallel
from thinwire.kernels.cpu.scalar import hash32, high_key
from thinwire.kernels.random import split

RUN = 1 << 14  # words a loop iteration handles


@inline
def _run_sum(words, run, k0, k1):
    """Of the words from run·RUN on, at most RUN of them."""
    part = words[run * RUN : (run + 1) * RUN]
    key, first = high_key(run * RUN, k0), np.uint32(run * RUN)
    low, high = np.uint64(0), np.uint64(0)
    for i in range(part.size):
        h = np.uint64(hash32(np.uint32(first + np.uint32(i)), key, k1))
        weight = np.uint64(1) + (h - np.uint64(PRIME - 1) if h >= np.uint64(PRIME - 1) else h)
        product = np.uint64(part[i]) * weight
        low += product & np.uint64(0xFFFFFFFF)
        high += product >> np.uint64(32)
    return ((high % np.uint64(PRIME)) * np.uint64(5) + low) % np.uint64(PRIME)  # 2³² ≡ 5


@parallel
def _sums(words, sums, k0, k1):
    for run in prange(sums.size):
        sums[run] = _run_sum(words, run, k0, k1)


@parallel
def _row_sums(words, sums, k0, k1):
    for row in prange(sums.size):
        total = np.uint64(0)
        for run in range((words.shape[1] + RUN - 1) // RUN):
            total += _run_sum(words[row], run, k0, k1)
        sums[row] = total % np.uint64(PRIME)


def weighted_sum(data):
    """What kernels/checksum.py calls by this name, by Numba."""
    raw = data.contiguous().numpy()
    whole = raw[: raw.size // 4 * 4]
    words = whole.view(np.uint32) if whole.ctypes.data % 4 == 0 else whole.copy().view(np.uint32)
    sums = np.zeros(-(-words.size // RUN), np.uint64)
    _sums(words, sums, *split(SEED))
    last = int.from_bytes(raw[whole.size :].tobytes(), "little")
    return torch.tensor((int(sums.sum(dtype=np.uint64)) + last * weight(words.size)) % PRIME)


def row_sums(rows):
    """uint8[r, 4·words] → int64[r], the weighted sum of every row."""
    raw = rows.contiguous().numpy()
    words = raw.view(np.uint32) if raw.ctypes.data % 4 == 0 else raw.copy().view(np.uint32)
    sums = np.zeros(len(words), np.uint64)
    _row_sums(words, sums, *split(SEED))
    return torch.from_numpy(sums.view(np.int64))
