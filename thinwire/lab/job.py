"""A program running on a network: watch it, signal its ranks, wait for its results."""

from __future__ import annotations

import pickle
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, overload

from thinwire.errors import UsageError
from thinwire.lab.client import Client
from thinwire.lab.errors import DeadLink, LabError, LabTimeout, RankFailed
from thinwire.lab.netlink import Traffic
from thinwire.lab.program import Seat
from thinwire.lab.ranks import GRACE, Event

LAST_LINES = 20
_STOP_SECONDS = 2 * GRACE + 5.0


class Results(Sequence[Any]):
    """What a run gave: indexed by rank, the functions' return values (None for commands)."""

    def __init__(self, values: list[Any], traffic: dict[str, Traffic], seconds: float) -> None:
        self.values, self.traffic, self.seconds = values, traffic, seconds

    @overload
    def __getitem__(self, rank: int) -> Any: ...
    @overload
    def __getitem__(self, rank: slice) -> list[Any]: ...
    def __getitem__(self, rank: int | slice) -> Any:
        return self.values[rank]

    def __len__(self) -> int:
        return len(self.values)

    @property
    def total_sent(self) -> int:
        """Bytes all links carried upwards; in one site, what all hosts sent."""
        return sum(traffic.sent for traffic in self.traffic.values())


class Job:
    """Made by `Network.start`."""

    def __init__(self, client: Client, seats: list[Seat], echo: bool) -> None:
        self._client, self.seats, self._echo = client, seats, echo
        self._statuses: dict[int, int] = {}
        self._answers: dict[int, bytes] = {}
        self._last: list[deque[str]] = [deque(maxlen=LAST_LINES) for _ in seats]
        self._before = client.traffic()
        self._began, self._ended = time.monotonic(), 0.0
        self._first_failure: int | None = None
        self._dead_link: str | None = None

    @property
    def done(self) -> bool:
        return len(self._statuses) == len(self.seats)

    @property
    def seconds(self) -> float:
        """From the start to the end of the last rank, or to now."""
        return (self._ended or time.monotonic()) - self._began

    @property
    def statuses(self) -> list[int | None]:
        """Each rank's exit status (negative: a signal; None: still running)."""
        return [self._statuses.get(seat.rank) for seat in self.seats]

    def output(self, rank: int) -> list[str]:
        """The last lines a rank wrote."""
        return list(self._last[rank])

    def watch(self, seconds: float) -> bool:
        """Handle what the ranks say for up to `seconds`; true once all have ended."""
        until = time.monotonic() + seconds
        while not self.done and time.monotonic() < until:
            self._client.listen(min(0.5, until - time.monotonic()))
        return self.done

    def wait(self, timeout: float = 600.0) -> Results:
        """Until every rank has ended; raises `RankFailed`, `DeadLink` or `LabTimeout`."""
        if not self.watch(timeout):
            running = ", ".join(seat.label for seat in self.seats if seat.rank not in self._statuses)
            message = f"still running after {self.seconds:.0f} s, and stopped: {running}"
            self.stop()
            raise LabTimeout(message)
        return self.results()

    def results(self) -> Results:
        """The results of a job that is done; raises what went wrong."""
        if self._dead_link is not None:
            raise DeadLink(self._dead_link)
        if self._first_failure is not None:
            seat = self.seats[self._first_failure]
            raise RankFailed(seat.rank, seat.label, self._statuses[seat.rank], self.output(seat.rank))
        answers = (self._answers[seat.rank] for seat in self.seats)
        return Results([pickle.loads(a) if a else None for a in answers], self.traffic(), self.seconds)

    def traffic(self) -> dict[str, Traffic]:
        """Per link, what has crossed since the job began."""
        now = self._client.traffic()
        return {name: now[name].since(self._before[name]) for name in now}

    def kill(self, rank: int) -> None:
        """SIGKILL for a rank and what it started; the others are stopped, as for any failure."""
        self._signal(rank, signal.SIGKILL)

    def ask_to_end(self, rank: int) -> None:
        """SIGTERM for a rank, which may take its time over it."""
        self._signal(rank, signal.SIGTERM)

    def pause(self, rank: int) -> None:
        """Freeze a rank: its host stays reachable, its program does nothing."""
        self._signal(rank, signal.SIGSTOP)

    def resume(self, rank: int) -> None:
        self._signal(rank, signal.SIGCONT)

    def stop(self) -> None:
        """End every rank, by force after a grace."""
        self._client.ask("stop")
        if not self.watch(_STOP_SECONDS):
            raise LabError("ranks could not be stopped")

    def _signal(self, rank: int, number: int) -> None:
        if not 0 <= rank < len(self.seats):
            raise UsageError(f"rank {rank}: the ranks are 0 to {len(self.seats) - 1}")
        self._client.ask("signal", rank, int(number))

    def hear(self, event: Event) -> None:
        """An event from the keeper: output of a rank, its end, or a dead link."""
        kind, rank, *rest = event
        if kind == "dead":
            self._dead_link = str(rank)
            return
        assert isinstance(rank, int)
        if kind == "output":
            self._say(rank, str(rest[0]), str(rest[1]))
            return
        status, answer = rest
        assert isinstance(status, int) and isinstance(answer, bytes)
        self._statuses[rank], self._answers[rank] = status, answer
        if status != 0 and self._first_failure is None:
            self._first_failure = rank
        if self.done:
            self._ended = time.monotonic()

    def _say(self, rank: int, stream: str, text: str) -> None:
        target = sys.stdout if stream == "out" else sys.stderr
        for line in text.splitlines():
            self._last[rank].append(line)
            if self._echo:
                print(f"{self.seats[rank].label} | {line}", file=target, flush=True)
