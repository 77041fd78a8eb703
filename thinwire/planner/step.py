"""One training step as data: who computes what, what every message costs, which resources it needs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from thinwire.planner.actions import Action, Kind, Schedule


class Traffic(StrEnum):
    """The kinds of traffic, as the sections of `[wire]` are called."""

    FORWARD = "forward"
    BACKWARD = "backward"
    GRADIENT = "gradient"
    EMBEDDING = "embedding"


class Send(NamedTuple):
    """Names a message: what it carries, the stage it leaves, its micro-batch (of gradients: the unit)."""

    traffic: Traffic
    stage: int
    part: int

    def __str__(self) -> str:
        return f"{self.traffic} {self.stage}/{self.part}"


class Hop(NamedTuple):
    """What a message costs: `wire` seconds on the port, `latency` after it, a codec at either end."""

    nbytes: float = 0.0
    wire: float = 0.0
    latency: float = 0.0
    encode: float = 0.0
    decode: float = 0.0

    @property
    def seconds(self) -> float:
        return self.encode + self.wire + self.latency + self.decode


@dataclass(frozen=True)
class Work:
    """Seconds each stage needs for one micro-batch; a whole backward takes input + weight."""

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]

    @classmethod
    def even(cls, stages: int, forward: float, backward: float) -> Work:
        """Every stage alike, the backward's two halves equal."""
        half = (backward / 2,) * stages
        return cls((forward,) * stages, half, half)

    def seconds(self, action: Action) -> float:
        stage, kind = action.stage, action.kind
        if kind is Kind.F:
            return self.forward[stage]
        if kind is Kind.I:
            return self.backward_input[stage]
        if kind is Kind.W:
            return self.backward_weight[stage]
        return self.backward_input[stage] + self.backward_weight[stage]


@dataclass(frozen=True)
class Machine:
    """How ranks share cores; then `replicas` pipelines are simulated together, since they share them too."""

    cores: int = 0  # of one machine; 0: computation never waits for a core
    ranks: int = 0  # ranks of one machine; 0: all of them are on one
    replicas: int = 1


@dataclass(frozen=True)
class Step:
    """A training step that `simulate` executes."""

    schedule: Schedule
    work: Work
    hop: Callable[[Send], Hop]  # of pipeline messages; called at both ends, so it must be a pure function
    gradients: Sequence[Sequence[Hop]] = ()  # per stage, one Hop per unit; empty: no data parallelism
    embedding: Hop | None = None  # between first and last stage
    embedding_fused: bool = False  # waits for their last backward only, not for their reductions
    machine: Machine = Machine()
    slice: float = 0.0  # seconds a gradient may hold a port at a time; 0: a whole unit
    port: Callable[[Send], Hashable] | None = None  # what a message occupies; None: its rank's port
    closing: float = 0.0  # seconds after all of it: the ranks' vote on the step, and the optimiser's

    def occupies(self, send: Send) -> Hashable:
        return self.schedule.rank_of[send.stage] if self.port is None else self.port(send)
