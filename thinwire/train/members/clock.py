"""The time of a run whose members come and go: the same on all of them, with what a death or a newcomer takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Seconds since this member's last step that counted, or since it took the others' state. Members tell each other
    theirs, and take the largest."""

    def __init__(self) -> None:
        self.began = self.read = time.perf_counter()

    def start(self) -> None:
        """From here on."""
        self.began = time.perf_counter()

    def look(self) -> float:
        """How many."""
        self.read = time.perf_counter()
        return self.read - self.began

    def count(self) -> None:
        """The step counts in which it was looked at last."""
        self.began = self.read

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While this member evaluates or writes a checkpoint."""
        began = time.perf_counter()
        yield
        self.began += time.perf_counter() - began
