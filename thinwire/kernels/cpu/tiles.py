"""The largest of every row on the CPU: rows in parallel, each copied as integers that stay in the cache."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from thinwire.kernels.cpu.compile import array, parallel
from thinwire.kernels.cpu.select import magnitude


@parallel
def _top(x, length, index):
    for row in prange(index.shape[0]):
        k = index.shape[1]
        part = x[row * length : (row + 1) * length]
        bits = np.empty(length, np.int32)
        for i in range(length):
            bits[i] = magnitude(part, i)
        edge = np.int32(0)
        for shift in range(30, -1, -1):
            trial = np.int32(edge | (1 << shift))
            count = 0
            for i in range(length):
                count += bits[i] >= trial
            if count >= k:
                edge = trial
        room = k
        for i in range(length):
            room -= bits[i] > edge
        place = 0
        for i in range(length):
            if bits[i] > edge or (bits[i] == edge and room > 0):
                room -= bits[i] == edge
                index[row, place] = i
                place += 1


def top_rows(x, k):
    """`top_rows` of kernels/tiles.py, by Numba."""
    native = x.float() if x.dtype in (torch.float16, torch.float64) else x
    index = torch.empty(x.shape[0], k, dtype=torch.int64)
    _top(array(native.reshape(-1)), x.shape[1], index.numpy())
    return index
