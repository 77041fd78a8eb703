"""Does compression pay on this network? Try both for a few steps, keep the faster, say so once.

A step is timed from the start of one pass to the start of the next, so it holds compute, compression and the wire. All
ranks take the same decision: the slowest rank's medians count.
"""

from __future__ import annotations

import logging
import statistics
import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from thinwire.data_parallel.reducer import Reducer

log = logging.getLogger("thinwire")
SKIPPED = 2  # first passes: allocation, and DDP's rebuilding of its buckets
ROUNDS, LENGTH = 2, 3  # exact and compressed steps in turn
WORTH = 0.97  # compression must take this share of the exact step, or it is not worth its error


class Auto:
    """Chooses between exact and compressed passes of a reducer, from the time that both take."""

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = reducer
        self.plan = ["exact"] * SKIPPED + (["exact"] * LENGTH + ["compressed"] * LENGTH) * ROUNDS
        self.times: dict[str, list[float]] = {"exact": [], "compressed": []}
        self.last = 0.0
        self.passes = 0
        self.residual_left = False  # a residual may be left, which the next exact pass must send
        self.sending_residual = False  # the last pass was that one; skipped, it sent nothing

    def expect_residual(self) -> None:
        """Residuals were loaded: the next exact pass must send them."""
        self.residual_left = True

    def begin_pass(self) -> bool:
        """Called once at the start of every pass: choose its mode. True: it is exact and no residual is left, so DDP's
        own all-reduce will do."""
        now = time.perf_counter()
        if SKIPPED < self.passes <= len(self.plan):
            self.times[self.plan[self.passes - 1]].append(now - self.last)
        if self.passes == len(self.plan):
            self._decide()
        self.last = now
        self.passes += 1
        if self.passes <= len(self.plan):
            self.reducer.use_exact(self.plan[self.passes - 1] == "exact")
        if self.sending_residual and self.reducer.skipped:
            self.residual_left = True
        plain = self.reducer.exact and not self.residual_left
        self.sending_residual = self.reducer.exact and self.residual_left
        self.residual_left = not self.reducer.exact
        return plain

    def _decide(self) -> None:
        found = [statistics.median(self.times[kind]) for kind in ("exact", "compressed")]
        medians = torch.tensor(found, device=next(iter(self.reducer.parameters.values())).device)
        exact, compressed = self.reducer.maximum(medians).tolist()
        self.reducer.use_exact(compressed > WORTH * exact)
        if self.reducer.is_first:
            verdict = "off: it does not pay here" if self.reducer.exact else "on"
            log.warning(
                "thinwire: a step takes %.1f ms exact and %.1f ms compressed; compression is %s",
                1e3 * exact, 1e3 * compressed, verdict,
            )  # fmt: skip
