"""Runs as they grow: what is new in each metrics file, and in which state each run is."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from thinwire.errors import UsageError
from thinwire.report import markup
from thinwire.report.runs import Event, Run, lacks, make_run, number, unique
from thinwire.train.metrics import METRICS, EventReader, say_unreadable

MOST = 2000  # steps of a run that are drawn; of more, every second, third, …
SILENT = 30.0  # seconds without a new line, and
MANY = 10  # times as long as a step, after which a run counts as silent


@dataclass(frozen=True)
class State:
    """A run at this moment. `word`: what it does. `warnings`: what a reader should know. `run`: empty before its first
    event. `version`: changes with the run's files."""

    run: Run
    word: str
    warnings: tuple[str, ...]
    version: tuple[int, ...]

    @property
    def begun(self) -> bool:
        """Has it a step or an evaluation?"""
        return bool(self.run.steps or self.run.evals)


class Follower:
    """Reads what the run in `folder` adds to its metrics. `clock`: the time in seconds since 1970."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self.clock = clock
        self.version: tuple[int, ...] = ()
        self._restart()

    def look(self) -> State:
        """The run's state now."""
        path = self.folder / METRICS
        try:
            about = path.stat()
            if (about.st_ino, about.st_size, about.st_mtime_ns) != self.version:
                self.run = self._read()
                self.version = (about.st_ino, about.st_size, about.st_mtime_ns)
        except FileNotFoundError:
            self._restart()
            return self._state("○ not begun", [f"not begun: {self.folder} has no {METRICS} yet"])
        except (OSError, UsageError) as error:
            return self._state("✕ cannot be read", [str(error)])
        age = self.clock() - about.st_mtime
        return self._state(self._word(age), self._warnings(age))

    def _restart(self) -> None:
        self.reader = EventReader(self.folder / METRICS)
        self.run = make_run(self.folder, ())
        self.version = ()

    def _read(self) -> Run:
        run = make_run(self.folder, self.reader.poll())
        return replace(run, steps=thinned(run.steps))

    def _state(self, word: str, warnings: Sequence[str]) -> State:
        return State(self.run, word, tuple(warnings), self.version)

    def _word(self, age: float) -> str:
        if self.run.ended:
            return "■ ended"
        if age > self._patience():
            return "▲ silent"
        return "● running" if self.run.steps else "○ starting"

    def _patience(self) -> float:
        """Seconds without a new line that are nothing to speak of."""
        recent = [seconds for e in self.run.steps[-20:] if (seconds := number(e, "step_seconds")) is not None]
        return max(SILENT, MANY * median(recent)) if recent else SILENT

    def _warnings(self, age: float) -> list[str]:
        found = []
        if not self.run.ended and age > self._patience():
            found.append(f"no new line in {METRICS} for {markup.time(age)}: it was stopped, or waits for something")
        if self.reader.unreadable:
            found.append(f"{METRICS}: {say_unreadable(self.reader.unreadable)}")
        if self.reader.cut and age > SILENT:
            found.append(f"{METRICS}: the last line is cut off")
        if self.run.steps or self.run.evals:
            found += lacks(self.run)
        return found


def thinned(steps: Sequence[Event]) -> tuple[Event, ...]:
    """At most MOST of the steps, evenly, and the last one."""
    apart = -(-len(steps) // MOST)
    return tuple(steps) if apart <= 1 else (*steps[:-1:apart], steps[-1])


def look_at(followers: Sequence[Follower]) -> list[State]:
    """Every run's state now; names that several have get the folder's."""
    states = [follower.look() for follower in followers]
    return [replace(state, run=run) for state, run in zip(states, unique([state.run for state in states]))]


def told_by(states: Sequence[State]) -> list[tuple[str, Event]]:
    """(run, event) of all that is no step, no evaluation and no frame of a run: notes, decisions, and what later
    versions add; by run, and as recorded."""
    return [(state.run.name, event) for state in states for event in state.run.told]


def begin(folders: Sequence[Path]) -> list[Follower]:
    """A follower for each of `folders`; UsageError where one is no folder."""
    for folder in folders:
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{folder} is no folder; give the folder of a run, as `thinwire train` writes it")
        if folder.exists() and not os.access(folder, os.R_OK | os.X_OK):
            raise UsageError(f"{folder}: not allowed to read it")
    return [Follower(folder) for folder in folders]
