"""A program running on a network: watch it, signal its ranks, wait for its results."""

from __future__ import annotations

import pickle
import signal
import sys
import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, overload

from thinwire.errors import UsageError
from thinwire.lab.client import Client
from thinwire.lab.errors import DeadLink, LabError, LabTimeout, RankFailed
from thinwire.lab.netlink import Traffic
from thinwire.lab.program import Placement
from thinwire.lab.ranks import GRACE, Event

LAST_LINES = 20
_STOP_SECONDS = 2 * GRACE + 5.0


class Results(Sequence[Any]):
    """The results of a run, indexed by rank: what the function returned (None for commands).

    traffic: per link, what crossed during the run. seconds: from the start to the end of the last rank.
    """

    def __init__(self, values: list[Any], traffic: dict[str, Traffic], seconds: float) -> None:
        self.values = values
        self.traffic = traffic
        self.seconds = seconds

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
        """Bytes that all links carried upwards; in one site, what all hosts sent."""
        return sum(traffic.sent for traffic in self.traffic.values())


class Job:
    """A program running on a network; made by `Network.start`.

    client: the connection to the supervisor. placements: where each rank runs. echo: print the ranks' output.
    absent: ranks that are not started yet; they count as ended. separate: one that fails is no failure of the job.
    """

    def __init__(
        self, client: Client, placements: list[Placement], echo: bool, absent: Collection[int] = (),
        separate: bool = False,
    ) -> None:  # fmt: skip
        self._client = client
        self._separate = separate
        self.placements = placements
        self._echo = echo
        self._statuses: dict[int, int] = dict.fromkeys(absent, 0)
        self._answers: dict[int, bytes] = dict.fromkeys(absent, b"")
        self._last: list[deque[str]] = [deque(maxlen=LAST_LINES) for _ in placements]
        self._before = client.traffic()
        self._began, self._ended = time.monotonic(), 0.0
        self._first_failure: int | None = None
        self._dead_link: str | None = None

    @property
    def done(self) -> bool:
        return len(self._statuses) == len(self.placements)

    @property
    def seconds(self) -> float:
        """From the start to the end of the last rank, or to now."""
        return (self._ended or time.monotonic()) - self._began

    @property
    def statuses(self) -> list[int | None]:
        """Each rank's exit status (negative: a signal; None: still running)."""
        return [self._statuses.get(place.rank) for place in self.placements]

    def output(self, rank: int) -> list[str]:
        """The last lines a rank wrote."""
        return list(self._last[rank])

    def watch(self, seconds: float) -> bool:
        """Handle the ranks' output and exits for up to `seconds`; true once all have ended."""
        until = time.monotonic() + seconds
        while not self.done and time.monotonic() < until:
            self._client.listen(min(0.5, until - time.monotonic()))
        return self.done

    def wait(self, timeout: float = 600.0) -> Results:
        """Wait up to `timeout` seconds until every rank has ended; raises `RankFailed`, `DeadLink` or `LabTimeout`."""
        if not self.watch(timeout):
            running = ", ".join(place.label for place in self.placements if place.rank not in self._statuses)
            message = f"still running after {self.seconds:.0f} s, and stopped: {running}"
            self.stop()
            raise LabTimeout(message)
        return self.results()

    def results(self) -> Results:
        """The results of a job that is done; raises what went wrong."""
        if self._dead_link is not None:
            raise DeadLink(self._dead_link)
        if self._first_failure is not None:
            place = self.placements[self._first_failure]
            raise RankFailed(place.rank, place.label, self._statuses[place.rank], self.output(place.rank))
        answers = (self._answers[place.rank] for place in self.placements)
        return Results([pickle.loads(a) if a else None for a in answers], self.traffic(), self.seconds)

    def traffic(self) -> dict[str, Traffic]:
        """Per link, what has crossed since the job began."""
        now = self._client.traffic()
        return {name: now[name].since(self._before[name]) for name in now}

    def kill(self, rank: int) -> None:
        """SIGKILL for a rank and what it started; the others are stopped, as for any failure."""
        self._signal(rank, signal.SIGKILL)

    def lose(self, rank: int) -> None:
        """SIGKILL for a rank and what it started; the others go on."""
        self._known(rank)
        self._client.ask("lose", rank)

    def add(self, rank: int) -> None:
        """Start a rank that is absent, lost, or has ended; nothing where it runs."""
        self._known(rank)
        if rank in self._statuses:
            del self._statuses[rank]
            self._last[rank].clear()
            self._client.ask("add", rank)

    def ask_to_end(self, rank: int) -> None:
        """SIGTERM for a rank; it may finish what it is doing first."""
        self._signal(rank, signal.SIGTERM)

    def pause(self, rank: int) -> None:
        """Freeze a rank: its host stays reachable, its program does nothing."""
        self._signal(rank, signal.SIGSTOP)

    def resume(self, rank: int) -> None:
        self._signal(rank, signal.SIGCONT)

    def stop(self) -> None:
        """SIGTERM for every rank, and SIGKILL for those that have not ended after a grace period."""
        self._client.ask("stop")
        if not self.watch(_STOP_SECONDS):
            raise LabError("ranks could not be stopped")

    def _known(self, rank: int) -> None:
        if not 0 <= rank < len(self.placements):
            raise UsageError(f"rank {rank}: the ranks are 0 to {len(self.placements) - 1}")

    def _signal(self, rank: int, number: int) -> None:
        self._known(rank)
        self._client.ask("signal", rank, int(number))

    def handle(self, event: Event) -> None:
        """An event from the supervisor: output of a rank, its end, or a dead link."""
        kind, rank, *rest = event
        if kind == "dead":
            self._dead_link = str(rank)
            return
        assert isinstance(rank, int)
        if kind == "output":
            self._record_output(rank, str(rest[0]), str(rest[1]))
            return
        if kind == "lost":
            self._statuses[rank], self._answers[rank] = int(str(rest[0])), b""
            return
        status, answer = rest
        assert isinstance(status, int) and isinstance(answer, bytes)
        self._statuses[rank], self._answers[rank] = status, answer
        if status != 0 and self._first_failure is None and not self._separate:
            self._first_failure = rank
        if self.done:
            self._ended = time.monotonic()

    def _record_output(self, rank: int, stream: str, text: str) -> None:
        target = sys.stdout if stream == "out" else sys.stderr
        for line in text.splitlines():
            self._last[rank].append(line)
            if self._echo:
                print(f"{self.placements[rank].label} | {line}", file=target, flush=True)
