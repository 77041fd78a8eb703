"""A pipeline's state in a checkpoint: every lane's, under the names of its rank, stage, boundary and end.

rank0of4/stage0/forward 0→1/send/…          torch.distributed.checkpoint keeps one of equal names, and replicas hold
                                            the same stages: hence the rank
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from thinwire.collectives.groups import world
from thinwire.errors import UsageError
from thinwire.pipeline.lane import Lane
from thinwire.pipeline.planned_stage import PlannedStage


def state_of(stages: Sequence[PlannedStage], steps: int, scale: float, stores: bool) -> dict[str, Tensor]:
    """This rank's: residuals, factors, counters, and with `stores` what is remembered of samples."""
    out = {"step": torch.tensor(steps), "scale": torch.tensor(scale, dtype=torch.float64)}
    for prefix, lane in _places(stages):
        out |= {f"{prefix}{name}": value for name, value in lane.state_dict(stores).items()}
    mark = _mark()
    return {f"{mark}{name}": value for name, value in out.items()}


def own_part(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's part of several, or whichever is the only one, without the rank in its names."""
    marks = {name.partition("/")[0] + "/" for name in state}
    mark = next(iter(marks)) if len(marks) == 1 else _mark()
    mine = {name.removeprefix(mark): value for name, value in state.items() if name.startswith(mark)}
    if "step" not in mine:
        known = ", ".join(sorted(m[:-1] for m in marks)) or "nobody"
        raise UsageError(f"the state has no part for {mark[:-1]}, only for {known}")
    return mine


def restore(stages: Sequence[PlannedStage], mine: Mapping[str, Tensor]) -> tuple[int, float]:
    """Into the lanes of the stages, which have met; (steps, loss scale). What is missing starts empty."""
    for prefix, lane in _places(stages):
        lane.load_state_dict({n.removeprefix(prefix): v for n, v in mine.items() if n.startswith(prefix)})
    return int(mine["step"]), float(mine["scale"])


def _places(stages: Sequence[PlannedStage]) -> Iterator[tuple[str, Lane]]:
    for stage in stages:
        for lane in stage.lanes.all():
            yield f"stage{stage.stage_index}/{lane.name}/{lane.end}/", lane


def _mark() -> str:
    size, rank = world(None)
    return f"rank{rank}of{size}/"
