"""Elias–Fano and bitmap index coding in Triton. Encoding sets bits by atomics. Decoding counts, then
brings the high parts to their places, whence each program reads its own in order and joins low parts to them.

The message is one little-endian bit stream: low parts from bit 0, the high bit vector from byte `cut`. The number of
low bits and the place in memory change from one message to the next, so no kernel is compiled for either.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from thinwire.kernels.bits import packed_bytes
from thinwire.kernels.gpu.launch import launch
from thinwire.kernels.gpu.scratch import true_flag
from thinwire.kernels.indices import elias_fano_bytes, low_bits

SIZE = 1024  # indices a program handles
BYTES, WARPS, REGISTERS = 256, 4, 48  # of a bit vector, that a program handles; as `launch` takes them


@triton.jit(do_not_specialize=["k", "base", "low"])
def _encode(index, wire, k, base, low, RANKED: tl.constexpr, SIZE: tl.constexpr):
    """Set bit base + (index >> low) (+ rank, if RANKED), and put the low bits below at rank · low."""
    words = wire.to(tl.pointer_type(tl.uint32))
    rank = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = rank < k
    value = tl.load(index + rank, mask=inside, other=0)
    position = base + (value >> low) + (rank if RANKED else 0)
    one = tl.full([SIZE], 1, tl.uint32) << (position & 31).to(tl.uint32)
    tl.atomic_or(words + (position >> 5), one, mask=inside, sem="relaxed")
    for first in range(0, low, 16):  # 16 bits at a time: shifted by up to 31 they touch two words
        place = rank * low + first
        part = (value >> first) & ((1 << tl.minimum(low - first, 16)) - 1)
        part = part << (place & 31)
        tl.atomic_or(words + (place >> 5), part.to(tl.uint32), mask=inside, sem="relaxed")
        over = (part >> 32).to(tl.uint32)
        tl.atomic_or(words + (place >> 5) + 1, over, mask=inside & (over != 0), sem="relaxed")


@triton.jit
def _ones(byte):
    """How many bits of an int32 below 256 are set."""
    pairs = byte - ((byte >> 1) & 0x55)
    fours = (pairs & 0x33) + ((pairs >> 2) & 0x33)
    return (fours + (fours >> 4)) & 0x0F


@triton.jit
def _ones_before(byte):
    """Of an int32 below 256: how many bits are set before each of its eight, four bits each."""
    spread = (byte | (byte << 12)) & 0x000F000F
    spread = (spread | (spread << 6)) & 0x03030303
    spread = (spread | (spread << 3)) & 0x11111111
    return spread.to(tl.uint32) * 0x11111110


@triton.jit(do_not_specialize=["size"], do_not_specialize_on_alignment=["wire"])
def _count(wire, counts, size, SIZE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    byte = tl.load(wire + place, mask=place < size, other=0).to(tl.int32)
    tl.store(counts + tl.program_id(0), tl.sum(_ones(byte)))


@triton.jit
def _counted_before(counts, program, NEAR: tl.constexpr):
    """The sum of the programs' counts before this one's."""
    total = tl.zeros([NEAR], tl.int64)
    for first in range(0, program, NEAR):
        other = first + tl.arange(0, NEAR)
        total += tl.load(counts + other, mask=other < program, other=0)
    return tl.sum(total)


@triton.jit
def _low_part(wire, before, rank, mask, low):
    """The low bits at bit (before + rank) · low; rank: int32, small. Read in whole words, three at most."""
    start = before * low + (wire.to(tl.int64) & 3) * 8
    words = (wire.to(tl.int64) & -4).to(tl.pointer_type(tl.uint32)) + (start >> 5)
    first = (start & 31).to(tl.int32) + rank * low
    shift, words = (first & 31).to(tl.uint64), words + (first >> 5)
    held = tl.load(words, mask=mask, other=0).to(tl.uint64)
    held |= tl.load(words + 1, mask=mask & ((first & 31) + low > 32), other=0).to(tl.uint64) << 32
    held = held >> shift
    if low > 32:
        last = tl.load(words + 2, mask=mask & ((first & 31) + low > 64), other=0).to(tl.uint64)
        held |= (last << 1) << (63 - shift)
    return (held & ((tl.full([], 1, tl.uint64) << low) - 1)).to(tl.int64)


@triton.jit(do_not_specialize=["size", "low", "k", "n"], do_not_specialize_on_alignment=["high", "lows"])
def _place(high, lows, counts, held, index, good, size, low, k, n, RANKED: tl.constexpr, SIZE: tl.constexpr):
    """index[rank] of the first k set bits; counts: ones in each program's bytes. good[0] becomes false unless there are
    k, ascending and below n; what is not there or outside is brought inside. held: int32[k], between the two parts."""
    start = tl.program_id(0).to(tl.int64) * SIZE
    place = tl.arange(0, SIZE)
    byte = tl.load(high + start + place, mask=start + place < size, other=0).to(tl.int32)
    ones = _ones(byte)
    before = _counted_before(counts, tl.program_id(0), 1024)
    bit = tl.arange(0, 8)[None, :]
    rank = (tl.cumsum(ones, axis=0) - ones)[:, None] + ((_ones_before(byte)[:, None] >> (4 * bit)) & 7).to(tl.int32)
    left = tl.minimum(tl.maximum(k - before, 0), 8 * SIZE).to(tl.int32)
    mask = ((byte[:, None] >> bit) & 1 == 1) & (rank < left)
    value = place[:, None] * 8 + bit
    total = tl.sum(ones)
    if RANKED:
        # where the bit before is set, both have one high part, and the low parts must ascend
        last = tl.load(high + start + place - 1, mask=(start + place > 0) & (start + place <= size), other=0)
        joined = (byte << 1) | (last.to(tl.int32) >> 7)
        tl.store(held + before + rank, ((value - rank) << 1) | ((joined[:, None] >> bit) & 1), mask=mask)
        tl.debug_barrier()
        base = start * 8 - before
        _join(held, lows, index, good, base, before, tl.minimum(total, left), low, n, SIZE)
    else:
        entry = start * 8 + value
        tl.store(index + before + rank, tl.minimum(entry, n - 1), mask=mask)
        _say_bad(good, mask & (entry >= n))
    if start + SIZE >= size:
        _end(index, good, before + total, k, SIZE)


@triton.jit
def _join(held, lows, index, good, base, before, count, low, n, SIZE: tl.constexpr):
    """index[before + i] of the high parts that `held` has, twice each, and one more where the low parts must ascend."""
    for first in range(0, count, SIZE):
        i = first + tl.arange(0, SIZE)
        inside = i < count
        mark = tl.load(held + before + i, mask=inside, other=0)
        low_part = _low_part(lows, before, i, inside, low)
        entry = ((base + (mark >> 1)) << low) | low_part
        near = inside & ((mark & 1) == 1)
        wrong = (near & (_low_part(lows, before, i - 1, near, low) >= low_part)) | (inside & (entry >= n))
        tl.store(index + before + i, tl.minimum(entry, n - 1), mask=inside)
        _say_bad(good, wrong)


@triton.jit
def _end(index, good, total, k, SIZE: tl.constexpr):
    """Zeros where there are fewer than k, and a word of it, also where there are more."""
    if total != k:
        tl.store(good, total == k)
        for first in range(total, k, SIZE):
            i = first + tl.arange(0, SIZE)
            tl.store(index + i, tl.zeros([SIZE], tl.int64), mask=i < k)


@triton.jit
def _say_bad(good, wrong):
    ones = wrong.to(tl.int32)
    tl.store(good + ones * 0, ones < 0, mask=ones > 0)


@triton.jit(do_not_specialize=["n", "k"])
def _check(index, good, n, k, SIZE: tl.constexpr):
    """Make good[0] false unless all are inside and ascending. Those outside are brought to the edge."""
    i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    value = tl.load(index + i, mask=i < k, other=0)
    outside = (i < k) & ((value < 0) | (value >= n))
    before = tl.load(index + i - 1, mask=(i < k) & (i > 0), other=-1)  # at the edge already, perhaps: it said so itself
    tl.store(index + i, tl.minimum(tl.maximum(value, 0), n - 1), mask=outside)
    _say_bad(good, outside | ((i < k) & (i > 0) & (value <= before)))


def checked(index, n):
    """(the indices, 0-d bool: they are good), without waiting for the card."""
    k, good = index.numel(), true_flag(index)
    launch(_check, triton.cdiv(k, SIZE), index, good, n, k, SIZE=SIZE)
    return index, good


def encode_bitmap(index, n):
    """What kernels/indices.py calls by this name, by Triton."""
    return _encoded(index, packed_bytes(n, 1), 0, 0, False)


def encode_elias_fano(index, n):
    """What kernels/indices.py calls by this name, by Triton."""
    cut, rest = elias_fano_bytes(n, index.numel())
    return _encoded(index, cut + rest, cut * 8, low_bits(n, index.numel()), True)


def _encoded(index, size, base, low, ranked):
    wire = torch.zeros((size + 3) // 4 * 4, dtype=torch.uint8, device=index.device)  # atomics work on whole words
    k = index.numel()
    programs = triton.cdiv(k, SIZE)
    launch(_encode, programs, index.contiguous(), wire, k, base, low, RANKED=ranked, SIZE=SIZE)
    return wire[:size]


def decode_bitmap(wire, n, k):
    """What kernels/indices.py calls by this name, by Triton."""
    return _decoded(wire.contiguous(), 0, n, k, 0, False)


def decode_elias_fano(wire, n, k):
    """What kernels/indices.py calls by this name, by Triton."""
    return _decoded(wire.contiguous(), elias_fano_bytes(n, k)[0], n, k, low_bits(n, k), True)


def _decoded(wire, cut, n, k, low, ranked):
    """(int64[k]; 0-d bool: the message holds k ascending ones below n), without waiting for the card."""
    high = wire[cut:]
    programs = triton.cdiv(high.numel(), BYTES)
    room = torch.empty(programs + (k if ranked else 0), dtype=torch.int32, device=wire.device)
    counts, held = room, room[programs:]
    launch(_count, programs, high, counts, high.numel(), SIZE=BYTES)
    index = torch.empty(k, dtype=torch.int64, device=wire.device)
    good, size = true_flag(index), high.numel()
    arguments = high, wire, counts, held, index, good, size, low, k, n
    launch(_place, programs, *arguments, RANKED=ranked, SIZE=BYTES, warps=WARPS, registers=REGISTERS)
    return index, good
