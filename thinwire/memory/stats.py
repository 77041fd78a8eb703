"""What a channel counts: messages, bytes, the ratio, keys with and without a mirror, relative error, faults."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Stats:
    """Counters of one end of a channel; the error of every `measure_every`-th message is measured (0: of none)."""

    messages: int = 0
    wire_bytes: int = 0  # frames, headers included
    raw_bytes: int = 0  # what the tensors would take uncompressed
    cold: int = 0  # keys sent without a mirror, by a memory with a cold start
    warm: int = 0  # keys sent as a change against their mirror
    nonfinite: int = 0  # messages
    rejected: int = 0  # messages
    rollbacks: int = 0  # steps
    measure_every: int = 16
    _measured: int = 0
    _error_sum: float = 0.0
    _unread: list[Tensor] = field(default_factory=list, repr=False)  # of messages on a card: (error, size)

    @property
    def measured(self) -> int:
        """Messages whose error was measured."""
        self._read()
        return self._measured

    @property
    def error_sum(self) -> float:
        """Of ‖y − x‖/‖x‖ over them."""
        self._read()
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
        """Share of keys that were sent against a mirror."""
        return self.warm / (self.cold + self.warm) if self.cold + self.warm else 0.0

    @property
    def measures_now(self) -> bool:
        """Is the error of the current message to be measured?"""
        return self.measure_every > 0 and self.messages % self.measure_every == 0

    def count(self, wire_bytes: int, raw_bytes: int) -> None:
        """A message of `wire_bytes`, for a tensor of `raw_bytes`."""
        self.messages += 1
        self.wire_bytes += wire_bytes
        self.raw_bytes += raw_bytes

    def count_keys(self, keys: int, warm: bool) -> None:
        """So many keys were sent or received, against their mirrors (warm) or without (cold)."""
        if warm:
            self.warm += keys
        else:
            self.cold += keys

    def measure(self, x: Tensor, y: Tensor) -> None:
        """Note ‖y − x‖/‖x‖, where y is what the other end has of x."""
        pair = torch.stack(((y.float() - x.float()).norm(), x.float().norm()))
        self._unread.append(pair)
        if not pair.is_cuda:
            self._read()

    def _read(self) -> None:
        """Take what was measured, which on a card has to be waited for."""
        pairs, self._unread = self._unread, []
        for error, scale in torch.stack(pairs).tolist() if pairs else ():
            if scale > 0 and math.isfinite(error):
                self._error_sum += error / scale
                self._measured += 1
