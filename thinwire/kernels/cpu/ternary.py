"""Five trits a byte on the CPU."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from thinwire.kernels.cpu.compile import array, parallel
from thinwire.kernels.ternary import trit_bytes

RUN = 1 << 12  # bytes a loop iteration handles


@parallel
def _pack(codes, out):
    for run in prange((out.size + RUN - 1) // RUN):
        target = out[run * RUN : (run + 1) * RUN]
        source = codes[run * RUN * 5 : (run + 1) * RUN * 5]
        whole = source.size // 5
        for i in range(whole):
            a = source[5 * i] + 3 * source[5 * i + 1] + 9 * source[5 * i + 2]
            target[i] = np.uint8(a + 27 * source[5 * i + 3] + 81 * source[5 * i + 4])
        if whole < target.size:
            value, weight = 0, 1
            for j in range(5 * whole, source.size):
                value += weight * source[j]
                weight *= 3
            target[whole] = np.uint8(value)


@parallel
def _unpack(wire, out):
    for run in prange((wire.size + RUN - 1) // RUN):
        source = wire[run * RUN : (run + 1) * RUN]
        target = out[run * RUN * 5 : (run + 1) * RUN * 5]
        for i in range(source.size):
            digits, left = target[5 * i : 5 * i + 5], np.uint32(source[i])
            for j in range(digits.size):
                digits[j] = np.uint8(left % np.uint32(3))
                left = np.uint32(left // np.uint32(3))


def pack_trits(codes):
    """`pack_trits` of kernels/ternary.py, by Numba."""
    out = torch.empty(trit_bytes(codes.numel()), dtype=torch.uint8)
    _pack(array(codes), array(out))
    return out


def unpack_trits(wire, n):
    """`unpack_trits` of kernels/ternary.py, by Numba."""
    out = torch.empty(n, dtype=torch.uint8)
    _unpack(array(wire), array(out))
    return out
