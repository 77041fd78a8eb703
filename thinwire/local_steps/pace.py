"""A site that is slower than the others makes fewer inner steps in a round, so that they need not wait for it.

Its inner steps then count as several in the schedule of rounds. In the mean it weighs what it has trained on, as ever.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from statistics import median

from thinwire.local_steps.schedule import Schedule

log = logging.getLogger("thinwire")


class Pace:
    """How fast this site goes.

    slow: a site whose inner step takes more than so many times the others' median makes fewer; None: all make as many.
    schedule: of the rounds.
    """

    def __init__(self, slow: float | None, schedule: Schedule) -> None:
        self.slow = slow
        self.schedule = schedule
        self.stride = 1  # steps of the schedule per inner step
        self.made = 0  # inner steps since the last round
        self.began = time.perf_counter()

    def advance(self, steps: int) -> int:
        """The step of the schedule after one more inner step; rounds are never passed over."""
        self.made += 1
        ahead = range(steps + 1, steps + self.stride)
        return next((step for step in ahead if self.schedule.applied(step)), steps + self.stride)

    def seconds(self) -> float:
        """Of an inner step since the last round; 0 where none was made."""
        return (time.perf_counter() - self.began) / self.made if self.made else 0.0

    def begin_round(self) -> None:
        """A round is over: inner steps are timed from now on."""
        self.made = 0
        self.began = time.perf_counter()

    def compare(self, mine: int, seconds: Sequence[float]) -> None:
        """After a round: every site's seconds of an inner step, 0 where it made none. mine: this site's place."""
        others = [value for site, value in enumerate(seconds) if site != mine and value > 0]
        if self.slow is None or not others or not seconds[mine]:
            return
        ratio = seconds[mine] / median(others)
        stride = max(1, int(ratio)) if ratio > self.slow else 1
        if stride > self.stride:
            log.warning(
                "thinwire: an inner step takes %.3g s here, %.3g s at the other sites: this site makes one of %d",
                seconds[mine], median(others), stride,
            )  # fmt: skip
        self.stride = stride
