"""What `compress_ddp` and `compress_fsdp` give back: whether the last step counted, what was saved, and the bracket."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, Self

from torch import Tensor

from thinwire.data_parallel.auto_switch import Auto
from thinwire.data_parallel.reducer import Reducer
from thinwire.distributed.summary import Summary

log = logging.getLogger("thinwire")


class LossScaler(Protocol):
    """A GradScaler, torch's or a trainer's own."""

    def get_scale(self) -> float: ...


class Handle:
    """What compressed DDP and FSDP models have in common.

    reducer: of the model's parameters. auto: measure, and stay exact where that is faster.
    """

    def __init__(self, reducer: Reducer, auto: bool) -> None:
        self.reducer = reducer
        self.auto = Auto(reducer) if auto and reducer.size > 1 else None
        self._logged_steps = 0

    @property
    def skipped(self) -> bool:
        """Was the last step rolled back, for a NaN or Inf on any rank?"""
        return self.reducer.skipped

    @property
    def skips(self) -> int:
        """How many steps were rolled back so."""
        return self.reducer.skips

    @property
    def sent(self) -> int:
        """Payload bytes that this rank has sent."""
        return self.reducer.exchange.sent

    def summary(self) -> Summary:
        """What compression has saved on this rank so far; `print(handle.summary())` is one line."""
        return self.reducer.summary()

    @property
    def compressing(self) -> bool:
        """False in the warm-up, where "auto" found that compression loses, and where there is nothing to compress: the
        wire is exact, or nobody to send to."""
        return self.reducer.compressing

    @contextmanager
    def step(self, ids: Sequence[int] | None = None, train: bool = True) -> Iterator[Self]:
        """Optional bracket of a training step: what is written to state inside is kept or dropped as a whole.

        ids, train: for adapters that remember samples; here they change nothing. An exception on one rank drops the
        step on all: the others learn of it before their next reducing backward, whose gradients are then NaN (or zero),
        or at the end of the bracket; `skipped` is true.
        """
        with self.reducer.step():
            yield self

    def log_summary(self, logger: logging.Logger = log) -> None:
        """One line at level INFO, on the first rank; nothing where no step was made since the last."""
        summary = self.summary()
        if self.reducer.is_first and summary.steps > self._logged_steps:
            logger.info("thinwire: %s", summary)
        self._logged_steps = summary.steps

    def close(self) -> None:
        """End the communication thread and destroy its process groups; what was saved is logged. A backward that would
        reduce is refused after it."""
        self.reducer.close()
        self.log_summary()

    def _load(self, state: dict[str, Tensor]) -> None:
        self.reducer.load_state_dict(state)
        if self.auto is not None:
            self.auto.expect_residual()
