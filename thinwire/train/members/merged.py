"""One metrics file of a run from those of its members: every step and evaluation once, of whoever has it first."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

from thinwire.train.metrics import METRICS, Event, EventReader, read_events
from thinwire.train.show import describe

APART = 5.0  # seconds between two lines of progress


class Merged:
    """Follows the members' files, and writes that of the run. Who came and went is told by those who were there: a
    member that has joined (`joined`) does not know who was there before.

    out: the folder of the run; every member has its own in it. names: of these folders. resume: the file goes on.
    """

    def __init__(self, out: Path, names: Sequence[str], resume: bool) -> None:
        before = read_events(out / METRICS) if resume else []
        self.readers = [EventReader(out / name / METRICS) for name in names]
        self.read = [len(reader.poll()) for reader in self.readers]  # what is there already is of an earlier launch
        self.seen = {key(event) for event in before}
        self.ended = False
        self.shown = 0.0
        self.file = (out / METRICS).open("a" if resume else "w", buffering=1)

    def __enter__(self) -> Merged:
        return self

    def __exit__(self, *about: object) -> None:
        self.file.close()

    def follow(self, say: Callable[[str], None]) -> None:
        """Take over what is new. say: called with a line of progress now and then, and who came and went."""
        for number, reader in enumerate(self.readers):
            events = reader.poll()
            begin = self.read[number] if len(events) >= self.read[number] else 0  # it was written anew
            self.read[number] = len(events)
            for event in events[begin:]:
                if not event.get("joined") and key(event) not in self.seen:
                    self.seen.add(key(event))
                    self.file.write(json.dumps(event) + "\n")
                    self._show(event, say)

    def _show(self, event: Event, say: Callable[[str], None]) -> None:
        self.ended |= event["kind"] == "end"
        if event["kind"] == "member":
            say(f"step {event['step']}: {event['text']}")
        elif event["kind"] == "eval" or (event["kind"] == "step" and time.monotonic() - self.shown > APART):
            self.shown = time.monotonic()
            say(f"step {event['step']}: {describe(event)}")


def key(event: Event) -> Hashable:
    """What members write alike has the same one."""
    if event["kind"] == "member":
        return "member", event["step"], event["text"]
    return (event["kind"],) if event["kind"] == "run" else (event["kind"], event["step"])
