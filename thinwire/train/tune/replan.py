"""A run under `[wire] auto` follows its network: where steps no longer take as long as planned, it plans anew.

All ranks see the same seconds, those that rank 0 tells in every vote, and so they plan anew after the same step. They
build everything again as a resumed run does, with the state that fits the new plan, and write a checkpoint: whoever
resumes from it, or from a later one, has the same bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

from torch import Tensor

from thinwire.config.presets import written_out
from thinwire.train.tune.auto import Decision

STEPS = 20  # that must pass before the plan is doubted
FACTOR = 1.25  # how many times as long, or as short, as planned their median is then
WARM = 0.9  # share of samples that have been seen, from which a step counts: plans are for those


class StepWatch:
    """Do steps take as long as planned?

    expected: seconds per step; None: there is no plan, and nothing is doubted.
    """

    def __init__(self, expected: float | None) -> None:
        self.expected = expected
        self.recent: deque[float] = deque(maxlen=STEPS)

    @property
    def typical(self) -> float:
        """The median of the last steps, in seconds."""
        return median(self.recent)

    def departs(self, seconds: float, hit_rate: float | None) -> bool:
        """Another step took so long; is the plan to be doubted?

        hit_rate: the share of its samples that had been seen before, None where that makes no difference.
        """
        if self.expected is None or seconds <= 0 or (hit_rate is not None and hit_rate < WARM):
            return False
        self.recent.append(seconds)
        if len(self.recent) < STEPS:
            return False
        return self.typical > FACTOR * self.expected or FACTOR * self.typical < self.expected


def is_same(old: Decision, new: Decision) -> bool:
    """Would both send the same?"""
    one, other = ((x.wire, x.sends, x.stages, x.ahead, x.microbatches) for x in (old, new))
    return one == other


def carried_over(state: Mapping[str, Tensor], old: Decision, new: Decision) -> dict[str, Tensor]:
    """The part of a run's state that can be used under the new plan.

    state: as in a checkpoint. Residuals of gradients always can. The rest of what a kind of traffic remembers can where
    nothing about that kind has changed: otherwise its samples start cold, and its factors and thresholds anew.
    """
    before, after = _sections(old), _sections(new)
    changed = {kind for kind in before if before[kind] != after[kind]}
    return {name: value for name, value in state.items() if not _belongs(name, changed)}


def _sections(decision: Decision) -> dict[str, Any]:
    """By kind of traffic, all that is decided of it."""
    wire = written_out(decision.wire)
    out: dict[str, Any] = {}
    for kind in ("forward", "backward"):
        sends = sorted(send for send in decision.sends if send[0] == kind)
        out[kind] = wire.get(kind), sends, decision.microbatches
    return out | {"gradient": (wire.get("gradient"), decision.stages), "embedding": wire.get("embedding")}


def _belongs(name: str, kinds: set[str]) -> bool:
    """Is that of the memory of one of these kinds of traffic, and no residual of a gradient?"""
    first, *rest = name.split("/")
    if first.startswith("rank-") and rest[0] == "pipeline" and len(rest) > 3:
        return rest[3].split()[0] in kinds  # rank-0/pipeline/rank0of4/stage0/forward 0→1/send/…
    kind = {"gradient": "gradient", "momentum": "gradient", "embedding": "embedding"}.get(first.partition("-")[0])
    return kind in kinds and rest[1] not in ("e", "step")  # gradient-0/rank0of2/e/…
