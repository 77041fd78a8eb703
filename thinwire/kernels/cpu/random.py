"""Rows of counter-based random numbers on the CPU, one seed a row: many simulated workers in one call."""

from __future__ import annotations

import numpy as np
import torch

from thinwire.kernels.cpu.compile import array, inline
from thinwire.kernels.cpu.scalar import hash32, high_key, uniform
from thinwire.kernels.random import GOLDEN, MUL1, MUL2, ROUNDS


@inline
def _mix(value, key):
    """random.mix of one integer."""
    value, key = np.uint32(value), np.uint32(key)
    h = np.uint32(value * np.uint32(GOLDEN) + key)
    h = np.uint32(np.uint32(h ^ (h >> np.uint32(16))) * np.uint32(MUL1))
    h = np.uint32(np.uint32(h ^ key ^ (h >> np.uint32(15))) * np.uint32(MUL2))
    return np.uint32(h ^ (h >> np.uint32(15)))


@inline
def _split(seed):
    low, high = np.uint32(seed & 0xFFFFFFFF), np.uint32((seed >> 32) & 0xFFFFFFFF)
    return _mix(low, GOLDEN), _mix(high, _mix(low, MUL1))


@inline
def _uniform(seeds, out):
    for r in range(seeds.size):
        k0, k1 = _split(seeds[r])
        row = out[r]
        for i in range(row.size):
            row[i] = uniform(hash32(np.uint32(i), high_key(i, k0), k1))


@inline
def _sample(seeds, n, mask, shift, out):
    for r in range(seeds.size):
        k0, k1 = _split(seeds[r])
        multipliers, addends = np.empty(ROUNDS, np.int64), np.empty(ROUNDS, np.int64)
        for j in range(ROUNDS):
            multipliers[j] = np.int64(_mix(2 * j, k0)) | 1
            both = (np.int64(_mix(2 * j + 1, k1)) << 32) | np.int64(_mix(2 * j + 1, k0))
            addends[j] = both & np.int64((1 << 62) - 1)
        for i in range(out.shape[1]):
            x = np.int64(i)
            while True:
                for j in range(ROUNDS):
                    x = (x * multipliers[j] + addends[j]) & mask
                    x ^= x >> shift
                if x < n:
                    break
            out[r, i] = x


def uniform_rows(n, seeds):
    """`uniform_rows` of kernels/random.py, by Numba."""
    out = torch.empty(len(seeds), n, dtype=torch.float32)
    _uniform(_seeds(seeds), array(out))
    return out


def sample_rows(n, k, seeds):
    """`sample_rows` of kernels/random.py, by Numba."""
    bits = max(1, (n - 1).bit_length())
    out = torch.empty(len(seeds), k, dtype=torch.int64)
    _sample(_seeds(seeds), n, (1 << bits) - 1, (bits + 1) // 2, array(out))
    return out


def _seeds(seeds):
    return seeds.numpy() if isinstance(seeds, torch.Tensor) else np.asarray(seeds, np.int64)
