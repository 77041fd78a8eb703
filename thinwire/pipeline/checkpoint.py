"""A pipeline's state in a checkpoint: every lane's, under the names of its rank, stage, boundary and end.

rank0of4/stage0/forward 0→1/send/…          torch.distributed.checkpoint keeps one of equal names, and replicas hold
                                            the same stages: hence the rank
…/send/revision/link.codec/Transform        the revision of each codec of the link
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from thinwire.collectives.groups import world
from thinwire.distributed.config_check import revisions
from thinwire.errors import UsageError
from thinwire.pipeline.lane import Lane
from thinwire.pipeline.planned_stage import PlannedStage

KIND = "revision/"


def state_of(stages: Sequence[PlannedStage], steps: int, scale: float, stores: bool) -> dict[str, Tensor]:
    """This rank's state.

    stages: this rank's. steps: done so far. scale: the loss scale that residuals are in. stores: with the mirrors of
    samples.
    """
    out = {"step": torch.tensor(steps), "scale": torch.tensor(scale, dtype=torch.float64)}
    out |= {f"stage{stage.stage_index}/trained": torch.tensor(stage.trained) for stage in stages}
    for prefix, lane in _lanes(stages):
        out |= {f"{prefix}{name}": value for name, value in lane.state_dict(stores).items()}
        out |= {f"{prefix}{KIND}{codec}": torch.tensor(n) for codec, n in revisions(lane.link, "link").items()}
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
    parts = [(lane, {n.removeprefix(p): v for n, v in own.items() if n.startswith(p)}) for p, lane in _lanes(stages)]
    for lane, part in parts:
        _check_revisions(lane, part)
    for stage in stages:
        stage.trained = int(own.get(f"stage{stage.stage_index}/trained", own["step"]))
    for lane, part in parts:
        lane.load_state_dict(part)
    return int(own["step"]), float(own["scale"])


def _check_revisions(lane: Lane, part: Mapping[str, Tensor]) -> None:
    """UsageError where a codec of the lane meant something else when its `part` of a state was written. One that says
    of no codec is older than revisions: all of its codecs were of the first. Another codec's has nothing to compare."""
    known = {name.removeprefix(KIND): int(value) for name, value in part.items() if name.startswith(KIND)}
    for codec, mine in revisions(lane.link, "link").items():
        found = known.get(codec, mine if known or not part else 1)
        if found != mine:
            raise UsageError(
                f"{lane.name}: the state is of {codec.rpartition('/')[2]}, revision {found}, and this thinwire has "
                f"revision {mine}, which means other values: go on with the thinwire that wrote it, or begin anew"
            )


def _lanes(stages: Sequence[PlannedStage]) -> Iterator[tuple[str, Lane]]:
    for stage in stages:
        for lane in stage.lanes.all():
            yield f"stage{stage.stage_index}/{lane.name}/{lane.end}/", lane


def _rank_prefix() -> str:
    size, rank = world(None)
    return f"rank{rank}of{size}/"
