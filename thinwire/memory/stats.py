"""What a channel counts: messages, bytes, the ratio, cold and warm visits, relative error, faults."""

from __future__ import annotations

from dataclasses import dataclass

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
    measured: int = 0
    error_sum: float = 0.0

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
        scale = float(x.float().norm())
        if scale > 0:
            self.error_sum += float((y.float() - x.float()).norm()) / scale
            self.measured += 1
