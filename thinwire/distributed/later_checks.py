"""Checks of values on a card that are read when ranks agree on a step: to read one is to wait for the card."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.codecs.base import is_finite
from thinwire.errors import InvalidExchange


class LaterChecks:
    """0-d flags on a card that nobody has read yet."""

    def __init__(self) -> None:
        self.unread: list[Tensor] = []

    def leave(self, good: Tensor) -> bool:
        """Whether 0-d `good` is true. On a card it is left for later, and taken for true."""
        if not good.is_cuda:
            return bool(good)
        self.unread.append(good)
        return True

    def check_finite(self, name: str, *tensors: Tensor | None) -> None:
        """InvalidExchange where any is not finite: the mean of what `name` says, its residual. On a card left for
        later."""
        flags = [is_finite(x) for x in tensors if x is not None]
        if not self.leave(flags[0] if len(flags) == 1 else torch.stack(flags).all()):
            raise InvalidExchange(f"{name}: the mean or the residual is NaN or Inf")

    def all_good(self) -> bool:
        """Were all that were left good? Waits for the card, and forgets them."""
        flags, self.unread = self.unread, []
        return not flags or bool(torch.stack(flags).all())

    def into(self, flags: Tensor) -> Tensor:
        """uint8[…]: flags, of which the first is also set where one that was left was not good; they are forgotten."""
        if not self.unread:
            return flags
        flags = flags.clone()
        flags[0] |= ~torch.stack(self.unread).all().to(flags.device)
        self.unread = []
        return flags
