"""Counter-based random numbers: value i depends on (seed, i) alone, the same on every device and thread count.

The global generators of torch, numpy and Python are never touched. `hash32` is two xor-shift-multiply rounds
(the constants are those of a published low-bias search) with half of the 64-bit seed entering between them,
so that different seeds give unrelated streams rather than shifted copies of one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.dispatch import load

MASK32 = 0xFFFFFFFF
GOLDEN = 0x9E3779B1
MUL1, MUL2 = 0x21F0AAAD, 0xD35A2D97
ROUNDS = 4


def derive(*parts: object) -> int:
    """A 63-bit seed from (run, step, key, rank, send count …): different parts, unrelated seeds."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def split(seed: int) -> tuple[int, int]:
    """The two 32-bit keys of a seed; near seeds (0, 1, 2 …) are spread first."""
    return int(mix(seed & MASK32, GOLDEN)), int(mix((seed >> 32) & MASK32, mix(seed & MASK32, MUL1)))


def mix(value: int, key: int) -> int:
    """`hash32` of one Python integer."""
    h = (value * GOLDEN + key) & MASK32
    h = ((h ^ (h >> 16)) * MUL1) & MASK32
    h ^= key ^ (h >> 15)
    h = (h * MUL2) & MASK32
    return h ^ (h >> 15)


def hash_one(index: int, seed: int) -> int:
    """`hash32` of one position below 2³², without a tensor."""
    k0, k1 = split(seed)
    h = (index * GOLDEN + k0) & MASK32
    h = ((h ^ (h >> 16)) * MUL1) & MASK32
    h = ((h ^ k1 ^ (h >> 15)) * MUL2) & MASK32
    return h ^ (h >> 15)


def hash32(index: Tensor, seed: int) -> Tensor:
    """Uniform 32-bit integers (as int64) for int64 positions `index`."""
    k0, k1 = split(seed)
    low, high = index & MASK32, index >> 32
    h = (low * GOLDEN + k0 + high * MUL1) & MASK32
    h = ((h ^ (h >> 16)) * MUL1) & MASK32
    h = h ^ k1 ^ (h >> 15)
    h = (h * MUL2) & MASK32
    return h ^ (h >> 15)


def uniform(n: int, seed: int, device: torch.device | str = "cpu") -> Tensor:
    """float32[n] in [0, 1) on the grid of 2⁻²⁴."""
    return (hash32(torch.arange(n, device=device), seed) >> 8).to(torch.float32) * 2.0**-24


def uniform_rows(n: int, seeds: Sequence[int] | Tensor, like: Tensor, impl: str | None = None) -> Tensor:
    """float32[len(seeds), n]: row r is uniform(n, seeds[r]), on the device of `like`."""
    if impl == "reference" or (impl is None and like.device.type != "cpu"):
        return torch.stack([uniform(n, int(seed), like.device) for seed in seeds])
    return load("cpu", "random").uniform_rows(n, seeds)


def bijection_keys(n: int, seed: int) -> tuple[int, int, list[int], list[int]]:
    """(mask, shift, odd multipliers, addends) of a bijection of the smallest 2^m ≥ n."""
    bits = max(1, (n - 1).bit_length())
    k0, k1 = split(seed)
    multipliers = [mix(2 * r, k0) | 1 for r in range(ROUNDS)]
    addends = [(mix(2 * r + 1, k1) << 32 | mix(2 * r + 1, k0)) & ((1 << 62) - 1) for r in range(ROUNDS)]
    return (1 << bits) - 1, (bits + 1) // 2, multipliers, addends


def sample(n: int, k: int, seed: int, device: torch.device | str = "cpu") -> Tensor:
    """k different positions out of n (int64[k]), in O(k): a keyed bijection of 2^m ≥ n walked until it lands."""
    mask, shift, multipliers, addends = bijection_keys(n, seed)
    out = torch.arange(k, device=device)
    walking = torch.ones_like(out, dtype=torch.bool)
    while bool(walking.any()):
        x = out[walking]
        for a, b in zip(multipliers, addends):
            x = (x * a + b) & mask
            x = x ^ (x >> shift)
        out[walking] = x
        walking = out >= n
    return out


def sample_rows(n: int, k: int, seeds: Sequence[int] | Tensor, like: Tensor, impl: str | None = None) -> Tensor:
    """int64[len(seeds), k]: row r is sample(n, k, seeds[r]), on the device of `like`."""
    if impl == "reference" or (impl is None and like.device.type != "cpu"):
        return torch.stack([sample(n, k, int(seed), like.device) for seed in seeds])
    return load("cpu", "random").sample_rows(n, k, seeds)
