"""What `compress_ddp` and `compress_fsdp` give back: whether the last step counted, what was sent, and the bracket."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from thinwire.data_parallel.auto_switch import Auto
from thinwire.data_parallel.reducer import Reducer


class Handle:
    def __init__(self, reducer: Reducer, auto: bool) -> None:
        self.reducer = reducer
        self.auto = Auto(reducer) if auto and reducer.size > 1 else None

    @property
    def skipped(self) -> bool:
        """Was the last step rolled back, for a NaN or Inf on any rank?"""
        return self.reducer.skipped

    @property
    def skips(self) -> int:
        return self.reducer.skips

    @property
    def sent(self) -> int:
        """Payload bytes that this rank has sent."""
        return self.reducer.exchange.sent

    @property
    def compressing(self) -> bool:
        """False in the warm-up, where "auto" found that compression loses, and where there is nothing to compress: the
        wire is exact, or nobody to send to."""
        reducer = self.reducer
        if reducer.size == 1 or not reducer.exchange.compressed:
            return False
        return not (reducer.exact or reducer.exchange.steps < reducer.reduction.warmup)

    @contextmanager
    def step(self, ids: Any = None, train: bool = True) -> Iterator[Any]:
        """Optional bracket of a training step: what is written to state inside is kept or dropped as a whole.

        `ids` and `train` are for adapters that remember samples; here they change nothing.
        """
        with self.reducer.step():
            yield self

    def close(self) -> None:
        self.reducer.close()
