"""Simulate a training step: how long it takes, what it waits for, and how late each message may be.

The model is in build.py (what depends on what) and graph.py (who gets a shared resource, what slack is).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from thinwire.errors import UsageError
from thinwire.planner import graph
from thinwire.planner.build import COMPUTE, WIRE, About, Builder
from thinwire.planner.step import Hop, Send, Step, Traffic


class Message(NamedTuple):
    """A simulated message: what it is and costs, when it starts and how late it could be, in seconds."""

    send: Send
    hop: Hop
    start: float
    slack: float
    critical: bool  # no slack: any growth lengthens the step


class Span(NamedTuple):
    """A task of replica 0 on the timeline."""

    about: About
    start: float
    finish: float
    slack: float
    on_path: bool


@dataclass(frozen=True)
class Result:
    """A simulated step. Its figures are of replica 0; all replicas have the same."""

    step: Step
    timing: graph.Timing = field(repr=False)
    about: list[About] = field(repr=False)
    hops: dict[Send, tuple[int, int, Hop]] = field(repr=False)

    @property
    def makespan(self) -> float:
        return self.timing.makespan + self.step.closing

    @cached_property
    def path(self) -> list[int]:
        """One critical path, as task numbers."""
        return self.timing.path()

    @cached_property
    def messages(self) -> dict[Send, Message]:
        """Every message in the order it was made; slack below a billionth of the step is rounding."""
        none = 1e-9 * self.makespan
        start, slack = self.timing.start, self.timing.slack
        return {
            send: Message(send, hop, start[first], max(0.0, slack[last]), slack[last] <= none)
            for send, (first, last, hop) in self.hops.items()
        }

    def critical(self, traffic: Traffic) -> set[Send]:
        """The messages of that kind without slack."""
        return {s for s, m in self.messages.items() if m.critical and s.traffic is traffic}

    def spans(self) -> list[Span]:
        """Replica 0's tasks; slices of one exchange that follow each other at once are one span."""
        on_path, t = set(self.path), self.timing
        spans: list[Span] = []
        for i, about in enumerate(self.about):
            if about.replica:
                continue
            span = Span(about, t.start[i], t.finish[i], max(0.0, t.slack[i]), i in on_path)
            if spans and spans[-1].about == about and spans[-1][2] == span.start and spans[-1].on_path is span.on_path:
                span = span._replace(start=spans.pop().start)
            spans.append(span)
        return spans

    @cached_property
    def spent(self) -> dict[str, float]:
        """The makespan by what the critical path spends it on: compute, codec, wire (latency and closing included)."""
        seconds = {COMPUTE: 0.0, "codec": 0.0, WIRE: self.step.closing}
        starts = [*(self.timing.start[i] for i in self.path), self.timing.makespan]
        for at, task in enumerate(self.path):
            what = self.about[task].what
            seconds[what if what in seconds else "codec"] += starts[at + 1] - starts[at]
        return seconds

    @property
    def wire_share(self) -> float:
        return self.spent[WIRE] / self.makespan if self.makespan else 0.0

    @property
    def bubble(self) -> float:
        """The part of the ranks' time in which they do not compute."""
        schedule, work = self.step.schedule, self.step.work
        ranks = len(schedule.ranks)
        busy = sum(work.seconds(a) for r in range(ranks) for a in schedule.compute(r))
        return 1 - busy / (ranks * self.makespan) if self.makespan else 0.0

    @property
    def sent(self) -> dict[Traffic, float]:
        """Bytes that leave one pipeline in a step, by kind."""
        total = dict.fromkeys(Traffic, 0.0)
        for send, (_, _, hop) in self.hops.items():
            total[send.traffic] += hop.nbytes
        return total


def simulate(step: Step) -> Result:
    """Execute the step. A schedule whose actions wait for each other is refused, naming one of them."""
    built = Builder(step).build()
    try:
        timing = graph.simulate(built.graph)
    except graph.StuckError as stuck:
        waiting = [str(built.about[i].subject) for i in stuck.tasks[:3]]
        raise UsageError(f"schedule {step.schedule.name} never finishes: {', '.join(waiting)} … wait") from None
    return Result(step, timing, built.about, built.messages)
