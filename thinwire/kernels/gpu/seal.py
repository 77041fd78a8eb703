"""Headers with checksums (codecs/frame.py) in Triton: written, or compared with the expected one, by one kernel each.

All programs add up the message; the one that comes last has the sum, and writes the header, or the verdict. A header
that is to be written is summed as the memory holds it, and the last program puts that right.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from thinwire.kernels import checksum as layout
from thinwire.kernels.gpu.checksum import KEYS, PRIME, added, residue, shaped
from thinwire.kernels.gpu.launch import launch, signed
from thinwire.kernels.gpu.scratch import zero_counter

OWN = tl.constexpr(3)  # the word that holds the checksum
WEIGHTS = tl.constexpr(tuple(layout.weight(word) for word in range(4)))


@triton.jit
def _put(frame, word, value):
    """A 32-bit word, byte by byte: a frame may lie anywhere."""
    tl.store(frame + word * 4 + tl.arange(0, 4), (value >> (tl.arange(0, 4) * 8).to(tl.uint32)).to(tl.uint8))


@triton.jit
def _get(frame, word):
    byte = tl.load(frame + word * 4 + tl.arange(0, 4)).to(tl.uint32)
    return tl.sum(byte << (tl.arange(0, 4) * 8).to(tl.uint32))


@triton.jit
def _product(word, WEIGHT: tl.constexpr):
    """Of a 32-bit word and a weight, modulo the prime."""
    return word.to(tl.uint64) * tl.full([], WEIGHT, tl.uint64) % PRIME


@triton.jit(do_not_specialize=["size", "programs", "w0", "w1", "w2", "flag", "k0", "k1"])
def _seal(
    frame, state, finite, size, programs, w0, w1, w2, flag, k0, k1,
    FLAGGED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Words w0 (with FLAGGED: plus flag, unless finite[0]), w1, w2 and the checksum before the body."""
    part = residue(frame, tl.program_id(0), programs, size, k0, k1, ROWS, COLUMNS, ALIGNED)
    total, last = added(state, part, programs)
    if last:
        begins = w0.to(tl.uint32)
        if FLAGGED:
            begins += tl.where(tl.load(finite), 0, flag).to(tl.uint32)
        for word in tl.static_range(4):
            total += PRIME - _product(_get(frame, word), WEIGHTS[word])
        total += _product(begins, WEIGHTS[0]) + _product(w1.to(tl.uint32), WEIGHTS[1])
        total = (total + _product(w2.to(tl.uint32), WEIGHTS[2]) + size.to(tl.uint64)) % PRIME
        tl.debug_barrier()  # all have read what is written over
        _put(frame, 0, begins)
        _put(frame, 1, w1.to(tl.uint32))
        _put(frame, 2, w2.to(tl.uint32))
        _put(frame, OWN, total.to(tl.uint32))


@triton.jit(do_not_specialize=["size", "programs", "w0", "w1", "w2", "flag", "k0", "k1"])
def _inspect(
    frame, state, verdict, size, programs, w0, w1, w2, flag, k0, k1,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """verdict: is this the expected header (flag set or not) and the right checksum; is the flag not set?"""
    part = residue(frame, tl.program_id(0), programs, size, k0, k1, ROWS, COLUMNS, ALIGNED)
    total, last = added(state, part, programs)
    if last:
        plain, flagged = w0.to(tl.uint32), w0.to(tl.uint32) | flag.to(tl.uint32)
        begins, stored = _get(frame, 0), _get(frame, OWN)
        good = (_get(frame, 1) == w1.to(tl.uint32)) & (_get(frame, 2) == w2.to(tl.uint32)) & (stored < PRIME)
        own = (_product(stored, WEIGHTS[3]) + stored.to(tl.uint64)) % PRIME
        good = good & ((begins == plain) | (begins == flagged)) & ((total + size.to(tl.uint64)) % PRIME == own)
        tl.store(verdict, good)
        tl.store(verdict + 1, ((begins ^ flagged) & 0xFF00) != 0)


def seal(frame, words, flag, finite):
    """words: three of 32 bits; flag: what the first becomes more by where `finite` (0-d bool, or None) is false."""
    held = finite if finite is not None else frame
    _launch(_seal, frame, held, words, flag, FLAGGED=finite is not None)


def inspect(frame, words, flag):
    """bool[2]: is it the expected one, is its flag not set (judged by the flag's byte alone)."""
    verdict = torch.empty(2, dtype=torch.bool, device=frame.device)
    _launch(_inspect, frame, verdict, words, flag)
    return verdict


def _launch(kernel, frame, other, words, flag, **constants):
    programs, shape = shaped(frame.numel())
    numbers = *map(signed, words), flag, *KEYS
    arguments = frame, zero_counter(frame), other, frame.numel(), programs, *numbers
    launch(kernel, programs, *arguments, **constants, ALIGNED=frame.data_ptr() % 4 == 0, **shape)
