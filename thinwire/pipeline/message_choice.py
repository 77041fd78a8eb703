"""What both ends know of a message, and which are compressed: one predicate of (sending stage, micro-batch).

always · epilogue: Optimus-CC's backward sends m ≥ M − (S − s) · critical: those the simulated step waits for
(planner/critical.py) · or the user's function. Neighbouring stages compare its values before the first step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

from torch import Tensor

from thinwire.errors import UsageError
from thinwire.memory.token_means import following
from thinwire.planner.critical import choose
from thinwire.planner.schedule import generate
from thinwire.planner.step import Hop, Send, Step, Traffic, Work

TENSORS = 16  # of one message, at most, that have tags


@dataclass(frozen=True)
class Message:
    """What both ends of a boundary know of a message before it is sent.

    microbatch: its number in the step.
    ids: the samples in it, one per row; None where no ids were given.
    coded: whether `when` chose it for compression.
    first_tag: the tag of its first tensor, the others' follow; 0: messages match by order.
    tokens: of its rows, where a link has token means; of gradients the ones that come next (`following`).
    """

    microbatch: int
    ids: tuple[int, ...] | None
    coded: bool
    first_tag: int = 0
    tokens: Tensor | None = field(default=None, compare=False)

    def tag(self, index: int) -> int:
        """The tag of tensor number `index`; 0: it matches by order."""
        return self.first_tag + index if self.first_tag and index < TENSORS else 0

    def told(self, tokens: Tensor | None, direction: str) -> Message:
        """With the tokens of its rows, as `direction`'s means are kept by; None: as it is."""
        if tokens is None:
            return self
        return replace(self, tokens=following(tokens) if direction == "backward" else tokens)


Predicate = Callable[[int, int], bool]
FORWARD_SECONDS = 1.0  # of one stage and micro-batch: the unit of time here
BACKWARD_SECONDS = 2.0
RATIO = 8.0  # a plain message's size over a compressed one's


@dataclass(frozen=True)
class Plan:
    """What when = "critical" is computed from.

    schedule: its name (planner/schedule.py); needed unless `sends` is given.
    hop: the time of a plain message, in units of a stage's forward.
    sends: the critical messages themselves, as `thinwire plan` or the simulator on measured times finds them.
    """

    schedule: str | None = None
    hop: float = 0.2
    sends: frozenset[Send] | None = None

    def __str__(self) -> str:
        """Equal for equal plans in every process: so the set is sorted."""
        sends = None if self.sends is None else [f"{t} {s}/{m}" for t, s, m in sorted(self.sends)]
        return f"schedule {self.schedule}, hop {self.hop}, sends {sends}"


@dataclass(frozen=True)
class MessageChoice:
    """Which messages of one direction are compressed, for any number of micro-batches.

    when: "always", "epilogue", "critical", or the user's function (sending stage, micro-batch) → bool.
    traffic: the direction.
    plan: for "critical".
    ranks: of the pipeline.
    stages: of the pipeline.
    """

    when: str | Predicate
    traffic: Traffic
    plan: Plan
    ranks: int
    stages: int

    def predicate(self, microbatches: int) -> Predicate:
        """(sending stage, micro-batch) → compress it?, for steps of that many micro-batches."""
        return predicate(self.when, self.traffic, self.plan, self.ranks, self.stages, microbatches)


def predicate(
    when: str | Predicate, traffic: Traffic, plan: Plan, ranks: int, stages: int, microbatches: int
) -> Predicate:
    """(sending stage, micro-batch) → compress it? Arguments as of MessageChoice."""
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
    """The critical messages of a schedule, by their slack, for equal stages.

    schedule: its name. ranks: of the pipeline. microbatches: per step. virtual: stages per rank. hop: as in Plan.
    """
    listed = generate(schedule, ranks, microbatches, virtual)
    work = Work.even(listed.stages, FORWARD_SECONDS, BACKWARD_SECONDS)
    plain = Step(listed, work, lambda send: Hop(wire=hop))
    packed = Step(listed, work, lambda send: Hop(wire=hop / RATIO))
    return choose(plain, packed).sends
