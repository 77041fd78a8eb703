"""Gradients that leave before the schedule has ended, as soon as they are final.

- On the first stage: unit by unit, in the backward of the last micro-batch. Nothing that other stages wait for is sent
  after it.
- On a rank with several stages: those of a stage whose last weight gradient is there, while the rank computes its other
  stages. They leave when the next computation begins: the stage's last frame, which the stage before waits for, is then
  on its way.
- The only stage of a rank that is not the first: with the schedule's end. Gradients would stand on the link before its
  last frame, and its exchange is through while the first stage still computes (docs/train.md).

Not on a card, where kernels would be loaded while messages are in flight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from thinwire.data_parallel.gradient_pass import GradientWatch
from thinwire.data_parallel.reducer import Reducer


class EarlyGradients:
    """Told of by the stages' computations (pipeline/framed_stage.py), and by autograd on the first stage.

    reducers: that average gradients of this rank. stages: by number, the names of their parameters.
    """

    def __init__(self, reducers: Iterable[Reducer], stages: Mapping[int, Iterable[str]]) -> None:
        self.takers = {name: reducer for reducer in reducers if reducer.size > 1 for name in reducer.parameters}
        names = {stage: [name for name in found if name in self.takers] for stage, found in stages.items()}
        uses = Counter(name for found in names.values() for name in found)  # of several stages: final with all of them
        alone = {stage: [name for name in found if uses[name] == 1] for stage, found in names.items()}
        first = {name: self.takers[name] for name in alone.pop(0, ())}
        self.watch = GradientWatch({r.parameters[name]: (name, r.put) for name, r in first.items()})
        self.by_stage = alone if len(stages) > 1 else {}
        self.ended: list[int] = []  # stages whose gradients are final and have not left

    def stage_ends(self, stage: int) -> None:
        """All weight gradients of the stage are there, in the last pass of a step."""
        self.ended.append(stage)

    def computation_begins(self) -> None:
        """The next one of this rank, whichever stage's: what was computed before has been sent on."""
        while self.ended:
            for name in self.by_stage.get(self.ended.pop(0), ()):
                reducer = self.takers[name]
                reducer.put(name, reducer.parameters[name].grad)

    def end_backward(self) -> None:
        """All gradients of the step are complete; what has not left is the caller's."""
        self.ended.clear()
        self.watch.end_backward()

    def close(self) -> None:
        """Let nothing leave early any more."""
        self.by_stage = {}
        self.watch.close()
