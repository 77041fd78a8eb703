"""The scaled sign on the CPU."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from thinwire.kernels import sign as layout
from thinwire.kernels.cpu.bits import pack_ones, unpack_ones
from thinwire.kernels.cpu.compile import CHUNK_BLOCKS, allocate, array, inline, parallel
from thinwire.kernels.cpu.quantize import absmax_bits, packed_slice, views
from thinwire.kernels.cpu.scalar import INFINITY_BITS, as_float, read, scale_code, scale_value, write
from thinwire.kernels.scales import NONFINITE
from thinwire.kernels.sign import GRID


@inline
def mean_scale(x, fmax):
    """Scale code of the mean magnitude, summed on the integer grid."""
    top = absmax_bits(x)
    if top == 0:
        return np.int32(0)
    if top >= INFINITY_BITS:
        return np.int32(NONFINITE)
    absmax, total = as_float(top), np.int64(0)
    for i in range(x.size):
        total += np.int32(np.rint(abs(read(x, i)) / absmax * np.float32(GRID)))
    mean = np.float32(np.float64(absmax) * np.float64(total) / (np.float64(x.size) * GRID))
    if mean == 0:
        return np.int32(0)
    code = scale_code(mean, True)
    if scale_value(code) > fmax:
        code -= np.int32(1)
    return code


@parallel
def _encode(x, packed, tail, block, fmax):
    blocks = (x.size + block - 1) // block
    for chunk in prange((blocks + CHUNK_BLOCKS - 1) // CHUNK_BLOCKS):
        negative = np.empty(block, np.uint8)
        for k in range(chunk * CHUNK_BLOCKS, min(blocks, (chunk + 1) * CHUNK_BLOCKS)):
            part = x[k * block : (k + 1) * block]
            tail[k] = mean_scale(part, fmax)
            for i in range(part.size):
                negative[i] = read(part, i) < 0
            pack_ones(negative[: part.size], packed_slice(packed, k * block, part.size, 1))


@parallel
def _decode(packed, tail, out, block):
    blocks = (out.size + block - 1) // block
    for chunk in prange((blocks + CHUNK_BLOCKS - 1) // CHUNK_BLOCKS):
        negative = np.empty(block, np.uint8)
        for k in range(chunk * CHUNK_BLOCKS, min(blocks, (chunk + 1) * CHUNK_BLOCKS)):
            part = out[k * block : (k + 1) * block]
            unpack_ones(packed_slice(packed, k * block, part.size, 1), negative[: part.size])
            scale = scale_value(np.int32(tail[k]))
            for i in range(part.size):
                write(part, i, -scale if negative[i] else scale)


def encode_sign(x, block):
    """`encode_sign` of kernels/sign.py, by Numba."""
    n = x.numel()
    wire = allocate(layout.sign_bytes(n, block, x.dtype), torch.uint8)
    packed, tail = views(wire, n, 1, block)
    packed[-2:] = 0
    native = x.float() if x.dtype == torch.float16 else x
    _encode(array(native), packed, tail, block, np.float32(torch.finfo(x.dtype).max))
    return wire


def decode_sign(wire, n, block, dtype):
    """`decode_sign` of kernels/sign.py, by Numba."""
    packed, tail = views(wire.contiguous(), n, 1, block)
    out = allocate(n, torch.float32 if dtype == torch.float16 else dtype)
    _decode(packed, tail, array(out), block)
    return out.to(dtype)
