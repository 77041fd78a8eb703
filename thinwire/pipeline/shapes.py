"""Batches whose rows are of another shape than those before: what every stage will get, found out once per shape.

torch looks at shapes in the first step and keeps them. Here the first stage announces the batch's shape, and along the
pipeline every stage computes, on zeros, what would come out of it, and tells the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from thinwire.pipeline.announce import Announcement
from thinwire.pipeline.framed_stage import FramedStage
from thinwire.pipeline.tensor_specs import Spec, outputs_of

Shape = tuple[int, ...]


class Shapes:
    """Of one rank's pipeline: by the shape of a row of the batch, the specs of every stage's inputs."""

    def __init__(self) -> None:
        self.known: dict[Shape, list[list[Spec]]] = {}
        self.last: Shape | None = None  # the row of the last batch whose shape was said

    def match(self, said: Announcement, stages: Sequence[FramedStage], place: Mapping[int, int], group: Any) -> None:
        """Tell this rank's stages what comes in this step, where it is not what torch has seen; `place`: stage → rank
        in the group. All ranks of the pipeline call it together."""
        for stage in stages:
            stage.rows_in = None
        if said.shape is None:
            return
        row, first = said.shape[1:], not any(stage.microbatches for stage in stages)
        if row != self.last and not first:
            if row not in self.known:
                self.known[row] = infer(said.shape, stages, place, group)
            for stage in stages:
                stage.rows_in = self.known[row][stage.stage_index]
        self.last = row


def infer(shape: Shape, stages: Sequence[FramedStage], place: Mapping[int, int], group: Any) -> list[list[Spec]]:
    """Per stage the specs of its inputs, found along the pipeline: each owner computes, all hear."""
    mine = {stage.stage_index: stage for stage in stages}
    found: list[list[Spec]] = [[]]
    if 0 in mine:
        known = next(iter(mine[0].root_inputs.values()), [(shape, torch.float32)])
        found = [[((1, *shape[1:]), dtype) for _, dtype in known]]
    for index in range(stages[0].num_stages - 1):
        told: list[Any] = [None]
        if index in mine:
            told = [outputs_of(mine[index].submod, found[index], mine[index].device)]
        dist.broadcast_object_list(told, group=group, group_src=place[index])
        found.append(told[0])
    return found
