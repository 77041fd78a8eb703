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
from thinwire.kernels.gpu.launch import launch, line, signed, tiling
from thinwire.kernels.gpu.scalar import bits_of, float_of, hash_sum
from thinwire.kernels.random import split


@triton.jit
def _partner(x, STRIDE: tl.constexpr, SHAPE: tl.constexpr):
    """x at place XOR STRIDE: the bits of the pair, added, minus one's own. At most one shuffle."""
    if SHAPE[2] > STRIDE:
        bits = tl.reshape(bits_of(x), [SHAPE[0], SHAPE[1], SHAPE[2] // (2 * STRIDE), 2, STRIDE])
        pair = tl.sum(bits, axis=3, keep_dims=True)
    else:
        PARTS: tl.constexpr = STRIDE // SHAPE[2]
        bits = tl.reshape(bits_of(x), [SHAPE[0] // (2 * PARTS), 2, PARTS, SHAPE[1], SHAPE[2]])
        pair = tl.sum(bits, axis=1, keep_dims=True)
    return float_of(tl.reshape(pair - bits, [SHAPE[0], SHAPE[1], SHAPE[2]]))


@triton.jit
def _flip(x, start, k0, k1, SHAPE: tl.constexpr, BLOCK: tl.constexpr):
    """Change signs by seed."""
    h = hash_sum(tiles.hash_sums(start, k0, SHAPE, BLOCK), k1)
    return float_of(bits_of(x) ^ (h << 31).to(tl.int32))


@triton.jit
def _rotate_tile(
    x, out, start, n, k0, k1, INVERSE: tl.constexpr, FACTORS: tl.constexpr, STAGES: tl.constexpr,
    SHAPE: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    values = tiles.read(x, start, n, SHAPE, BLOCK, FULL)
    if not INVERSE:
        values = _flip(values, start, k0, k1, SHAPE, BLOCK)
    column = tiles.columns(SHAPE)
    left = tiles.row(n - start - tl.arange(0, SHAPE[1]) * BLOCK)
    size = tl.where(left >= BLOCK, BLOCK, column ^ left.to(tl.int32))  # only its highest bit counts
    factor = tl.full([SHAPE[0], SHAPE[1], SHAPE[2]], 1.0, tl.float32)
    for stage in tl.static_range(STAGES):
        sign = ((column >> stage) & 1) << 31  # by its bit: Triton's minus is 0 − x, which turns −0 into 0
        turned = _partner(values, 1 << stage, SHAPE) + float_of(bits_of(values) ^ sign)
        reached = size >= (2 << stage)
        values = turned if FULL else tl.where(reached, turned, values)
        factor = tl.where(reached, FACTORS[stage + 1], factor)
    values = values * (FACTORS[STAGES] if FULL else factor)
    if INVERSE:
        values = _flip(values, start, k0, k1, SHAPE, BLOCK)
    tiles.write(out, values, start, n, SHAPE, BLOCK, FULL)


@triton.jit(do_not_specialize=["n", "k0", "k1"])
def _rotate(
    x, out, n, k0, k1, INVERSE: tl.constexpr, FACTORS: tl.constexpr, STAGES: tl.constexpr,
    SHAPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * (SHAPE[1] * BLOCK)
    if tiles.is_full(start, n, SHAPE, BLOCK):
        _rotate_tile(x, out, start, n, k0, k1, INVERSE, FACTORS, STAGES, SHAPE, BLOCK, True)
    else:
        _rotate_tile(x, out, start, n, k0, k1, INVERSE, FACTORS, STAGES, SHAPE, BLOCK, False)


def rotate(x, block, seed, inverse):
    """`rotate` of kernels/hadamard.py, by Triton."""
    n, stages = x.numel(), block.bit_length() - 1
    out = torch.empty(n, dtype=torch.float32, device=x.device)
    tiled = tiling(block, line(x.element_size()))
    factors = tuple(1 / math.sqrt(1 << stage) for stage in range(stages + 1))
    launch(
        _rotate, triton.cdiv(n, tiled["SHAPE"][1] * block), x, out, n, *map(signed, split(seed)), INVERSE=inverse,
        FACTORS=factors, STAGES=stages, BLOCK=block, **tiled,
    )  # fmt: skip
    return out
