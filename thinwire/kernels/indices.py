"""Sorted indices on the wire: Elias–Fano or a bitmap, chosen from (n, k) alone, so both ends know the size.

Elias–Fano of k indices below n: the l = ⌊log₂(n/k)⌋ low bits of each are packed; the high parts h_j are the ones
of a bit vector, at positions h_j + j. Size k·l + k + ⌊(n−1)/2^l⌋ + 1 bits: 8.56 an index at 1 %. A bitmap of n
bits wins above a quarter; all or none of n need nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels import bits as bitpack
from thinwire.kernels.dispatch import choose, load


def low_bits(n: int, k: int) -> int:
    """How many low bits of an index Elias–Fano stores as they are, for k indices below n."""
    return max(0, (n // k).bit_length() - 1)


def elias_fano_bytes(n: int, k: int) -> tuple[int, int]:
    """(bytes of the low parts, bytes of the high bit vector)."""
    low = low_bits(n, k)
    return bitpack.packed_bytes(k, low), bitpack.packed_bytes(k + ((n - 1) >> low) + 1, 1)


def index_bytes(n: int, k: int) -> int:
    """Exact length of k coded indices below n: the shorter of Elias–Fano and a bitmap."""
    if k in (0, n):
        return 0
    return min(sum(elias_fano_bytes(n, k)), bitpack.packed_bytes(n, 1))


def encode_indices(index: Tensor, n: int, impl: str | None = None) -> Tensor:
    """int64[k], ascending and below n → uint8[index_bytes(n, k)]."""
    k = index.numel()
    if k in (0, n):
        return torch.empty(0, dtype=torch.uint8, device=index.device)
    impl = choose(index, impl)
    bitmap = bitpack.packed_bytes(n, 1) == index_bytes(n, k)
    if impl != "reference":
        coder = load(impl, "indices")
        return coder.encode_bitmap(index, n) if bitmap else coder.encode_elias_fano(index, n)
    if bitmap:
        return bitpack.pack(_ones(index, n), 1, "reference")
    low = low_bits(n, k)
    ones = _ones((index >> low) + torch.arange(k, device=index.device), k + ((n - 1) >> low) + 1)
    return torch.cat((_pack_wide(index & ((1 << low) - 1), low), bitpack.pack(ones, 1, "reference")))


def decode_indices(wire: Tensor, n: int, k: int, impl: str | None = None) -> Tensor:
    """The inverse: int64[k]. A message that is not k ascending indices below n raises ValueError."""
    index, good = decode_flagged(wire, n, k, impl)
    if not bool(good):
        raise ValueError(f"index message is not {k} ascending indices below {n}")
    return index


def decode_flagged(wire: Tensor, n: int, k: int, impl: str | None = None) -> tuple[Tensor, Tensor]:
    """(int64[k], 0-d bool: are they k ascending ones below n?), without raising or waiting for a card. Where the flag
    is false the indices are void, but inside."""
    if wire.numel() != index_bytes(n, k):
        raise ValueError(f"index message has {wire.numel()} bytes, {k} of {n} indices take {index_bytes(n, k)}")
    if k in (0, n):
        return torch.arange(k, device=wire.device), torch.ones((), dtype=torch.bool, device=wire.device)
    impl = choose(wire, impl)
    bitmap = bitpack.packed_bytes(n, 1) == wire.numel()
    if impl != "reference":
        coder = load(impl, "indices")
        index, found = coder.decode_bitmap(wire, n, k) if bitmap else coder.decode_elias_fano(wire, n, k)
        if impl == "gpu":  # found: whether they are good
            return index, found
    else:
        index = torch.nonzero(_unpack_ones(wire)).reshape(-1) if bitmap else _elias_fano(wire, n, k)
        index, found = (index if index.numel() == k else index.new_zeros(k)), torch.tensor(index.numel())
    index, good = checked(index, n, impl)
    return index, good & (found == k)


def checked(index: Tensor, n: int, impl: str | None = None) -> tuple[Tensor, Tensor]:
    """(int64[k] inside n, 0-d bool: is it ascending and inside?); k > 0, and what is outside is written over."""
    if choose(index, impl) == "gpu":
        return load("gpu", "indices").checked(index, n)
    good = (index[0] >= 0) & (index[-1] < n) & (index[1:] > index[:-1]).all()
    return (index if bool(good) else index.clamp_(0, n - 1)), good


def _elias_fano(wire: Tensor, n: int, k: int) -> Tensor:
    low = low_bits(n, k)
    cut = bitpack.packed_bytes(k, low)
    high = torch.nonzero(_unpack_ones(wire[cut:])).reshape(-1)
    if high.numel() != k:
        return high
    return ((high - torch.arange(k, device=wire.device)) << low) | _unpack_wide(wire[:cut], k, low)


def _ones(index: Tensor, n: int) -> Tensor:
    out = torch.zeros(n, dtype=torch.uint8, device=index.device)
    out[index] = 1
    return out


def _unpack_ones(wire: Tensor) -> Tensor:
    return bitpack.unpack(wire, wire.numel() * 8, 1, "reference")


def _pack_wide(values: Tensor, bits: int) -> Tensor:
    """Like bits.pack for any number of bits."""
    spread = (values[:, None] >> torch.arange(bits, device=values.device)) & 1
    return bitpack.pack(spread.reshape(-1).to(torch.uint8), 1, "reference")


def _unpack_wide(wire: Tensor, k: int, bits: int) -> Tensor:
    stream = _unpack_ones(wire)[: k * bits].reshape(k, bits).long()
    return (stream << torch.arange(bits, device=wire.device)).sum(dim=1)
