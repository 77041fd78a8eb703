"""A pipeline in one process: its stages one after another, and every message through both ends of its lane.

Losses and weights have the bits of real ranks under the same wire (tests/test_bench_scratch.py): lanes, their names and
seeds are those of a Pipeline, and micro-batches pass each lane in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.bench.one_process.crossing import Crossing, cross
from thinwire.boundaries.projected import BoundedStage
from thinwire.boundaries.synchronise import Boundaries
from thinwire.config.wire import Wire
from thinwire.pipeline.lane import DIRECTIONS
from thinwire.pipeline.message_choice import Message


@dataclass
class InProcess:
    """A stage of this process, as Boundaries asks for it."""

    stage_index: int
    submod: nn.Module
    group: dist.ProcessGroup | None = None


class Sequence:
    """All stages of a model, trained as a pipeline would.

    stages: in order; where boundaries are in a subspace, as Projected.around makes them. wire: of all boundaries.
    width: of the hidden states. seed: the run's.
    """

    def __init__(self, stages: list[nn.Module], wire: Wire, width: int, seed: int = 0) -> None:
        last = len(stages)
        device = next(stages[0].parameters()).device
        self.mixed = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
        self.stages = stages
        self.crossings = [Crossing(wire, boundary, seed) for boundary in range(last - 1)]
        self.boundaries: Boundaries | None = None
        self.learns = True  # do its boundaries?
        if isinstance(stages[0], BoundedStage):
            self.boundaries = Boundaries([InProcess(i, module) for i, module in enumerate(self.stages)])
        self.steps = 0

    def step(self, x: Tensor, y: Tensor, loss_of: Any, microbatches: int = 1) -> Tensor:
        """Gradients of the mean loss over a batch, added to .grad; returns that loss. On a card products are in bf16.

        x, y: inputs and targets. loss_of(output, target): of one micro-batch.
        """
        self.steps += 1
        lanes = [lane for crossing in self.crossings for lane in crossing.all()]
        for lane in lanes:
            lane.begin(self.steps)
        total = torch.zeros((), device=x.device)
        for number, (part, target) in enumerate(zip(x.tensor_split(microbatches), y.tensor_split(microbatches))):
            with self.mixed:
                loss = loss_of(self._forward(part, number), target)
            loss.backward()
            total += loss.detach()
        for gradient in (p.grad for stage in self.stages for p in stage.parameters()):
            if gradient is not None and microbatches > 1:
                gradient /= microbatches
        for lane in lanes:
            lane.resolve_checks()
            lane.end_step(keep=True)
        return total / microbatches

    def _forward(self, x: Tensor, microbatch: int) -> Tensor:
        tokens = x
        messages = [Message(microbatch, None, True).told(tokens, direction) for direction in DIRECTIONS]
        for index, stage in enumerate(self.stages):
            x = stage(x) if self.boundaries is None else stage(x, tokens=tokens)
            if index < len(self.crossings):
                x = cross(x, self.crossings[index], messages)
        return x

    @torch.no_grad()
    def evaluate(self, x: Tensor) -> Tensor:
        """The output, float32, with nothing coded; what lies outside of learned boundaries is lost as in training."""
        tokens = x
        with self.mixed:
            for stage in self.stages:
                x = stage(x) if self.boundaries is None else stage(x, tokens=tokens)
        return x.float()  # a loss in bfloat16 would have two digits

    def sent(self) -> int:
        """Bytes over all boundaries so far, both ways, those of learned boundaries' own parameters not counted."""
        return sum(crossing.sent() for crossing in self.crossings)
