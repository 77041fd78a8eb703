"""What a channel counts: messages, bytes, the ratio, cold and warm visits, relative error, faults."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Stats:
    messages: int = 0
    wire_bytes: int = 0  # frames, headers included
    raw_bytes: int = 0  # what the tensors would take uncompressed
    cold: int = 0
    warm: int = 0
    nonfinite: int = 0
    rejected: int = 0
    rollbacks: int = 0
    _measured: int = 0
    _error_sum: float = 0.0
    _later: list[Tensor] = field(default_factory=list, repr=False)  # of messages on a card: (error, size)

    @property
    def measured(self) -> int:
        """Messages whose error was measured."""
        self._look()
        return self._measured

    @property
    def error_sum(self) -> float:
        """Of ‖y − x‖/‖x‖ over them."""
        self._look()
        return self._error_sum

    @property
    def ratio(self) -> float:
        """Uncompressed bytes over bytes sent; 1 before the first message."""
        return self.raw_bytes / self.wire_bytes if self.wire_bytes else 1.0

    @property
    def relative_error(self) -> float:
        """Mean of ‖y − x‖/‖x‖ over the messages that were measured; 0 before the first."""
        return self.error_sum / self.measured if self.measured else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of visits that found a mirror."""
        return self.warm / (self.cold + self.warm) if self.cold + self.warm else 0.0

    def count(self, wire_bytes: int, raw_bytes: int) -> None:
        self.messages += 1
        self.wire_bytes += wire_bytes
        self.raw_bytes += raw_bytes

    def visit(self, warm: bool) -> None:
        self.warm += warm
        self.cold += not warm

    def measure(self, x: Tensor, y: Tensor) -> None:
        pair = torch.stack(((y.float() - x.float()).norm(), x.float().norm()))
        self._later.append(pair)
        if not pair.is_cuda:
            self._look()

    def _look(self) -> None:
        """Take what was measured, which on a card has to be waited for."""
        pairs, self._later = self._later, []
        for error, scale in torch.stack(pairs).tolist() if pairs else ():
            if scale > 0 and math.isfinite(error):
                self._error_sum += error / scale
                self._measured += 1
