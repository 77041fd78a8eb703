"""The two magnitudes that fit a block's values best: of all ways to cut the sorted ones in two, the halves' means.

Magnitudes are whole numbers here, of 30 bits below the block's largest. So their sums are exact in any order, and all
implementations find the same cut.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.dispatch import choose, load
from thinwire.kernels.quantize import as_blocks

BITS = 30
LEAST = -900  # exponent of the largest magnitude: below, all are zero
LONGEST = 4096  # values of a block that Triton sorts; larger ones take the reference


def two_means(x: Tensor, block: int, impl: str | None = None) -> tuple[Tensor, Tensor]:
    """x: finite float[n] → float32[blocks] lower and upper mean of |x|; both the same where a block has one value."""
    impl = choose(x, "reference" if x.is_cuda and block > LONGEST else impl)
    if impl != "reference":
        return load(impl, "levels").two_means(x.contiguous(), block)
    magnitudes = as_blocks(x, block).abs().double()
    inside = as_blocks(torch.ones_like(x, dtype=torch.float32), block) > 0
    exponent = ((magnitudes.amax(1, keepdim=True).view(torch.int64) >> 52) - 1022).clamp(min=LEAST)
    whole = (magnitudes * _power_of_two(BITS - exponent)).long()
    order = torch.where(inside, whole, 1 << (BITS + 1)).sort(dim=1).values
    count = inside.sum(1, keepdim=True)
    below = torch.arange(1, block + 1, device=x.device)  # values in the lower half
    order = torch.where(below <= count, order, 0)
    sums, total = order.cumsum(1), order.sum(1, keepdim=True)
    above = (count - below).clamp(min=1)
    spread = sums.double().square() / below + (total - sums).double().square() / above
    spread = torch.where(below < count, spread, torch.where(count == 1, 0.0, -1.0))
    best = spread.argmax(1, keepdim=True)
    lower, unit = sums.gather(1, best), _power_of_two(exponent - BITS)
    low = lower.double() / (best + 1) * unit
    high = (total - lower).double() / (count - best - 1).clamp(min=1) * unit
    return low.float().squeeze(1), torch.where(count > 1, high, low).float().squeeze(1)


def _power_of_two(exponent: Tensor) -> Tensor:
    """float64 of int64, exactly."""
    return ((exponent + 1023) << 52).view(torch.float64)
