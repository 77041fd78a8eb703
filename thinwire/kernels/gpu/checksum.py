"""The checksum in Triton: 64-bit products summed in halves per program, programs added by integer atomics."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from thinwire.kernels import checksum as layout
from thinwire.kernels.gpu.launch import launch, signed
from thinwire.kernels.gpu.scalar import hash32_near
from thinwire.kernels.gpu.scratch import zero_counters
from thinwire.kernels.random import split

WORDS, WARPS = 8192, 8  # 32-bit words a program sums
KEYS = tuple(map(signed, split(layout.SEED)))
PRIME = tl.constexpr(layout.PRIME)


@triton.jit
def words_of(data, first, size, WORDS: tl.constexpr, ALIGNED: tl.constexpr):
    """uint32[WORDS] from word `first`; bytes beyond the end are zero."""
    word = first + tl.arange(0, WORDS)
    if ALIGNED and 4 * (first + WORDS) <= size:
        words = tl.load(data.to(tl.pointer_type(tl.uint32)) + word)
    else:
        words = tl.zeros([WORDS], tl.uint32)
        for i in tl.static_range(4):
            byte = tl.load(data + 4 * word + i, mask=4 * word + i < size, other=0)
            words |= byte.to(tl.uint32) << (8 * i)
    return words


@triton.jit
def residue(words, first, k0, k1, WORDS: tl.constexpr):
    """Their weighted sum modulo the prime, words from word `first` on, a multiple of WORDS."""
    h = hash32_near(first, tl.arange(0, WORDS), k0, k1)
    weight = h + tl.where(h >= PRIME - 1, 7, 1).to(tl.uint32)  # 2³² − (p − 1) = 6: as 32 bits that is 1 + h mod (p − 1)
    product = words.to(tl.uint64) * weight.to(tl.uint64)
    low, high = tl.sum(product & 0xFFFFFFFF), tl.sum(product >> 32)
    return (high * 5 + low) % PRIME  # 2³² ≡ 5; both sums are below 2⁴⁵


@triton.jit
def added(state, part, size, programs):
    """(the checksum, is this program the last): state is (sum, programs that have added), zeros before and after."""
    tl.atomic_add(state, part.to(tl.int64), sem="relaxed")
    last = tl.atomic_add(state + 1, 1) == programs - 1
    total = tl.atomic_add(state, 0, sem="relaxed").to(tl.uint64)
    if last:
        tl.store(state + tl.arange(0, 2), tl.zeros([2], tl.int64))
    return (total + size.to(tl.uint64)) % PRIME, last


@triton.jit(do_not_specialize=["size", "programs", "k0", "k1"])
def _checksum(data, state, out, size, programs, k0, k1, WORDS: tl.constexpr, ALIGNED: tl.constexpr):
    """out[0]: the checksum of `size` bytes."""
    first = tl.program_id(0).to(tl.int64) * WORDS
    words = words_of(data, first, size, WORDS, ALIGNED)
    total, last = added(state, residue(words, first, k0, k1, WORDS), size, programs)
    if last:
        tl.store(out, total.to(tl.int64))


@triton.jit(do_not_specialize=["size", "programs", "k0", "k1"])
def _weighted_sum(data, totals, size, programs, k0, k1, WORDS: tl.constexpr, ALIGNED: tl.constexpr):
    """totals[row] += the sum of a part of the row; `size` bytes and `programs` a row."""
    row = (tl.program_id(0) // programs).to(tl.int64)
    first = (tl.program_id(0) % programs).to(tl.int64) * WORDS
    words = words_of(data + row * size, first, size, WORDS, ALIGNED)
    tl.atomic_add(totals + row, residue(words, first, k0, k1, WORDS).to(tl.int64), sem="relaxed")


def row_sums(rows):
    """uint8[r, n] → int64[r]: the sums up to a multiple of the prime: programs add residues, the caller reduces."""
    rows = rows.contiguous()
    count, size = rows.shape
    totals = torch.zeros(count, dtype=torch.int64, device=rows.device)
    programs = triton.cdiv(size, 4 * WORDS)
    aligned = rows.data_ptr() % 4 == 0 and (size % 4 == 0 or count == 1)
    arguments = rows, totals, size, programs, *KEYS
    launch(_weighted_sum, count * programs, *arguments, WORDS=WORDS, ALIGNED=aligned, warps=WARPS)
    return totals


def checksum(data):
    """`checksum` of kernels/checksum.py, by one kernel: its last program has the sum."""
    data, size = data.contiguous(), data.numel()
    out = torch.empty((), dtype=torch.int64, device=data.device)
    programs = max(triton.cdiv(size, 4 * WORDS), 1)
    arguments = data, zero_counters(data), out, size, programs, *KEYS
    launch(_checksum, programs, *arguments, WORDS=WORDS, ALIGNED=data.data_ptr() % 4 == 0, warps=WARPS)
    return out
