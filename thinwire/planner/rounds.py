"""Local steps beside per-step wires: bytes and seconds per token, and how seldom sites must average.

A replica of the plan is a site. A round of a local preset takes what its exchange takes between the sites; the inner
steps of its delay go on meanwhile. So a step takes

    computing + max(0, round − delay · computing) / every
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from thinwire.config.presets import LOCAL_PRESETS
from thinwire.planner import sizes
from thinwire.planner.config import Run
from thinwire.planner.model import units
from thinwire.planner.network import Cost
from thinwire.planner.predict import OFF, Curve, predict
from thinwire.planner.settings import read_wire

COMPUTING = 0.95  # the share of the time that local steps should leave for computing


@dataclass(frozen=True)
class Rounds:
    """A local preset on a plan.

    name, every, delay: the preset's. cost: of a round, per site. computing: seconds of an inner step without a network.
    """

    name: str
    every: int
    delay: int
    cost: Cost
    computing: float

    def round_seconds(self, run: Run) -> float:
        """Of one exchange between the sites."""
        return self.cost.seconds(run.network.across)

    def step_seconds(self, run: Run) -> float:
        """Of an inner step, the rounds' share included."""
        return self.computing + max(0.0, self.round_seconds(run) - self.delay * self.computing) / self.every

    def every_for(self, run: Run, step_seconds: float) -> int | None:
        """The least `every` with which a step is not longer than this; None: no step is so short."""
        left = max(0.0, self.round_seconds(run) - self.delay * self.computing)
        spare = step_seconds - self.computing
        if left == 0:
            return 1
        return math.ceil(left / spare) if spare > 0 else None

    def every_for_share(self, run: Run, share: float = COMPUTING) -> int:
        """The least `every` with which computing takes this share of the time."""
        least = self.every_for(run, self.computing / share)
        assert least is not None
        return least


def rounds_of(run: Run, name: str) -> Rounds:
    """The local preset of this name on a plan, whose replicas are the sites."""
    table: Mapping[str, Any] = LOCAL_PRESETS[name]
    importlib.import_module("thinwire.config.local").Local.of(name)  # a mistake is a UsageError
    given = table["wire"]
    setting = read_wire({"preset": given} if isinstance(given, str) else given, name).gradient
    shapes = [shape for stage in range(run.schedule.stages) for shape in run.model.stage(stage, run.schedule.stages)]
    if run.model.embedding_values():
        shapes.append((run.model.vocab, run.model.hidden))
    cost = sum((sizes.reduction(setting, unit, run.dp)[1] for unit in units(shapes)), Cost())
    return Rounds(name, table["every"], table.get("delay", 0), cost, predict(run.at(None, 0.0), OFF).makespan)


def tokens_per_step(run: Run) -> int:
    """Of all replicas."""
    return run.dp * run.schedule.microbatches * run.sequences * run.model.seq


def curves(run: Run, rates: list[float]) -> list[Curve]:
    """Step time of every local preset against rate."""
    found = [rounds_of(run, name) for name in LOCAL_PRESETS]
    return [Curve(one.name, tuple(one.step_seconds(run.at(rate)) for rate in rates), {}) for one in found]
