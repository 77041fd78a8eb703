"""Bit packing of small codes on the CPU, a run of 8·RUN codes per loop iteration."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from thinwire.kernels.bits import packed_bytes
from thinwire.kernels.cpu.compile import array, inline, parallel
from thinwire.kernels.cpu.quantize import pack_block, unpack_block

RUN = 1 << 13


@inline
def pack_ones(flags, out):
    """uint8 0/1, eight a byte; the last byte may have fewer."""
    for i in range(out.size):
        eight, byte = flags[8 * i : 8 * i + 8], np.uint8(0)
        for j in range(eight.size):
            byte |= np.uint8(eight[j] << np.uint8(j))
        out[i] = byte


@inline
def unpack_ones(wire, flags):
    """One bit per flag, from the lowest of a byte on."""
    for i in range(wire.size):
        eight, byte = flags[8 * i : 8 * i + 8], wire[i]
        for j in range(eight.size):
            eight[j] = (byte >> np.uint8(j)) & np.uint8(1)


@inline
def copy_codes(codes, out):
    """A loop: for `out[:n] = codes` Numba compiles the words of its error message too, for two seconds."""
    for i in range(codes.size):
        out[i] = codes[i]


@parallel
def _pack(codes, out, bits):
    for run in prange((codes.size + RUN - 1) // RUN):
        part = codes[run * RUN : (run + 1) * RUN]
        target = out[run * (RUN // 8 * bits) : (run + 1) * (RUN // 8 * bits)]
        if bits == 1:
            pack_ones(part, target)
        else:
            padded = np.zeros((part.size + 7) // 8 * 8, np.uint8)
            copy_codes(part, padded)
            pack_block(padded, bits, target)


@parallel
def _unpack(wire, out, bits):
    for run in prange((out.size + RUN - 1) // RUN):
        part = out[run * RUN : (run + 1) * RUN]
        source = wire[run * (RUN // 8 * bits) : (run + 1) * (RUN // 8 * bits)]
        if bits == 1:
            unpack_ones(source, part)
        else:
            padded = np.empty((part.size + 7) // 8 * 8, np.uint8)
            unpack_block(source, bits, padded)
            copy_codes(padded[: part.size], part)


def pack(codes, bits):
    """`pack` of kernels/bits.py, by Numba."""
    out = torch.empty(packed_bytes(codes.numel(), bits), dtype=torch.uint8)
    _pack(array(codes), array(out), bits)
    return out


def unpack(wire, n, bits):
    """`unpack` of kernels/bits.py, by Numba."""
    out = torch.empty(n, dtype=torch.uint8)
    _unpack(array(wire), array(out), bits)
    return out
