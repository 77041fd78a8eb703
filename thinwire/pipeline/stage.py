"""CompressedStage: a stage of a compressed pipeline as users make it, with its own `step`.

with stage.step(ids=ids):                # one stage per rank; for several, Pipeline(stages).step(…)
    schedule.step(x, target=y)
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from thinwire.distributed.summary import Summary
from thinwire.pipeline.announce import Ids
from thinwire.pipeline.framed_stage import FramedStage
from thinwire.pipeline.pipeline import Pipeline


class CompressedStage(FramedStage):
    """torch's PipelineStage with compressed messages.

    submodule, stage_index, num_stages, device, and further positional or keyword arguments: PipelineStage's.
    wire: what its messages in both directions are: a Wire, a preset's name, or a `[wire]` table.
    seed: the run's, equal on all stages.
    dropout: what is done about dropout above a boundary with per-sample memory: "warn" of it, "seed" its masks by
    sample, or "ignore" it.
    """

    def step(self, ids: Ids | None = None, train: bool = True, **more: Any) -> AbstractContextManager[Pipeline]:
        """Bracket one `schedule.step` or `schedule.eval`; ids, train and the others are those of Pipeline.step."""
        pipeline = self.pipeline or Pipeline([self])
        return pipeline.step(ids, train, **more)

    def summary(self) -> Summary:
        """What compression has saved so far, over all stages of this rank; `print(stage.summary())` is one line."""
        return Summary(0, 0, 0) if self.pipeline is None else self.pipeline.summary()

    @property
    def pipeline(self) -> Pipeline | None:
        """The Pipeline that brackets this stage; None before the first step where no Pipeline was made of it."""
        return self.owner if isinstance(self.owner, Pipeline) else None
