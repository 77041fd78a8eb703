"""Waits on threads of their own, so that a caller can stop waiting for what cannot be ended from outside.

Not concurrent.futures, which waits at the end of the program for threads that were abandoned, however long that takes.
Here the program waits for them at its end for as long as their own time-outs say. A thread that came back from Gloo
after Python has ended would end the process with a core dump ("terminate called without an active exception").
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
from collections.abc import Callable
from typing import Any


class Aside:
    """One wait, and what came of it. wait: gives it. changed: is told when it is through. seconds: within which it
    should end when nobody waits for it any more."""

    def __init__(self, wait: Callable[[], Any], changed: threading.Condition, seconds: float) -> None:
        self.wait, self.changed, self.seconds = wait, changed, seconds
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.undo: Callable[[Any], object] | None = None  # for a result that comes when nobody waits for it

    def start(self) -> None:
        """On an idle thread; a new one where none is."""
        with _ended:
            _under_way.add(self)
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
        except BaseException as error:
            self.error = error.with_traceback(None)  # its frames hold what was waited for
        self.wait = _nothing  # what only the wait held, such as a group of Gloo's, ends here, and not after the program
        with self.changed:
            self.done = True
            self.changed.notify_all()
        if self.undo is not None:
            if self.error is None:
                self.undo(self.result)
            self.result = self.error = None
        with _ended:
            _under_way.discard(self)
            _ended.notify_all()


def within(seconds: float, wait: Callable[[], Any], undo: Callable[[Any], object]) -> Any:
    """What `wait` gives. TimeoutError where it has given nothing after so many seconds; what it gives later is given
    to `undo`, on another thread."""
    changed = threading.Condition()
    aside = Aside(wait, changed, seconds)
    aside.start()
    with changed:
        if not changed.wait_for(lambda: aside.done, seconds):
            aside.undo = undo
            raise TimeoutError(f"no answer within {seconds:g} s")
    if aside.error is not None:
        raise aside.error
    return aside.result


def _serve(waits: queue.SimpleQueue[Aside]) -> None:
    while True:
        waits.get().run()  # no name keeps it
        _idle.append(waits)


def _nothing() -> None:
    """What is waited for when a wait is through."""


def _let_them_end() -> None:
    """At the end of the program."""
    with _ended:
        _ended.wait_for(lambda: not _under_way, max((aside.seconds for aside in _under_way), default=0.0))


def _forget() -> None:
    """In a forked process, which has none of the threads."""
    global _ended
    _idle.clear()
    _under_way.clear()
    _ended = threading.Condition()


_idle: list[queue.SimpleQueue[Aside]] = []  # one per thread
_under_way: set[Aside] = set()
_ended = threading.Condition()  # one of them
atexit.register(_let_them_end)
os.register_at_fork(after_in_child=_forget)
