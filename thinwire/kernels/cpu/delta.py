"""The fused activation delta on the CPU: x and h are read once, the codes and the new mirror written once."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from thinwire.kernels import delta as layout
from thinwire.kernels import quantize as codes_layout
from thinwire.kernels.cpu.compile import CHUNK_BLOCKS, allocate, array, inline, parallel
from thinwire.kernels.cpu.quantize import (
    absmax_bits,
    encode_block,
    encode_nearest,
    pack_block,
    packed_slice,
    shrink_table,
    unpack_block,
    views,
)  # fmt: skip
from thinwire.kernels.cpu.scalar import INFINITY_BITS, read, scale_value, write
from thinwire.kernels.quantize import LEAST_SQUARES, NEAREST
from thinwire.kernels.random import split


@inline
def subtract(x, h, out):
    """out ← x − h."""
    for i in range(out.size):
        out[i] = read(x, i) - read(h, i)


@inline
def copy(x, out):
    """out ← x."""
    for i in range(out.size):
        out[i] = read(x, i)


@inline
def rebuild(h, codes, scale, qmax, keep, out):
    """out = φ·h + (codes − qmax)·scale, rounded to out's dtype."""
    if keep:
        for i in range(out.size):
            write(out, i, read(h, i) + np.float32(np.int32(np.int32(codes[i]) - qmax)) * scale)
    else:
        for i in range(out.size):
            write(out, i, np.float32(0) + np.float32(np.int32(np.int32(codes[i]) - qmax)) * scale)  # −0 becomes 0


@parallel
def _encode(x, h, out, packed, tail, gate, bits, block, fmax, mode, k0, k1, table):
    blocks = (x.size + block - 1) // block
    qmax = np.int32((1 << (bits - 1)) - 1)
    for chunk in prange((blocks + CHUNK_BLOCKS - 1) // CHUNK_BLOCKS):
        codes, u = np.empty(block, np.uint8), np.empty(block, np.float32)
        grid = np.empty(block if mode == LEAST_SQUARES else 0, np.int32)
        for k in range(chunk * CHUNK_BLOCKS, min(blocks, (chunk + 1) * CHUNK_BLOCKS)):
            lo = k * block
            value, mirror, new = x[lo : lo + block], h[lo : lo + block], out[lo : lo + block]
            part = u[: value.size]
            subtract(value, mirror, part)
            top = absmax_bits(value)
            keep = gate.size == 0 or (absmax_bits(part) <= top and top <= INFINITY_BITS)
            if gate.size:
                gate[k] = keep
            if not keep:
                copy(value, part)
            if mode == NEAREST:
                code = encode_nearest(part, qmax, fmax, codes)
            else:
                code = encode_block(part, bits, fmax, mode, k0, k1, lo, table, codes, grid)
            tail[k] = code
            pack_block(codes, bits, packed_slice(packed, lo, part.size, bits))
            rebuild(mirror, codes, scale_value(code), qmax, keep, new)


@parallel
def _decode(packed, tail, gate, h, out, y, bits, block):
    blocks = (out.size + block - 1) // block
    qmax = np.int32((1 << (bits - 1)) - 1)
    for chunk in prange((blocks + CHUNK_BLOCKS - 1) // CHUNK_BLOCKS):
        codes, u = np.empty(block, np.uint8), np.empty(block, np.float32)
        for k in range(chunk * CHUNK_BLOCKS, min(blocks, (chunk + 1) * CHUNK_BLOCKS)):
            lo = k * block
            mirror, new, value = h[lo : lo + block], out[lo : lo + block], y[lo : lo + block]
            part = u[: new.size]
            unpack_block(packed_slice(packed, lo, part.size, bits), bits, codes)
            keep = gate.size == 0 or gate[k] != 0
            rebuild(mirror, codes, scale_value(np.int32(tail[k])), qmax, keep, part)
            for i in range(part.size):
                write(value, i, part[i])
            for i in range(part.size):
                write(new, i, part[i])


def encode_delta(x, h, out, bits, block, gate, mode, seed):
    """`encode_delta` of kernels/delta.py, by Numba."""
    n = x.numel()
    wire = allocate(layout.delta_bytes(n, bits, block, x.dtype, gate), torch.uint8)
    packed, tail = views(wire, n, bits, block)
    packed[-2:] = 0
    flags = torch.empty(-(-n // block) if gate else 0, dtype=torch.uint8)
    (k0, k1), table = split(seed), shrink_table(bits)
    fmax = np.float32(torch.finfo(x.dtype).max)
    value, mirror, new = _native(x), _native(h), _native(out)
    _encode(array(value), array(mirror), array(new), packed, tail, array(flags), bits, block, fmax, mode, k0, k1, table)
    if new is not out:
        out.copy_(new)
    if gate:
        wire[codes_layout.quantized_bytes(n, bits, block, x.dtype) :] = layout.bitpack.pack(flags, 1, "cpu")
    return wire


def decode_delta(wire, h, out, bits, block, dtype, gate):
    """`decode_delta` of kernels/delta.py, by Numba."""
    n, end = h.numel(), codes_layout.quantized_bytes(h.numel(), bits, block, dtype)
    packed, tail = views(wire.contiguous(), n, bits, block)
    flags = layout.bitpack.unpack(wire[end:], -(-n // block), 1, "cpu") if gate else wire[:0]
    y = allocate(n, torch.float32 if dtype == torch.float16 else dtype)
    new = _native(out)
    _decode(packed, tail, array(flags), array(_native(h)), array(new), array(y), bits, block)
    if new is not out:
        out.copy_(new)
    return y.to(dtype)


def _native(x):
    """float16 goes through float32 copies: Numba has no float16 arithmetic on CPUs."""
    return x.float() if x.dtype == torch.float16 else x
