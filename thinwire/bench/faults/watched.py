"""A rank that is watched: the program runs in a child of the rank, and the rank reports how that child ended.

The lab stops all ranks when one ends badly. Here the question is what the others do by themselves, so a rank always
ends well, and says what became of its child: status, every line it wrote, and when it ended.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from thinwire.bench.faults.injury import Injury, Trouble

LOOK = 0.05  # seconds between looks at the child
RESULT = "result: "  # begins the line in which a program gives its result


@dataclass(frozen=True)
class Ended:
    """status: of the child, negative for a signal. lines: all it wrote. at: when it ended, by the monotonic clock.
    stuck: it had to be ended from outside."""

    status: int
    lines: list[str]
    at: float
    stuck: bool


def watched(program: Callable[..., int], injury: Injury | None, folder: str, *arguments: Any) -> Ended:
    """What a rank runs: `program(trouble, *arguments)` in a child, whose exit status it returns."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        home = os.path.join(folder, f"host{os.environ['RANK']}")  # every host has a disk of its own
        os.makedirs(home, exist_ok=True)
        os.chdir(home)
        status = program(Trouble(injury, folder), *arguments)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # what torch does at exit is not looked at
        raise SystemExit(status)
    os.close(writing)
    return _Watch(child, reading, injury.seconds if injury else 0.0).until_the_end()


class _Watch:
    """child: its process. reading: what it writes. sleep: seconds after which it is woken, should it stop itself."""

    def __init__(self, child: int, reading: int, sleep: float) -> None:
        self.child = child
        self.reading = reading
        self.sleep = sleep
        self.text = bytearray()
        self.wake_at = float("inf")
        self.stuck = False
        signal.signal(signal.SIGTERM, self._end)

    def until_the_end(self) -> Ended:
        while True:
            self._read(LOOK)
            if time.monotonic() >= self.wake_at:
                self.wake_at = float("inf")
                os.kill(self.child, signal.SIGCONT)
            process, status = os.waitpid(self.child, os.WNOHANG | os.WUNTRACED)
            if process and os.WIFSTOPPED(status):
                self.wake_at = time.monotonic() + self.sleep
            elif process:
                ended = time.monotonic()
                while self._read(0.0):
                    pass
                lines = self.text.decode(errors="replace").splitlines()
                return Ended(os.waitstatus_to_exitcode(status), lines, ended, self.stuck)

    def _read(self, wait: float) -> bool:
        if not select.select([self.reading], [], [], wait)[0]:
            return False
        data = os.read(self.reading, 1 << 16)
        self.text += data
        if not data:
            time.sleep(wait)
        return bool(data)

    def _end(self, *_: object) -> None:
        self.stuck = True
        os.kill(self.child, signal.SIGKILL)
