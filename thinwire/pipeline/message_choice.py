"""Which messages of a boundary are compressed: one predicate of (sending stage, micro-batch), equal at both ends.

always · epilogue: Optimus-CC's backward sends m ≥ M − (S − s) · critical: those the simulated step waits for
(planner/critical.py) · or the user's function. Neighbours compare its values before the first step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from thinwire.errors import UsageError
from thinwire.planner.critical import choose
from thinwire.planner.schedule import generate
from thinwire.planner.step import Hop, Send, Step, Traffic, Work

Predicate = Callable[[int, int], bool]
FORWARD_SECONDS, BACKWARD_SECONDS = 1.0, 2.0  # of one stage and micro-batch, in units of a forward
RATIO = 8.0  # what a compressed message is shorter by


@dataclass(frozen=True)
class Plan:
    """What "critical" is computed from: the schedule's name, and a plain message's time in units of a stage's forward.

    `sends` given (by thinwire plan, or the simulator on measured times) goes before that.
    """

    schedule: str | None = None
    hop: float = 0.2
    sends: frozenset[Send] | None = None

    def __str__(self) -> str:
        """Equal for equal plans in every process: a set's own order is not."""
        sends = None if self.sends is None else [f"{t} {s}/{m}" for t, s, m in sorted(self.sends)]
        return f"schedule {self.schedule}, hop {self.hop}, sends {sends}"


def predicate(
    when: str | Predicate, traffic: Traffic, plan: Plan, ranks: int, stages: int, microbatches: int
) -> Predicate:
    """(sending stage, micro-batch) → compress it?"""
    if callable(when):
        return when
    if when == "always":
        return lambda stage, microbatch: True
    if when == "epilogue":
        if traffic is not Traffic.BACKWARD:
            raise UsageError('when = "epilogue": is for backward messages; forward allows always, critical, a function')
        return lambda stage, microbatch: microbatch >= microbatches - (stages - stage)
    sends = plan.sends
    if sends is None:
        if plan.schedule is None:
            raise UsageError('when = "critical": name the schedule, Pipeline(stages, plan=Plan("1F1B"))')
        sends = critical_sends(plan.schedule, ranks, microbatches, stages // ranks, plan.hop)
    chosen = sends
    return lambda stage, microbatch: Send(traffic, stage, microbatch) in chosen


@cache
def critical_sends(schedule: str, ranks: int, microbatches: int, virtual: int, hop: float) -> frozenset[Send]:
    """The set from slack, for even stages and messages of `hop` forwards each."""
    listed = generate(schedule, ranks, microbatches, virtual)
    work = Work.even(listed.stages, FORWARD_SECONDS, BACKWARD_SECONDS)
    plain = Step(listed, work, lambda send: Hop(wire=hop))
    packed = Step(listed, work, lambda send: Hop(wire=hop / RATIO))
    return choose(plain, packed).sends
