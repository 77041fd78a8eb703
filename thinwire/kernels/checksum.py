"""A 32-bit checksum whose words may be summed in any order, hence on every core or on the GPU.

    sum_i w_i · K_i  mod p,   p = 2³² − 5 prime,  K_i = 1 + hash32(i) mod (p − 1),  w_i the i-th 32-bit word

Flipping one bit changes the sum by ±2^b·K_i, which no prime p > 2 divides: every single flip is found. Any other
damage passes with probability about 2⁻³². The length is part of the sum. Not a cryptographic signature.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.dispatch import choose, load
from thinwire.kernels.random import hash32, hash_one

PRIME = (1 << 32) - 5
SEED = 0x7468696E77697265  # "thinwire"


def weight(word: int) -> int:
    """K_i of one word below 2³²."""
    return 1 + hash_one(word, SEED) % (PRIME - 1)


def checksum(data: Tensor, impl: str | None = None) -> Tensor:
    """uint8[n] → 0-d int64 in [0, p), on data's device."""
    impl = choose(data, impl)
    if impl == "gpu":
        return load(impl, "checksum").checksum(data)
    total = load(impl, "checksum").weighted_sum(data) if impl != "reference" else _weighted_sum(data)
    return (total + data.numel() % PRIME) % PRIME


def checksums(rows: Tensor, impl: str | None = None) -> Tensor:
    """uint8[r, n] → int64[r]: the checksum of every row, by one call for all."""
    impl = choose(rows, impl)
    if rows.numel() and (impl == "gpu" or (impl == "cpu" and rows.shape[1] % 4 == 0)):
        return (load(impl, "checksum").row_sums(rows) + rows.shape[1] % PRIME) % PRIME
    each = [checksum(row, impl) for row in rows]
    return torch.stack(each) if each else torch.zeros(0, dtype=torch.int64, device=rows.device)


def _weighted_sum(data: Tensor) -> Tensor:
    padded = data.new_zeros(-(-data.numel() // 4) * 4)
    padded[: data.numel()] = data
    shifts = torch.arange(0, 32, 8, device=data.device)
    words = (padded.reshape(-1, 4).long() << shifts).sum(dim=1)
    weights = 1 + hash32(torch.arange(words.numel(), device=data.device), SEED) % (PRIME - 1)
    # 32 × 32 bits overflow int64: split the word into halves and reduce each product.
    high = ((words >> 16) * weights) % PRIME
    return (((high << 16) + (words & 0xFFFF) * weights) % PRIME).sum() % PRIME
