"""The random Hadamard rotation on the CPU: each block is transformed in place, in L1."""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import prange

from thinwire.kernels.cpu.compile import allocate, array, inline, parallel
from thinwire.kernels.cpu.scalar import hash32, high_key, read
from thinwire.kernels.hadamard import pieces
from thinwire.kernels.random import split

CHUNK = 64  # transforms a loop iteration handles


@inline
def butterflies(x):
    """The Walsh–Hadamard transform of x in place, without its factor."""
    stride = 1
    while stride < x.size:
        for start in range(0, x.size, 2 * stride):
            low, high = x[start : start + stride], x[start + stride : start + 2 * stride]
            for i in range(stride):
                a, b = low[i], high[i]
                low[i], high[i] = a + b, a - b
        stride *= 2


@inline
def flip(x, position, k0, k1):
    """Random signs for x, whose first value is number `position` of the tensor; k0, k1: the key."""
    key, first = high_key(position, k0), np.uint32(position)
    for i in range(x.size):
        if hash32(np.uint32(first + np.uint32(i)), key, k1) & np.uint32(1):
            x[i] = -x[i]


@parallel
def _rotate(x, out, offset, size, factor, k0, k1, inverse):
    count = x.size // size
    for chunk in prange((count + CHUNK - 1) // CHUNK):
        for k in range(chunk * CHUNK, min(count, (chunk + 1) * CHUNK)):
            source, target = x[k * size : (k + 1) * size], out[k * size : (k + 1) * size]
            for i in range(size):
                target[i] = read(source, i)
            if not inverse:
                flip(target, offset + k * size, k0, k1)
            butterflies(target)
            for i in range(size):
                target[i] = target[i] * factor
            if inverse:
                flip(target, offset + k * size, k0, k1)


def rotate(x, block, seed, inverse):
    """`rotate` of kernels/hadamard.py, by Numba."""
    x = x.float() if x.dtype == torch.float16 else x
    out = allocate(x.numel(), torch.float32)
    source, target = array(x), array(out)
    for start, count, size in pieces(x.numel(), block):
        end, factor = start + count * size, np.float32(1 / math.sqrt(size))
        _rotate(source[start:end], target[start:end], start, size, factor, *split(seed), inverse)
    return out
