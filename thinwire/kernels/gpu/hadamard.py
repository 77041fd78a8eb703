"""The random Hadamard rotation in Triton: all butterflies of a block in registers, one launch.

The remainder of n modulo the block is cut as `hadamard.pieces` says: position i of a remainder of r values
lies in the piece whose size is the highest bit of i XOR r. Pieces start at multiples of their size, so
partners are those of a whole block; a stage leaves alone the pieces that are not larger than its stride.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from thinwire.kernels.gpu import tile as tiles
from thinwire.kernels.gpu.launch import TILE, launch, signed
from thinwire.kernels.gpu.scalar import bits_of, float_of, hash32
from thinwire.kernels.random import split


@triton.jit
def _partner(x, STRIDE: tl.constexpr):
    """x[i XOR STRIDE] along the rows: the bits of a pair, added, minus one's own. A single shuffle."""
    bits = tl.reshape(bits_of(x), [x.shape[0], x.shape[1] // (2 * STRIDE), 2, STRIDE])
    pair = tl.sum(bits, axis=2, keep_dims=True)
    return float_of(tl.reshape(pair - bits, [x.shape[0], x.shape[1]]))


@triton.jit
def _flip(x, start, k0, k1, BLOCK: tl.constexpr):
    """Change signs by seed."""
    h = hash32(start + tiles.offsets(x.shape[0], x.shape[1], BLOCK), k0, k1)
    return float_of(bits_of(x) ^ (h << 31).to(tl.int32))


@triton.jit
def _rotate_tile(
    x, out, start, n, k0, k1, INVERSE: tl.constexpr, BLOCK: tl.constexpr, FACTORS: tl.constexpr,
    STAGES: tl.constexpr, ROWS: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    values = tiles.read(x, start, n, ROWS, BLOCK, BLOCK, FULL)
    if not INVERSE:
        values = _flip(values, start, k0, k1, BLOCK)
    column = tl.arange(0, BLOCK)[None, :]
    left = n - start - tl.arange(0, ROWS)[:, None] * BLOCK
    size = tl.where(left >= BLOCK, BLOCK, column ^ left.to(tl.int32))  # only its highest bit counts
    factor = tl.full([ROWS, BLOCK], 1.0, tl.float32)
    for stage in tl.static_range(STAGES):
        second = (column >> stage) & 1 == 1
        turned = _partner(values, 1 << stage) + tl.where(second, -values, values)
        reached = size >= (2 << stage)
        values = turned if FULL else tl.where(reached, turned, values)
        factor = tl.where(reached, FACTORS[stage + 1], factor)
    values = values * (FACTORS[STAGES] if FULL else factor)
    if INVERSE:
        values = _flip(values, start, k0, k1, BLOCK)
    tiles.write(out, values, start, n, ROWS, BLOCK, BLOCK, FULL)


@triton.jit(do_not_specialize=["n", "k0", "k1"])
def _rotate(
    x, out, n, k0, k1, INVERSE: tl.constexpr, BLOCK: tl.constexpr, FACTORS: tl.constexpr,
    STAGES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * (ROWS * BLOCK)
    if start + ROWS * BLOCK <= n:
        _rotate_tile(x, out, start, n, k0, k1, INVERSE, BLOCK, FACTORS, STAGES, ROWS, True)
    else:
        _rotate_tile(x, out, start, n, k0, k1, INVERSE, BLOCK, FACTORS, STAGES, ROWS, False)


def rotate(x, block, seed, inverse):
    n, stages = x.numel(), block.bit_length() - 1
    if block != 1 << stages:
        raise ValueError(f"the rotation's block must be a power of two, not {block}")
    out = torch.empty(n, dtype=torch.float32, device=x.device)
    rows = max(1, TILE // block)
    factors = tuple(1 / math.sqrt(1 << stage) for stage in range(stages + 1))
    launch(
        _rotate, triton.cdiv(n, rows * block), x, out, n, *map(signed, split(seed)), INVERSE=inverse,
        BLOCK=block, FACTORS=factors, STAGES=stages, ROWS=rows, warps=4 if block <= TILE else 16,
    )  # fmt: skip
    return out
