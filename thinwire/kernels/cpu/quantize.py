"""Block-scaled quantisation on the CPU: each block is read once from memory, then worked on in L1.

Blocks are passed as slices: Numba checks a computed index for being negative, which keeps LLVM from
vectorising; a loop counter into a slice it does not check (five times faster here).
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from numba import prange

from thinwire.kernels import quantize as layout
from thinwire.kernels.cpu.compile import CHUNK_BLOCKS, allocate, array, inline, parallel
from thinwire.kernels.cpu.scalar import (
    INFINITY_BITS,
    MAGNITUDE,
    as_bits,
    as_float,
    block_scale,
    hash32,
    high_key,
    read,
    reciprocal,
    scale_code,
    scale_value,
    write,
)  # fmt: skip
from thinwire.kernels.quantize import COARSE, FULL, GRIDS, LEAST_SQUARES, NEAREST, STOCHASTIC
from thinwire.kernels.random import split
from thinwire.kernels.scales import SIGN

HALF_CHUNK = 1 << 20  # float16 values converted at a time: Numba has no float16 arithmetic on CPUs
MODERATE_LOW, MODERATE_HIGH = np.int32(75 << 23), np.int32(142 << 23)  # bits of 2^-52 and 2^15: no lift, no limit


@inline
def absmax_bits(x):
    """Bits of max|x|: as integers, so NaN and Inf come out on top."""
    top = np.int32(0)
    for i in range(x.size):
        top = max(top, np.int32(as_bits(read(x, i)) & MAGNITUDE))
    return top


@inline
def is_negative_extreme(x, top):
    """Is the extreme, whose magnitude has the bits `top`, reached by negative values only?"""
    found = False
    for i in range(x.size):
        found |= as_bits(read(x, i)) == top
    return not found


@inline
def round_nearest(x, scale, least, most, codes):
    """The general case: scales of any size, codes clamped."""
    lift, r = reciprocal(scale)
    for i in range(x.size):
        q = np.int32(np.rint(read(x, i) * lift * r))
        codes[i] = np.uint8(np.int32(min(max(q, least), most) - least))


@inline
def round_plain(x, r, qmax, codes):
    """The common case, with the same bits: lift is 1 and |x|·r cannot reach qmax + ½."""
    for i in range(x.size):
        codes[i] = np.uint8(np.int32(np.int32(np.rint(read(x, i) * r)) + qmax))


@inline
def round_stochastic(x, scale, qmax, codes, position, k0, k1):
    """codes ← x ÷ scale, rounded up with the chance of its fraction; position, k0, k1: of the random numbers."""
    key, first = high_key(position, k0), np.uint32(position)
    lift, r = reciprocal(scale)
    for i in range(x.size):
        t = read(x, i) * lift * r
        u = np.float64(hash32(np.uint32(first + np.uint32(i)), key, k1) >> np.uint32(9)) * 2.0**-23
        q = np.int32(np.ceil(np.float64(t) - u))
        codes[i] = np.uint8(np.int32(min(max(q, np.int32(-qmax)), qmax) + qmax))


@inline
def best_shrink(x, extreme, steps, inverses, shrinks, qmax, grid):
    """layout.best_shrink of one block; extreme: max|x| with its own sign; grid: int32[block] scratch."""
    lift, r = reciprocal(extreme)
    r *= np.float32(GRIDS[0] if qmax < 1 << (COARSE - 1) else GRIDS[1])
    for i in range(x.size):
        grid[i] = np.int32(np.rint(read(x, i) * lift * r))
    best, choice = np.int64(1) << 62, 0
    for j in range(steps.size):
        step, inverse, error = steps[j], inverses[j], np.int64(0)
        for i in range(x.size):
            q = np.int32(np.rint(np.float32(grid[i]) * inverse))
            q = min(max(q, np.int32(-qmax)), np.int32(qmax + 1))
            off = np.int32(grid[i] - np.int32(q * step))
            error += np.int64(off) * np.int64(off)
        if error < best:
            best, choice = error, j
    return shrinks[choice]


@inline
def pack_block(codes, bits, out):
    """codes: uint8[multiple of 8], zero after the last → out: the packed bytes of this block."""
    if bits == 8:
        for i in range(out.size):
            out[i] = codes[i]
    elif bits == 4:
        for i in range(out.size):
            out[i] = codes[2 * i] | (codes[2 * i + 1] << np.uint8(4))
    elif bits == 2:
        for i in range(out.size):
            a = codes[4 * i] | (codes[4 * i + 1] << np.uint8(2))
            out[i] = a | (codes[4 * i + 2] << np.uint8(4)) | (codes[4 * i + 3] << np.uint8(6))
    else:
        for group in range((out.size + bits - 1) // bits):
            eight, word = codes[8 * group : 8 * group + 8], np.uint64(0)
            for i in range(8):
                word |= np.uint64(eight[i]) << np.uint64(bits * i)
            part = out[group * bits : group * bits + bits]
            for i in range(part.size):
                part[i] = np.uint8(word >> np.uint64(8 * i))


@inline
def unpack_block(wire, bits, codes):
    """The inverse: the packed bytes of a block → codes (rounded up to whole bytes or groups of eight)."""
    if bits == 8:
        for i in range(wire.size):
            codes[i] = wire[i]
    elif bits == 4:
        for i in range(wire.size):
            codes[2 * i] = wire[i] & np.uint8(15)
            codes[2 * i + 1] = wire[i] >> np.uint8(4)
    elif bits == 2:
        for i in range(wire.size):
            for j in range(4):
                codes[4 * i + j] = (wire[i] >> np.uint8(2 * j)) & np.uint8(3)
    else:
        mask = np.uint64((1 << bits) - 1)
        for group in range((wire.size + bits - 1) // bits):
            part, word = wire[group * bits : group * bits + bits], np.uint64(0)
            for i in range(part.size):
                word |= np.uint64(part[i]) << np.uint64(8 * i)
            eight = codes[8 * group : 8 * group + 8]
            for i in range(8):
                eight[i] = np.uint8((word >> np.uint64(bits * i)) & mask)


@inline
def encode_nearest(x, qmax, fmax, codes):
    """One block → its codes (in `codes`, zero after the last) and its scale code (returned)."""
    top = absmax_bits(x)
    if x.size < codes.size:
        codes[x.size :] = 0
    if MODERATE_LOW < top < MODERATE_HIGH:
        code = scale_code(as_float(top) / np.float32(qmax), False)
        round_plain(x, np.float32(1) / scale_value(code), qmax, codes)
        return code
    code = block_scale(top, np.float32(1), qmax, fmax)
    if top == 0 or top >= INFINITY_BITS:
        codes[: x.size] = np.uint8(qmax)
    else:
        round_nearest(x, scale_value(code), np.int32(-qmax), qmax, codes)
    return code


@inline
def encode_block(x, bits, fmax, mode, k0, k1, position, table, codes, grid):
    """encode_nearest for every mode."""
    qmax = np.int32((1 << (bits - 1)) - 1)
    if mode == NEAREST:
        return encode_nearest(x, qmax, fmax, codes)
    top = absmax_bits(x)
    if top == 0 or top >= INFINITY_BITS or (mode == LEAST_SQUARES and as_float(top) > fmax / np.float32(2)):
        return encode_nearest(x, qmax, fmax, codes)
    codes[x.size :] = 0
    if mode == STOCHASTIC:
        code = block_scale(top, np.float32(1), qmax, fmax)
        round_stochastic(x, scale_value(code), qmax, codes, position, k0, k1)
        return code
    if mode == FULL:
        code = np.int32(block_scale(top, np.float32(1), np.int32(qmax + 1), fmax) + SIGN)
        round_nearest(x, scale_value(code), np.int32(-qmax), np.int32(qmax + 1), codes)
        return code
    steps, inverses, shrinks = table
    negative = is_negative_extreme(x, top)
    extreme = -as_float(top) if negative else as_float(top)
    shrink = best_shrink(x, extreme, steps, inverses, shrinks, qmax, grid)
    code = np.int32(block_scale(top, shrink, qmax, fmax) + (SIGN if negative else 0))
    round_nearest(x, scale_value(code), np.int32(-qmax), np.int32(qmax + 1), codes)
    return code


@inline
def packed_slice(packed, lo, count, bits):
    """The bytes of the block that starts at value `lo` (a multiple of 8)."""
    start = lo // 8 * bits
    return packed[start : start + (count * bits + 7) // 8]


@parallel
def _quantize_nearest(x, packed, tail, bits, block, fmax):
    blocks = (x.size + block - 1) // block
    qmax = np.int32((1 << (bits - 1)) - 1)
    for chunk in prange((blocks + CHUNK_BLOCKS - 1) // CHUNK_BLOCKS):
        codes = np.empty(block, np.uint8)
        for k in range(chunk * CHUNK_BLOCKS, min(blocks, (chunk + 1) * CHUNK_BLOCKS)):
            lo = k * block
            part = x[lo : lo + block]
            tail[k] = encode_nearest(part, qmax, fmax, codes)
            pack_block(codes, bits, packed_slice(packed, lo, part.size, bits))


@parallel
def _quantize(x, packed, tail, bits, block, fmax, mode, k0, k1, offset, table):
    blocks = (x.size + block - 1) // block
    for chunk in prange((blocks + CHUNK_BLOCKS - 1) // CHUNK_BLOCKS):
        codes = np.empty(block, np.uint8)
        grid = np.empty(block if mode == LEAST_SQUARES else 0, np.int32)
        for k in range(chunk * CHUNK_BLOCKS, min(blocks, (chunk + 1) * CHUNK_BLOCKS)):
            lo = k * block
            part = x[lo : lo + block]
            tail[k] = encode_block(part, bits, fmax, mode, k0, k1, offset + lo, table, codes, grid)
            pack_block(codes, bits, packed_slice(packed, lo, part.size, bits))


@parallel
def _dequantize(packed, tail, out, bits, block, add):
    blocks = (out.size + block - 1) // block
    qmax = np.int32((1 << (bits - 1)) - 1)
    for chunk in prange((blocks + CHUNK_BLOCKS - 1) // CHUNK_BLOCKS):
        codes = np.empty(block, np.uint8)
        for k in range(chunk * CHUNK_BLOCKS, min(blocks, (chunk + 1) * CHUNK_BLOCKS)):
            lo = k * block
            part = out[lo : lo + block]
            unpack_block(packed_slice(packed, lo, part.size, bits), bits, codes)
            scale = scale_value(np.int32(tail[k]))
            if add:
                for i in range(part.size):
                    write(part, i, read(part, i) + np.float32(np.int32(np.int32(codes[i]) - qmax)) * scale)
            else:
                for i in range(part.size):
                    write(part, i, np.float32(np.int32(np.int32(codes[i]) - qmax)) * scale)


@functools.cache
def shrink_table(bits):
    """The least-squares candidates as arrays: (steps, inverses, shrinks)."""
    steps, inverses, shrinks = zip(*layout.shrink_candidates(bits))
    return np.array(steps, np.int32), np.array(inverses, np.float32), np.array(shrinks, np.float32)


def views(wire, n, bits, block):
    """(packed codes, 16-bit scales) of a message, as arrays."""
    cut = layout.codes_bytes(n, bits)
    data = wire.numpy()
    return data[:cut], data[cut : cut - (-n // block) * 2].view(np.uint16)


def quantize(x, bits, block, mode, seed):
    """`quantize` of kernels/quantize.py, by Numba."""
    n = x.numel()
    wire = allocate(layout.quantized_bytes(n, bits, block, x.dtype), torch.uint8)
    packed, tail = views(wire, n, bits, block)
    packed[-2:] = 0
    (k0, k1), table = split(seed), shrink_table(bits)
    fmax = np.float32(torch.finfo(x.dtype).max)
    step = n if x.dtype != torch.float16 else max(1, HALF_CHUNK // block) * block
    for lo in range(0, n, max(step, 1)):
        part = x[lo : lo + step]
        part = array(part.float() if x.dtype == torch.float16 else part)
        out = (packed[lo // 8 * bits :], tail[lo // block :])
        if mode == NEAREST:
            _quantize_nearest(part, *out, bits, block, fmax)
        else:
            _quantize(part, *out, bits, block, fmax, mode, k0, k1, lo, table)
    return wire


def dequantize(wire, n, bits, block, dtype, onto):
    """`dequantize` of kernels/quantize.py, by Numba."""
    if dtype == torch.float16:
        values = dequantize(wire, n, bits, block, torch.float32, None)
        return values.to(dtype) if onto is None else onto.copy_(onto.float() + values)
    packed, tail = views(wire.contiguous(), n, bits, block)
    out = allocate(n, dtype) if onto is None else onto
    if n:
        _dequantize(packed, tail, array(out), bits, block, onto is not None)
    return out
