"""Elias–Fano and bitmap index coding on the CPU. Serial: a message of 160,000 indices takes under a millisecond."""

from __future__ import annotations

import numpy as np
import torch

from thinwire.kernels.bits import packed_bytes
from thinwire.kernels.cpu.compile import array, inline
from thinwire.kernels.indices import elias_fano_bytes, low_bits


@inline
def _set_bits(positions, out):
    for i in range(positions.size):
        out[positions[i] >> 3] |= np.uint8(1 << (positions[i] & 7))


@inline
def _find_bits(wire, out):
    """Positions of the ones → out, at most out.size of them; returns how many ones there are, padding included."""
    found = 0
    for i in range(wire.size):
        byte = np.int32(wire[i])
        while byte:
            low = byte & -byte
            position = 8 * i
            while low > 1:
                low >>= 1
                position += 1
            if found < out.size:
                out[found] = position
            found += 1
            byte &= byte - 1
    return found


@inline
def _put_low(index, low, out):
    held, filled, place = np.uint64(0), 0, 0
    for i in range(index.size):
        held |= (np.uint64(index[i]) & np.uint64((1 << low) - 1)) << np.uint64(filled)
        filled += low
        while filled >= 8:
            out[place] = np.uint8(held)
            held >>= np.uint64(8)
            filled -= 8
            place += 1
    if filled:
        out[place] = np.uint8(held)


@inline
def _add_low(wire, low, index):
    """index[i] = (index[i] − i) · 2^low + the i-th low part."""
    held, filled, place = np.uint64(0), 0, 0
    mask = np.uint64((1 << low) - 1)
    for i in range(index.size):
        while filled < low:
            held |= np.uint64(wire[place]) << np.uint64(filled)
            filled += 8
            place += 1
        index[i] = ((index[i] - i) << low) | np.int64(held & mask)
        held >>= np.uint64(low)
        filled -= low


def encode_bitmap(index, n):
    """What kernels/indices.py calls by this name, by Numba."""
    out = torch.zeros(packed_bytes(n, 1), dtype=torch.uint8)
    _set_bits(array(index), array(out))
    return out


def decode_bitmap(wire, n, k):
    """What kernels/indices.py calls by this name, by Numba."""
    return _ones(wire, k)


def encode_elias_fano(index, n):
    """What kernels/indices.py calls by this name, by Numba."""
    k, low = index.numel(), low_bits(n, index.numel())
    cut, rest = elias_fano_bytes(n, k)
    out = torch.zeros(cut + rest, dtype=torch.uint8)
    _put_low(array(index), low, array(out[:cut]))
    _set_bits(array((index >> low) + torch.arange(k)), array(out[cut:]))
    return out


def decode_elias_fano(wire, n, k):
    """What kernels/indices.py calls by this name, by Numba."""
    low, (cut, _) = low_bits(n, k), elias_fano_bytes(n, k)
    index, found = _ones(wire[cut:], k)
    if found == k:
        _add_low(array(wire[:cut].contiguous()), low, array(index))
    return index, found


def _ones(wire, k):
    """(positions of the ones, how many there are): where that is not k, the caller refuses the message."""
    index = torch.zeros(k, dtype=torch.int64)
    return index, torch.tensor(_find_bits(array(wire.contiguous()), array(index)))
