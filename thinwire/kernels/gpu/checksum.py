"""The checksum in Triton: a program sums 64-bit products in halves, over tiles of words, and adds its residue once.

Residues and programs are added in one number, so that the program that comes last has the sum (`added`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from thinwire.kernels import checksum as layout
from thinwire.kernels.gpu.launch import launch, signed
from thinwire.kernels.gpu.scalar import golden, hash_start, hash_sum
from thinwire.kernels.gpu.scratch import zero_counter
from thinwire.kernels.random import split

ROWS, WARPS = 4, 4  # a tile: so many times 16 bytes a thread
PROGRAMS = 2048  # at most
COUNT = tl.constexpr(44)  # a sum of 2^11 residues has 43 bits: the number of programs that have added stands above
KEYS = tuple(map(signed, split(layout.SEED)))
PRIME = tl.constexpr(layout.PRIME)


@triton.jit
def words_of(data, first, size, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr):
    """uint32[ROWS, COLUMNS] from word `first`; bytes beyond the end are zero."""
    word = first + tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    if ALIGNED:
        words_at = data.to(tl.pointer_type(tl.uint32)) + word
        if 4 * (first + ROWS * COLUMNS) <= size:
            words = tl.load(words_at)
        else:  # byte by byte it would take all registers, of whole tiles too
            last = size.to(tl.int64) // 4
            words = tl.load(words_at, mask=word < last, other=0)
            words = tl.where(word == last, _rest(data + 4 * last, size - 4 * last), words)
    else:
        words = tl.zeros([ROWS, COLUMNS], tl.uint32)
        for i in tl.static_range(4):
            byte = tl.load(data + 4 * word + i, mask=4 * word + i < size, other=0)
            words |= byte.to(tl.uint32) << (8 * i)
    return words


@triton.jit
def _rest(data, count):
    """The last `count` bytes, fewer than four, as a word."""
    word = tl.zeros([], tl.uint32)
    for i in tl.static_range(3):
        word |= tl.load(data + i, mask=i < count, other=0).to(tl.uint32) << (8 * i)
    return word


@triton.jit
def weight(h):
    """1 + h mod (p − 1), of 32 bits: 2³² − (p − 1) is 6."""
    return h + tl.where(h >= PRIME - 1, 7, 1).to(tl.uint32)


@triton.jit
def residue(data, tile, step, size, k0, k1, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr):
    """The weighted sum of tiles `tile`, `tile` + step … of the words, modulo the prime."""
    low, high = tl.zeros([COLUMNS], tl.uint64), tl.zeros([COLUMNS], tl.uint64)
    offset = golden(tl.arange(0, ROWS) * COLUMNS)[:, None] + golden(tl.arange(0, COLUMNS))[None, :]
    first = tile.to(tl.int64) * (ROWS * COLUMNS)
    while 4 * first < size:
        words = words_of(data, first, size, ROWS, COLUMNS, ALIGNED)
        weights = weight(hash_sum(offset + hash_start(first, k0), k1)).to(tl.uint64)
        # products of 48 bits, 2^16 of which fit 64: a multiplication and its addition are one instruction
        low += tl.sum((words & 0xFFFF).to(tl.uint64) * weights, axis=0)
        high += tl.sum((words >> 16).to(tl.uint64) * weights, axis=0)
        first += step.to(tl.int64) * (ROWS * COLUMNS)
    return (tl.sum(high % PRIME) % PRIME * 65536 + tl.sum(low % PRIME)) % PRIME


@triton.jit
def added(state, part, programs):
    """(the sum of all parts, is this program the last): state is zero before and after."""
    before = tl.atomic_add(state, part.to(tl.int64) + (tl.full([], 1, tl.int64) << COUNT), sem="relaxed")
    last = (before >> COUNT) == programs - 1
    if last:
        tl.store(state, tl.zeros([], tl.int64))
    return (before & ((tl.full([], 1, tl.int64) << COUNT) - 1)).to(tl.uint64) + part, last


@triton.jit(do_not_specialize=["size", "programs", "k0", "k1"])
def _checksum(
    data, state, out, size, programs, k0, k1, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """out[0]: the checksum of `size` bytes."""
    part = residue(data, tl.program_id(0), programs, size, k0, k1, ROWS, COLUMNS, ALIGNED)
    total, last = added(state, part, programs)
    if last:
        tl.store(out, ((total + size.to(tl.uint64)) % PRIME).to(tl.int64))


@triton.jit(do_not_specialize=["size", "programs", "k0", "k1"])
def _row_sums(
    data, totals, size, programs, k0, k1, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """totals[row] += the sum of a part of the row; `size` bytes and `programs` a row."""
    row, tile = (tl.program_id(0) // programs).to(tl.int64), tl.program_id(0) % programs
    part = residue(data + row * size, tile, programs, size, k0, k1, ROWS, COLUMNS, ALIGNED)
    tl.atomic_add(totals + row, part.to(tl.int64), sem="relaxed")


def shaped(size):
    """(programs for so many bytes, constants)."""
    columns = 4 * 32 * WARPS
    programs = min(PROGRAMS, max(triton.cdiv(size, 4 * ROWS * columns), 1))
    return programs, {"ROWS": ROWS, "COLUMNS": columns, "warps": WARPS}


def row_sums(rows):
    """uint8[r, n] → int64[r]: the sums up to a multiple of the prime: programs add residues, the caller reduces."""
    rows = rows.contiguous()
    count, size = rows.shape
    totals = torch.zeros(count, dtype=torch.int64, device=rows.device)
    programs, constants = shaped(size)
    aligned = rows.data_ptr() % 4 == 0 and (size % 4 == 0 or count == 1)
    launch(_row_sums, count * programs, rows, totals, size, programs, *KEYS, ALIGNED=aligned, **constants)
    return totals


def checksum(data):
    """`checksum` of kernels/checksum.py, by one kernel."""
    data, size = data.contiguous(), data.numel()
    out = torch.empty((), dtype=torch.int64, device=data.device)
    programs, constants = shaped(size)
    arguments = data, zero_counter(data), out, size, programs, *KEYS
    launch(_checksum, programs, *arguments, ALIGNED=data.data_ptr() % 4 == 0, **constants)
    return out
