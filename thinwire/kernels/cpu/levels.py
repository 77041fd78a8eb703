"""The two magnitudes that fit a block best on the CPU: blocks in parallel, each sorted in the cache."""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import prange

from thinwire.kernels.cpu.compile import array, parallel
from thinwire.kernels.levels import BITS, LEAST


@parallel
def _two_means(x, block, low, high):
    for row in prange(low.size):
        start = row * block
        count = min(block, x.size - start)
        top = 0.0
        for i in range(count):
            top = max(top, abs(np.float64(x[start + i])))
        exponent = max(math.frexp(top)[1], LEAST)
        whole = np.empty(count, np.int64)
        for i in range(count):
            whole[i] = np.int64(math.ldexp(abs(np.float64(x[start + i])), BITS - exponent))
        whole.sort()
        total = np.int64(0)
        for i in range(count):
            total += whole[i]
        best, cut, lower, below = -1.0, 1, whole[0], np.int64(0)
        for i in range(count - 1):
            below += whole[i]
            a, b = np.float64(below), np.float64(total - below)
            spread = a * a / np.float64(i + 1) + b * b / np.float64(count - i - 1)
            if spread > best:
                best, cut, lower = spread, i + 1, below
        low[row] = math.ldexp(np.float64(lower) / np.float64(cut), exponent - BITS)
        high[row] = low[row]
        if count > 1:
            high[row] = math.ldexp(np.float64(total - lower) / np.float64(count - cut), exponent - BITS)


def two_means(x, block):
    """`two_means` of kernels/levels.py, by Numba."""
    low = torch.empty(-(-x.numel() // block), dtype=torch.float32)
    high = torch.empty_like(low)
    _two_means(array(x.float().reshape(-1)), block, low.numpy(), high.numpy())
    return low, high
