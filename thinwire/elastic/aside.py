"""Waits on threads of their own, so that a caller can stop waiting for what cannot be ended from outside.

Not concurrent.futures, which waits at the end of the program for threads that were abandoned.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any


class Aside:
    """One wait, and what came of it. wait: gives it. changed: is told when it is through."""

    def __init__(self, wait: Callable[[], Any], changed: threading.Condition) -> None:
        self.wait, self.changed = wait, changed
        self.done = False
        self.result: Any = None
        self.error: Exception | None = None

    def start(self) -> None:
        """On an idle thread; a new one where none is."""
        try:
            waits = _idle.pop()
        except IndexError:
            waits = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(waits,), name="thinwire wait", daemon=True).start()
        waits.put(self)

    def run(self) -> None:
        """On that thread."""
        try:
            self.result = self.wait()
        except Exception as error:
            self.error = error.with_traceback(None)  # its frames hold what was waited for
        with self.changed:
            self.done = True
            self.changed.notify_all()


_idle: list[queue.SimpleQueue[Aside]] = []  # one per thread


def _serve(waits: queue.SimpleQueue[Aside]) -> None:
    while True:
        waits.get().run()  # no name keeps it: what only it holds ends on this thread
        _idle.append(waits)
