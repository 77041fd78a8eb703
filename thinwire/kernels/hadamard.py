"""Random Hadamard rotation: flip signs by seed, then a fast Walsh–Hadamard transform of every block.

It spreads an outlier over its block, which is what a block-scaled quantiser wants. The remainder of n modulo
the block is cut into powers of two (77 = 64 + 8 + 4 + 1), so the rotation is an isometry of exactly n values:
nothing is padded. Butterflies run from stride 1 upwards and the factor 1/√B comes last: the same bits everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from thinwire.kernels import random
from thinwire.kernels.dispatch import choose, load


def pieces(n: int, block: int) -> Iterator[tuple[int, int, int]]:
    """(start, count, size): `count` transforms of `size` from `start`; sizes are powers of two ≤ block."""
    if n >= block:
        yield 0, n // block, block
    start, size = n // block * block, block >> 1
    while start < n:
        if n - start >= size:
            yield start, 1, size
            start += size
        size >>= 1


def rotate(x: Tensor, block: int, seed: int, inverse: bool = False, impl: str | None = None) -> Tensor:
    """x: float[n] → its rotation, float32 (float64 for float64). `inverse` undoes it with the same seed."""
    impl = choose(x, impl)
    if impl != "reference":
        return load(impl, "hadamard").rotate(x.contiguous(), block, seed, inverse)
    out = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32).clone()
    sign = 1.0 - 2.0 * (random.hash32(torch.arange(out.numel(), device=x.device), seed) & 1).to(out.dtype)
    if not inverse:
        out *= sign
    for start, count, size in pieces(out.numel(), block):
        piece = out[start : start + count * size].view(count, size)
        piece.copy_(_butterflies(piece))
        piece *= 1 / math.sqrt(size)
    return out * sign if inverse else out


def _butterflies(x: Tensor) -> Tensor:
    """float[count, size] → unnormalised Walsh–Hadamard transform."""
    count, size = x.shape
    stride = 1
    while stride < size:
        a, b = x.reshape(count, size // (2 * stride), 2, stride).unbind(dim=2)
        x = torch.stack((a + b, a - b), dim=2).reshape(count, size)
        stride *= 2
    return x
