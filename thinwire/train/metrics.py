"""What a run records: one JSON line per event (metrics.jsonl), and the same to its loggers."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thinwire.train.loggers.events import open_loggers, send

METRICS = "metrics.jsonl"
Event = dict[str, Any]


class Metrics:
    """The metrics of the run in `folder`, written by one rank.

    resumed_at: the step from which a run goes on; later lines belong to steps that are done again, and are dropped.
    None: a new run, and all lines are dropped.
    loggers: where they go besides (loggers.py); None: TensorBoard, where it is installed.
    """

    def __init__(self, folder: str | Path, resumed_at: int | None = None, loggers: Sequence[str] | None = None) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / METRICS
        before = EventReader(self.path)
        kept = [] if resumed_at is None else [e for e in before.finish() if e["step"] <= resumed_at]
        self.unreadable = before.unreadable  # lines of the run before
        anew = self.path.with_suffix(".part")
        anew.write_text("".join(json.dumps(event) + "\n" for event in kept))
        os.replace(anew, self.path)
        self.file = self.path.open("a", buffering=1)
        self.loggers = open_loggers(loggers, self.folder, resumed_at)

    def write(self, kind: str, step: int, **values: Any) -> None:
        """One event, to the file and to the loggers."""
        self.file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        send(self.loggers, kind, step, values)

    def close(self) -> None:
        self.file.close()
        for logger in self.loggers:
            logger.close()


class EventReader:
    """The events of a metrics file, read as the file grows.

    events: all so far. unreadable: numbers of whole lines that hold no event; they are left out.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._restart(None)

    def poll(self) -> list[Event]:
        """Read what is new; all events so far. A file that was written anew is read from its start."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return self.events
        with file:
            about = os.fstat(file.fileno())
            if about.st_ino != self._inode or about.st_size < self._offset:
                self._restart(about.st_ino)
            file.seek(self._offset)
            *lines, self._rest = file.read().split(b"\n")
        for line in lines:
            self._offset += len(line) + 1
            self._lines += 1
            event = _event(line)
            if event is not None:
                self.events.append(event)
            elif line.strip():
                self.unreadable.append(self._lines)
        return self.events

    @property
    def cut(self) -> bool:
        """Does the last line lack its end so far?"""
        return bool(self._rest.strip())

    def finish(self) -> list[Event]:
        """All events of a file that does not grow any more: the last line may lack its end."""
        self.poll()
        last = _event(self._rest)
        if last is not None:
            return [*self.events, last]
        if self._rest.strip():
            self.unreadable.append(self._lines + 1)
        return self.events

    def _restart(self, inode: int | None) -> None:
        self.events: list[Event] = []
        self.unreadable: list[int] = []
        self._inode = inode
        self._offset = 0
        self._lines = 0
        self._rest = b""


def _event(line: bytes) -> Event | None:
    try:
        event = json.loads(line.decode())
    except (ValueError, RecursionError):  # no JSON, or no text; brackets in brackets without end
        return None
    whole = isinstance(event, dict) and isinstance(event.get("kind"), str) and isinstance(event.get("step"), int)
    return event if whole else None


def say_unreadable(lines: Sequence[int]) -> str:
    """In words, for these numbers of lines."""
    some = ", ".join(map(str, lines[:9])) + (", …" if len(lines) > 9 else "")
    return f"{'line' if len(lines) == 1 else 'lines'} {some} cannot be read as events, and are left out"


def read_events(path: str | Path) -> list[Event]:
    """All events of a run; lines that hold none are left out."""
    return EventReader(path).finish()
