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
    """This rank's state.

    stages: this rank's. steps: done so far. scale: the loss scale that residuals are in. stores: with the mirrors of
    samples.
    """
    out = {"step": torch.tensor(steps), "scale": torch.tensor(scale, dtype=torch.float64)}
    out |= {f"stage{stage.stage_index}/trained": torch.tensor(stage.trained) for stage in stages}
    for prefix, lane in _lanes(stages):
        out |= {f"{prefix}{name}": value for name, value in lane.state_dict(stores).items()}
    rank = _rank_prefix()
    return {f"{rank}{name}": value for name, value in out.items()}


def own_part(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's part of a `state` of several ranks, or the only part there is; without the rank in its names."""
    ranks = {name.partition("/")[0] + "/" for name in state}
    rank = next(iter(ranks)) if len(ranks) == 1 else _rank_prefix()
    own = {name.removeprefix(rank): value for name, value in state.items() if name.startswith(rank)}
    if "step" not in own:
        known = ", ".join(sorted(name[:-1] for name in ranks)) or "no rank"
        raise UsageError(f"the state has no part for {rank[:-1]}, only for {known}")
    return own


def restore(stages: Sequence[PlannedStage], own: Mapping[str, Tensor]) -> tuple[int, float]:
    """Load `own_part(state)` into the lanes of `stages`, after the handshake; returns (steps, loss scale). What is
    missing starts empty; in older states every step counts as a training step."""
    for stage in stages:
        stage.trained = int(own.get(f"stage{stage.stage_index}/trained", own["step"]))
    for prefix, lane in _lanes(stages):
        lane.load_state_dict({n.removeprefix(prefix): v for n, v in own.items() if n.startswith(prefix)})
    return int(own["step"]), float(own["scale"])


def _lanes(stages: Sequence[PlannedStage]) -> Iterator[tuple[str, Lane]]:
    for stage in stages:
        for lane in stage.lanes.all():
            yield f"stage{stage.stage_index}/{lane.name}/{lane.end}/", lane


def _rank_prefix() -> str:
    size, rank = world(None)
    return f"rank{rank}of{size}/"
