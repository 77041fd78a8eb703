"""CompressedStage: a stage of a compressed pipeline as users make it, with its own bracket.

with stage.step(ids=ids):                # one stage a rank; for several, Pipeline(stages).step(…)
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
    """As PipelineStage, with `wire` (a Wire, a preset's name, or a `[wire]` table) for its messages both ways.

    `seed` is the run's, equal on all stages. `dropout`: above a boundary with per-sample memory, "warn" of it, "seed"
    its masks by sample, or "ignore".
    """

    def step(self, ids: Ids | None = None, train: bool = True, **more: Any) -> AbstractContextManager[Any]:
        """Bracket one `schedule.step` or `schedule.eval`: see Pipeline.step."""
        if self.pipeline is None:
            Pipeline([self])
        return self.pipeline.step(ids, train, **more)

    def summary(self) -> Summary:
        """What compression has saved so far, over all stages of this rank; `print(stage.summary())` is one line."""
        return Summary(0, 0, 0) if self.pipeline is None else self.pipeline.summary()
