"""Packing of small unsigned codes: value i occupies bits [i·b, (i+1)·b) of the stream, lowest bit first."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.dispatch import choose, load


def packed_bytes(n: int, bits: int) -> int:
    """Length of n packed codes of so many bits."""
    return (n * bits + 7) // 8


def pack(codes: Tensor, bits: int, impl: str | None = None) -> Tensor:
    """uint8[n] codes < 2^bits, 1 ≤ bits ≤ 8 → uint8[⌈n·bits/8⌉]."""
    impl = choose(codes, impl)
    if impl != "reference":
        return load(impl, "bits").pack(codes.contiguous(), bits)
    spread = (codes[:, None] >> torch.arange(bits, dtype=torch.uint8, device=codes.device)) & 1
    stream = torch.zeros(packed_bytes(codes.numel(), bits) * 8, dtype=torch.uint8, device=codes.device)
    stream[: spread.numel()] = spread.reshape(-1)
    return _weigh(stream.reshape(-1, 8))


def unpack(wire: Tensor, n: int, bits: int, impl: str | None = None) -> Tensor:
    """uint8[⌈n·bits/8⌉] → uint8[n]."""
    impl = choose(wire, impl)
    if impl != "reference":
        return load(impl, "bits").unpack(wire.contiguous(), n, bits)
    stream = (wire[:, None] >> torch.arange(8, dtype=torch.uint8, device=wire.device)) & 1
    return _weigh(stream.reshape(-1)[: n * bits].reshape(n, bits))


def _weigh(bits: Tensor) -> Tensor:
    """uint8[n, b ≤ 8] of 0/1, lowest first → uint8[n]."""
    weights = (1 << torch.arange(bits.shape[1], device=bits.device)).to(torch.int32)
    return (bits.to(torch.int32) * weights).sum(dim=1).to(torch.uint8)
