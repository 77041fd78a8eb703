"""Runs of `thinwire train` as the report reads them: a folder with run.toml and metrics.jsonl, made into series.

A file that is cut off, or lacks a key, gives what it has and a note; a folder without metrics is a mistake.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from thinwire.errors import UsageError
from thinwire.report.markup import plain
from thinwire.train.metrics import METRICS, EventReader, say_unreadable

CHANNELS = ("forward", "backward", "gradient", "embedding", "site")  # the last: between sites, where there are several
LARGEST = sys.float_info.max
Event = Mapping[str, Any]
Point = tuple[float, float]


@dataclass(frozen=True)
class Run:
    """One run. `name` tells it from the others of the report; `notes` say what its files lack."""

    folder: Path
    name: str
    config: str  # run.toml as given, "" where it is missing
    about: Event  # the "run" event, empty where it is missing
    steps: tuple[Event, ...]
    evals: tuple[Event, ...]
    end: Event | None  # the "end" event; None: the run has not ended
    told: tuple[Event, ...] = ()  # all others but "sites": notes, decisions, and kinds that this version does not know
    notes: tuple[str, ...] = ()

    @property
    def ended(self) -> bool:
        """Has it come to its last step?"""
        return self.end is not None

    @property
    def last_step(self) -> int:
        """The number of the last step that has an event."""
        return max((int(e["step"]) for e in (*self.steps, *self.evals)), default=0)

    @property
    def seconds(self) -> float | None:
        """Training time to the last event."""
        times = [number(e, "seconds") for e in (*self.steps[-1:], *self.evals[-1:])]
        return max((t for t in times if t is not None), default=None)

    @cached_property
    def sent(self) -> dict[str, float]:
        """Bytes by channel, all ranks, at the end."""
        last = self.steps[-1] if self.steps else {}
        return {channel: number(last, f"{channel}_bytes") or 0.0 for channel in CHANNELS}

    @property
    def total(self) -> float:
        """Bytes of all channels and ranks, at the end."""
        return sum(self.sent.values())

    @property
    def raw(self) -> float | None:
        """What fp32 would have sent."""
        return number(self.steps[-1], "raw_bytes") if self.steps else None

    @property
    def memory(self) -> float | None:
        """The most bytes that a rank has taken; None: not recorded, as by earlier versions."""
        ranks = self.end.get("memory") if self.end else None
        known = [number({"rank": one}, "rank") for one in ranks] if isinstance(ranks, list) else []
        return max((one for one in known if one is not None), default=None)

    @property
    def held_out(self) -> float | None:
        """At the end of the run."""
        curve = self.curve("seconds")
        return curve[-1][1] if curve else None

    def score(self, name: str) -> float | None:
        """A classifier's "accuracy" or "matthews" at the end of the run; None where it has none."""
        return number(self.evals[-1], name) if self.evals else None

    def curve(self, across: str) -> list[Point]:
        """Held-out loss against `across`: "seconds", "bytes" or "step"."""
        return pairs(self.evals, across, "held_out")

    def series(self, *keys: str) -> list[Point]:
        """A number of the step events (a path of keys) against the step."""
        return pairs(self.steps, "step", *keys)

    def trained(self, across: str) -> list[Point]:
        """Training loss against `across`: "seconds" of training, or "bytes" sent by all ranks."""
        if across == "seconds":
            return pairs(self.steps, "seconds", "loss")
        sent = [
            (sum(number(e, f"{channel}_bytes") or 0.0 for channel in CHANNELS), number(e, "loss")) for e in self.steps
        ]
        return [(x, y) for x, y in sent if y is not None]

    @cached_property
    def tokens(self) -> list[Point]:
        """Tokens per second against the step."""
        found = [(e["step"], number(e, "tokens"), number(e, "step_seconds")) for e in self.steps]
        return [(float(step), many / seconds) for step, many, seconds in found if many and seconds]

    @cached_property
    def document(self) -> dict[str, Any]:
        """run.toml parsed; UsageError where it cannot be."""
        if not self.config:
            raise UsageError("the folder has no run.toml")
        try:
            return tomllib.loads(self.config)
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"run.toml is not TOML: {error}") from None


def number(event: Event, *keys: str) -> float | None:
    """The finite number that `event` has under the path of `keys`, None for anything else."""
    value: Any = event
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not -LARGEST <= value <= LARGEST:
        return None
    return float(value)


def _bytes(event: Event) -> float:
    """Sent by all channels and ranks until that step."""
    return sum(number(event, f"{channel}_bytes") or 0.0 for channel in CHANNELS)


