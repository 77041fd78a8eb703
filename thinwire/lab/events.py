"""What happens to hosts in mid-run: killed, added, frozen, cut off, at given times or steps (`--events FILE`).

run = "out/run"      # of `thinwire train`; its steps are meant by `step`

[[events]]
at = "20s"           # after the start; or step = 40
do = "kill"          # kill, add, freeze, cut
host = "host2"
for = "5s"           # then it is undone: added again, thawed, connected. Left out: it is not

A host whose first event is "add" is not there at the start.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from thinwire.config.toml import read_toml
from thinwire.errors import UsageError
from thinwire.lab.job import Job
from thinwire.lab.network import Network
from thinwire.quantities import parse_time

UNDONE = {"kill": "add", "freeze": "thaw", "cut": "restore"}
KINDS = (*UNDONE, "add")
KEYS = ("at", "step", "do", "host", "for")
METRICS = "metrics.jsonl"  # of `thinwire train`
TAIL = 1 << 16  # bytes at its end that are read: a line is shorter


@dataclass(frozen=True)
class Event:
    """do: what happens. host: to whom. at: seconds after the start. step: of the run, instead. lasts: seconds until it
    is undone; None: it is not."""

    do: str
    host: str
    at: float | None = None
    step: int | None = None
    lasts: float | None = None


@dataclass
class Script:
    """Events, as they are still to come. run: the folder whose steps are counted."""

    events: list[Event]
    run: Path | None = None
    past: list[tuple[float, Event]] = field(default_factory=list)  # with the second at which each happened

    @property
    def cuts(self) -> bool:
        """Is a link to be cut?"""
        return any(event.do == "cut" for event in self.events)

    def absent(self, job_hosts: Sequence[str]) -> list[int]:
        """The ranks that are not there at the start; job_hosts: every rank's host."""
        first: dict[str, str] = {}
        for event in self.events:
            first.setdefault(event.host, event.do)
        return [rank for rank, host in enumerate(job_hosts) if first.get(host) == "add"]

    def tick(self, net: Network, job: Job, say: Callable[[str], None]) -> None:
        """Let happen what is due. say: called with a line per event."""
        step = last_step(self.run) if any(event.step is not None for event in self.events) else -1
        for event in list(self.events):
            due = job.seconds >= event.at if event.at is not None else event.step is not None and step >= event.step
            if due and not (event.do == "add" and self._is_dying(event.host, job)):
                self.events.remove(event)
                _happen(event, net, job)
                self.past.append((job.seconds, event))
                say(f"{job.seconds:.1f} s: {event.do} {event.host}")
                if event.lasts is not None:
                    undo = replace(event, do=UNDONE[event.do], at=job.seconds + event.lasts, step=None, lasts=None)
                    self.events.append(undo)

    def _is_dying(self, host: str, job: Job) -> bool:
        """Was it killed, and have not all its ranks ended yet? One that runs cannot be added."""
        last = [past.do for _, past in self.past if past.host == host and past.do in ("kill", "add")][-1:]
        running = any(job.statuses[place.rank] is None for place in job.placements if place.host == host)
        return last == ["kill"] and running


def _happen(event: Event, net: Network, job: Job) -> None:
    if event.do in ("cut", "restore"):
        (net.link_down if event.do == "cut" else net.link_up)(event.host)
        return
    act = {"kill": job.lose, "add": job.add, "freeze": job.pause, "thaw": job.resume}[event.do]
    for place in job.placements:
        if place.host == event.host:
            act(place.rank)


def last_step(run: Path | None) -> int:
    """Of the run in that folder; −1 before its first."""
    path = None if run is None else run / METRICS
    if path is None or not path.exists():
        return -1
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        lines = file.read().split(b"\n")[:-1]
    try:
        return int(json.loads(lines[-1])["step"]) if lines else -1
    except (ValueError, KeyError, TypeError):
        return -1


def load_events(path: str | Path, hosts: Sequence[str], run: str | None = None) -> Script:
    """The events of a file. hosts: those that there are. run: the folder whose steps count, where the file names none.
    UsageError where something in it is not allowed."""
    document = read_toml(path)
    run = document.pop("run", run)
    given = document.pop("events", [])
    if document or not isinstance(given, list) or not given:
        raise UsageError(f'{path}: allowed are run = "FOLDER" and tables [[events]], one at least')
    events = [_event(f"{path}: event {number}", table, hosts) for number, table in enumerate(given, 1)]
    if run is None and any(event.step is not None for event in events):
        raise UsageError(f'{path}: a step is given, but not the folder of the run whose steps count: run = "out/train"')
    return Script(events, None if run is None else Path(run))


def _event(where: str, table: Mapping[str, Any], hosts: Sequence[str]) -> Event:
    wrong = next((key for key in table if key not in KEYS), None)
    if wrong is not None:
        raise UsageError(f"{where}: {wrong}: no such key; allowed are {', '.join(KEYS)}")
    kind, host, step = table.get("do"), table.get("host"), table.get("step")
    if kind not in KINDS:
        raise UsageError(f"{where}: do = {kind!r}: allowed are {', '.join(KINDS)}")
    if not isinstance(host, str) or host not in hosts:
        raise UsageError(f"{where}: host = {host!r}: the hosts are {', '.join(hosts)}")
    if ("at" in table) == (step is not None) or (step is not None and type(step) is not int):
        raise UsageError(f'{where}: needs at = "20s" or step = 40, and not both')
    if kind == "add" and "for" in table:
        raise UsageError(f"{where}: for: is for what can be undone: {', '.join(UNDONE)}")
    lasts = parse_time(table["for"], "for") if "for" in table else None
    return Event(kind, host, parse_time(table["at"], "at") if "at" in table else None, step, lasts)
