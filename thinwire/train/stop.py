"""Ctrl-C (or SIGTERM) asks a run to stop after its step, with a checkpoint; a second Ctrl-C ends it at once."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
NOTICE = b"\nstopping after this step, with a checkpoint; Ctrl-C again stops at once\n"


class StopRequest:
    """While its block runs, `asked` is true from the first of the signals on.

    loud: print a notice at the first signal, since a step over a slow link may take a while.
    """

    def __init__(self, loud: bool) -> None:
        self.asked, self.loud = False, loud
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
            os.write(2, NOTICE)  # print is not reentrant, and the signal may have interrupted one
        self.asked = True
