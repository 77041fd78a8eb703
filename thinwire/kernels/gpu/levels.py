"""The two magnitudes that fit a block best in Triton: a program per block, which sorts it in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from thinwire.kernels import levels
from thinwire.kernels.gpu.launch import launch
from thinwire.kernels.gpu.scalar import widen

BITS, LEAST = tl.constexpr(levels.BITS), tl.constexpr(levels.LEAST)
BEYOND = tl.constexpr(0x7FFFFFFF)  # behind all magnitudes
PER_WARP = 256  # values


@triton.jit
def _power_of_two(exponent):
    return ((exponent + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit(do_not_specialize=["n", "block"])
def _two_means(x, low, high, n, block, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, SIZE)
    count = tl.minimum(block, n - row * block)
    inside = place < count
    magnitude = tl.abs(widen(tl.load(x + row * block + place, mask=inside, other=0.0))).to(tl.float64)
    top = tl.max(magnitude, 0)
    exponent = tl.maximum((top.to(tl.int64, bitcast=True) >> 52) - 1022, LEAST)
    whole = (magnitude * _power_of_two(-exponent + BITS)).to(tl.int32)
    order = tl.sort(tl.where(inside, whole, BEYOND))
    order = tl.where(inside, order, 0).to(tl.int64)
    sums, total = tl.cumsum(order, 0), tl.sum(order, 0)
    below = (place + 1).to(tl.int64)
    lower, upper = sums.to(tl.float64), (total - sums).to(tl.float64)
    above = tl.maximum(count - below, 1)
    spread = lower * lower / below.to(tl.float64) + upper * upper / above.to(tl.float64)
    spread = tl.where(below < count, spread, -1.0)
    best = tl.argmax(spread, 0)  # of a single value all are −1, and it is the first
    chosen = tl.sum(tl.where(place == best, sums, 0), 0)
    unit, cut = _power_of_two(exponent - BITS), (best + 1).to(tl.int64)
    lowest = chosen.to(tl.float64) / cut.to(tl.float64) * unit
    rest = tl.maximum(count - cut, 1)
    highest = tl.where(count > 1, (total - chosen).to(tl.float64) / rest.to(tl.float64) * unit, lowest)
    tl.store(low + row, lowest.to(tl.float32))
    tl.store(high + row, highest.to(tl.float32))


def two_means(x, block):
    """`two_means` of kernels/levels.py, by Triton."""
    n = x.numel()
    low = torch.empty(-(-n // block), dtype=torch.float32, device=x.device)
    high = torch.empty_like(low)
    size = triton.next_power_of_2(block)
    warps = max(1, min(16, size // PER_WARP))
    launch(_two_means, low.numel(), x, low, high, n, block, SIZE=size, warps=warps)
    return low, high
