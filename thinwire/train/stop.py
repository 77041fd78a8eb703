"""Ctrl-C (or SIGTERM) asks a run to stop after its step, with a checkpoint; a second Ctrl-C ends it at once."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
NOTICE = "\nstopping after {when}, with a checkpoint; Ctrl-C again stops at once\n"


class StopRequest:
    """While its block runs, `asked` is true from the first of the signals on.

    loud: print a notice at the first signal, since a step over a slow link may take a while. sites: how many the run
    has; several stop after their next average, on all of which they must agree.
    """

    def __init__(self, loud: bool, sites: int = 1) -> None:
        self.asked, self.loud = False, loud
        self.notice = NOTICE.format(when="this step" if sites == 1 else "the next average of the sites").encode()
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        self._previous = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.loud and not self.asked:
            os.write(2, self.notice)  # print is not reentrant, and the signal may have interrupted one
        self.asked = True
