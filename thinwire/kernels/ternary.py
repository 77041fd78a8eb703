"""Five trits a byte (3⁵ = 243): codes 0, 1, 2 stand for −1, 0, +1."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.dispatch import choose, load

LARGEST = 3**5 - 1


def trit_bytes(n: int) -> int:
    """Length of n packed trits, five per byte."""
    return -(-n // 5)


def pack_trits(codes: Tensor, impl: str | None = None) -> Tensor:
    """uint8[n] of 0…2 → uint8[⌈n/5⌉]; the first of five is the lowest digit, a short tail is padded with 0."""
    impl = choose(codes, impl)
    if impl != "reference":
        return load(impl, "ternary").pack_trits(codes.contiguous())
    digits = codes.new_zeros(trit_bytes(codes.numel()) * 5)
    digits[: codes.numel()] = codes
    weights = torch.tensor([1, 3, 9, 27, 81], device=codes.device)
    return (digits.reshape(-1, 5).long() * weights).sum(dim=1).to(torch.uint8)


def unpack_trits(wire: Tensor, n: int, impl: str | None = None) -> Tensor:
    """The inverse. A byte above 242 is no message of ours: ValueError."""
    if wire.numel() and int(wire.max()) > LARGEST:
        raise ValueError(f"ternary message holds byte {int(wire.max())}, the largest possible is {LARGEST}")
    impl = choose(wire, impl)
    if impl != "reference":
        return load(impl, "ternary").unpack_trits(wire.contiguous(), n)
    weights = torch.tensor([1, 3, 9, 27, 81], device=wire.device)
    return ((wire.long()[:, None] // weights) % 3).to(torch.uint8).reshape(-1)[:n]