def pairs(events: Sequence[Event], across: str, *keys: str) -> list[Point]:
    """(x, y) of the events that have both: x under the key `across`, y under the path of `keys`."""
    both = ((number(e, across), number(e, *keys)) for e in events)
    return [(x, y) for x, y in both if x is not None and y is not None]


def reached(curve: Sequence[Point], loss: float) -> float | None:
    """Where `curve` first is at `loss` or below, on the straight line between two evaluations; None: nowhere."""
    before: Point | None = None
    for x, y in curve:
        if y <= loss:
            if before is None:
                return x
            return before[0] + (x - before[0]) * (before[1] - loss) / (before[1] - y)
        before = x, y
    return None


def read_runs(folders: Sequence[str | Path]) -> list[Run]:
    """Every one of `folders` as a run; names that are not unique get the folder's."""
    return unique([read_run(place) for place in places(folders)])


def places(folders: Sequence[str | Path]) -> list[Path]:
    """`folders` as paths; UsageError where one is given twice."""
    found = [Path(folder) for folder in folders]
    for at, place in enumerate(found):
        if place.resolve() in [p.resolve() for p in found[:at]]:
            raise UsageError(f"{place}: given twice")
    return found


def unique(runs: Sequence[Run]) -> list[Run]:
    """The same runs; names that several have get the folder's."""
    names, folders = [run.name for run in runs], [run.folder for run in runs]
    return [replace(r, name=_unique(r, folders)) if names.count(r.name) > 1 else r for r in runs]


def _unique(run: Run, places: Sequence[Path]) -> str:
    """The run's name and as many of its folder's last parts as tell it from the others."""
    mine = run.folder.resolve().parts
    for count in range(1, len(mine) + 1):
        if sum(p.resolve().parts[-count:] == mine[-count:] for p in places) == 1:
            break
    return f"{run.name} ({'/'.join(mine[-count:])})"


def read_run(folder: Path) -> Run:
    """The run in `folder`; UsageError where there is none, or none that has begun."""
    path = folder / METRICS
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder; give the folder of a run, as `thinwire train` wrote it")
    if not path.is_file():
        raise UsageError(f"{folder} is no run: it has no {METRICS}; give the folder that `thinwire train` wrote")
    events, notes = _events(path)
    run = make_run(folder, events)
    if not run.steps and not run.evals:
        raise UsageError(f"{path} has no step and no evaluation yet: there is nothing to report")
    if not run.ended:
        notes.append(f"the run has not ended: its last step so far is {run.last_step}")
    return replace(run, notes=(*notes, *lacks(run)))


def make_run(folder: Path, events: Sequence[Event]) -> Run:
    """A run of these events of its metrics file, and of the run.toml in `folder`."""
    known = ("run", "step", "eval", "end", "sites")
    kinds = {kind: tuple(e for e in events if e.get("kind") == kind) for kind in known}
    about = kinds["run"][0] if kinds["run"] else {}
    name = plain(str(about.get("name") or folder.resolve().name))
    told = tuple(e for e in events if e.get("kind") not in kinds)
    return Run(folder, name, _config(folder), about, kinds["step"], kinds["eval"], next(iter(kinds["end"]), None), told)


def _events(path: Path) -> tuple[Sequence[Event], list[str]]:
    """The events of a run, and a note where the file holds lines that are none."""
    reader = EventReader(path)
    try:
        events = reader.finish()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    if reader.unreadable and not events:
        raise UsageError(f"{path} holds no event: it is no metrics file of `thinwire train`")
    return events, [f"{METRICS}: {say_unreadable(reader.unreadable)}"] if reader.unreadable else []


def _config(folder: Path) -> str:
    path = folder / "run.toml"
    try:
        return path.read_text() if path.is_file() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None


def lacks(run: Run) -> list[str]:
    """What a reader of the run's numbers should know."""
    notes = []
    if not run.config:
        notes.append("the folder has no run.toml")
    if not run.about:
        notes.append(f"{METRICS} has no line about the run (mesh, wire, parameters)")
    if run.held_out is None:
        notes.append("no held-out loss was measured, so it cannot be compared by time to a loss")
    losses = [e for e in run.steps if number(e, "loss") is None]
    if losses:
        notes.append(f"{len(losses)} steps have no finite loss, the first is {losses[0]['step']}")
    skips = number(run.steps[-1], "skips") if run.steps else None
    if skips:
        elastic = isinstance(run.steps[-1].get("members"), list)
        why = "did not count (a member was lost, or values were not finite)" if elastic else "were rolled back"
        notes.append(f"{skips:.0f} steps {why}" + ("" if elastic else " (non-finite values)"))
    if any(number(e, "hit_rate") is not None and "warm" not in e for e in run.steps):
        notes.append("an earlier version recorded the share of remembered samples since the start, not per step")
    return notes
