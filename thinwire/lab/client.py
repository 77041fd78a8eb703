"""The launcher's side of a supervisor: starts it, sends requests, receives events, ends it. Every wait has a limit."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from typing import Any

from thinwire.errors import UsageError
from thinwire.lab.errors import LabError, Unavailable
from thinwire.lab.netlink import Traffic
from thinwire.lab.ranks import Event
from thinwire.lab.remedy import explain

ANSWER_SECONDS, END_SECONDS = 30.0, 5.0
_SLICE = 0.05  # how long one thread keeps the connection from another


class Client:
    """A supervisor, as the launcher sees it.

    on_event: called with every event that is not an answer.
    variables: the environment of the supervisor's process.
    """

    def __init__(self, on_event: Callable[[Event], None], variables: dict[str, str]) -> None:
        self._on_event = on_event
        self._lock = threading.RLock()
        self._connection, self._process = _start(variables)

    def ask(self, request: str, *arguments: Any, limit: float = ANSWER_SECONDS) -> Any:
        """Send a request and wait for its answer up to `limit` seconds; events that come before it are handled."""
        with self._lock:
            self._send((request, arguments))
            until = time.monotonic() + limit
            while time.monotonic() < until:
                event = self._next(min(1.0, limit))
                if event is None:
                    continue
                if event[0] == "reply":
                    return event[1]
                self._handle(event)
        self.close()
        raise LabError(f"the lab did not answer {request!r} within {limit:g} s and was ended")

    def listen(self, seconds: float) -> None:
        """Handle the events that have come, waiting up to `seconds` for the first."""
        until = time.monotonic() + seconds
        while True:
            with self._lock:
                event = self._next(min(_SLICE, max(0.0, until - time.monotonic())))
                if event is not None:
                    self._handle(event)
                    until = 0.0
                elif time.monotonic() >= until:
                    return

    def traffic(self) -> dict[str, Traffic]:
        """Per link, what has crossed since the network was made."""
        return dict(self.ask("counters"))

    def close(self) -> None:
        """Close the connection and wait for the guard to end; after END_SECONDS it is killed."""
        self._connection.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_SECONDS)

    def _send(self, message: object) -> None:
        try:
            self._connection.send(message)
        except OSError:
            raise LabError("the lab is closed") from None

    def _next(self, seconds: float) -> Event | None:
        try:
            return self._connection.recv() if self._connection.poll(seconds) else None
        except (EOFError, OSError):
            raise LabError("the lab's supervisor has ended unexpectedly") from None

    def _handle(self, event: Event) -> None:
        if event[0] == "unavailable":
            _, what, number, text = event
            raise Unavailable(explain(str(what), int(str(number)), str(text)))
        if event[0] == "refused":
            raise UsageError(str(event[1]))
        if event[0] == "broken":
            raise LabError(str(event[1]))
        self._on_event(event)


def _start(variables: dict[str, str]) -> tuple[Connection[Any, Any], subprocess.Popen[bytes]]:
    """A fresh interpreter as guard: forking this one would take along its threads' locks and thread pools."""
    if sys.platform != "linux":
        raise Unavailable(f"the lab needs Linux network namespaces; this is {sys.platform}")
    ours, theirs = Pipe()
    launcher = os.pidfd_open(os.getpid())
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from thinwire.lab.supervisor import guard; "
        f"guard({theirs.fileno()}, {launcher})"
    )
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), launcher),
            env=variables,
            start_new_session=True,
        )
    finally:
        theirs.close()
        os.close(launcher)
    return ours, process
