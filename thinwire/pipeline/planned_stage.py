"""PlannedStage: a stage as a Pipeline drives it. It is connected once, and every step on it is planned.

A Pipeline calls `connect` after the handshake, then `begin_step`, `start_messages` and `end_step` per step. The stage
calls its pipeline through the two methods of `Owner`. What torch asks of a stage is in framed_stage.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.collectives.flows import Flows
from thinwire.config.wire import Wire, warmup_steps
from thinwire.errors import UsageError
from thinwire.pipeline.announce import Announcement
from thinwire.pipeline.dropout import seed_dropout
from thinwire.pipeline.early_receives import EarlyReceives
from thinwire.pipeline.lane import DIRECTIONS, Lane
from thinwire.pipeline.message_choice import MessageChoice, Predicate
from thinwire.pipeline.overlap import Transport
from thinwire.pipeline.shapes import Spec, in_words
from thinwire.pipeline.step_plan import StagePosition, StepPlan, plan_step
from thinwire.torch_private.pipelining import OpenStage

DROPOUT = ("warn", "seed", "ignore")


class Owner(Protocol):
    """What a stage asks of the Pipeline that drives it."""

    def raise_on_all_ranks(self, wrong: str) -> None:
        """Called by stages of all ranks together: raise what the first stage's rank has found `wrong`."""

    def backward_began(self) -> None:
        """From here on the next batch may be prefetched."""


@dataclass
class Lanes:
    """A stage's lanes by direction; a direction without a neighbour on another rank has none."""

    incoming: dict[str, Lane] = field(default_factory=dict)
    outgoing: dict[str, Lane] = field(default_factory=dict)

    def all(self) -> list[Lane]:
        found = [table.get(direction) for direction in DIRECTIONS for table in (self.incoming, self.outgoing)]
        return [lane for lane in found if lane is not None]


@dataclass(frozen=True)
class Connections:
    """What the handshake gives to a stage.

    lanes: to neighbours on other ranks.
    choices: per direction, which messages are compressed.
    first_tag: the number that the pipeline's tags count from.
    rank_of: stage → rank in the group, of all stages.
    """

    lanes: Lanes
    choices: dict[str, MessageChoice]
    first_tag: int
    rank_of: dict[int, int]


class PlannedStage(OpenStage):
    """What a Pipeline drives; its arguments are CompressedStage's."""

    def __init__(
        self, submodule: nn.Module, stage_index: int, num_stages: int, device: torch.device, *args: Any,
        wire: Wire | Mapping[str, Any] | str, seed: int = 0, dropout: str = "warn", **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(submodule, stage_index, num_stages, device, *args, **kwargs)
        if dropout not in DROPOUT:
            raise UsageError(f"dropout = {dropout!r}: allowed are {', '.join(DROPOUT)}")
        self.wire = Wire.of(wire)
        self.told = self.wire.needs_tokens
        if self.told and not getattr(submodule, "takes_tokens", False):
            submodule.register_forward_pre_hook(_without_tokens, with_kwargs=True)
        links = {"forward": self.wire.forward, "backward": self.wire.backward}
        self.warmup = {direction: warmup_steps(direction, link) for direction, link in links.items()}
        self.trained = 0  # training steps, also those rolled back; `warmup` counts them
        self.seed = seed
        self.dropout = dropout
        given = dict(zip(("input_args", "output_args"), args)) | kwargs
        self.declared = in_words(given.get("input_args")), in_words(given.get("output_args"))
        self.owner: Owner | None = None
        self.lanes = Lanes()
        self.rank_of: dict[int, int] = {}
        self.transports: dict[tuple[str, str], Transport] = {}  # with overlap: frames travel on them, not by torch
        self.flows: Flows | None = None  # with several streams: frames travel on them, not by torch
        self.sends: list[tuple[Tensor, list[dist.Work]]] = []  # frames on the flows
        self.microbatches: int | None = None
        self.predicates: dict[str, Predicate] = {}
        self.announced: Announcement | None = None
        self.plan: StepPlan | None = None
        self.inputs: list[Spec] | None = None  # of this step, where torch may not know them
        self._repeated = True  # are this step's rows of the last step's shape?
        self.batch_inputs: dict[int, list[Spec]] = {}  # of the first stage by micro-batch, in the last step
        self.early = EarlyReceives()
        self._choices: dict[str, MessageChoice] = {}
        self._first_tag = 0
        self._coded = dict.fromkeys(DIRECTIONS, True)
        self._current: int | None = None  # the micro-batch being computed
        if dropout == "seed":
            seed_dropout(submodule, seed, self.current_ids)

    def current_ids(self) -> tuple[int, ...] | None:
        """The samples of the micro-batch being computed."""
        return None if self.plan is None or self._current is None else self.plan.ids[self._current]

    # --- what a Pipeline calls

    def connect(
        self, connections: Connections, transports: dict[tuple[str, str], Transport] | None, flows: Flows | None
    ) -> None:
        """Take over what the handshake found, with overlap the transports, by (direction, "in" or "out"), and with
        several streams the flows."""
        if transports is not None:
            self.transports = transports
        self.flows = flows
        self.lanes = connections.lanes
        self.rank_of = connections.rank_of
        self._choices = connections.choices
        self._first_tag = connections.first_tag
        self._set_predicates()

    def disconnect(self) -> None:
        """Forget all memory, and free the flows. Files of stores are removed."""
        for lane in self.lanes.all():
            lane.close()
        if self.flows is not None:
            self.flows.close()

    def begin_step(self, announced: Announcement, coded: bool, inputs: list[Spec] | None, repeated: bool) -> None:
        """Open the announced step.

        coded: False: every message of this step is exact. inputs: this stage's, where torch may not know them.
        repeated: their rows are of the last step's shape, so receives may be posted as in that step.
        """
        self.announced = announced
        self._coded = {direction: coded and self.trained >= steps for direction, steps in self.warmup.items()}
        self.trained += announced.train
        self.inputs = inputs
        self._repeated = repeated
        self._plan_step()
        for lane in self.lanes.all():
            lane.begin(announced.step)

    def start_messages(self) -> None:
        """The memories are ready: transports begin, and all receives of the step whose sizes are known are posted."""
        for transport in self.transports.values():
            transport.begin()
        if self.plan is not None and self.plan.train and self._repeated and not self.transports:
            self.early.post(self.plan, self.lanes.incoming, self.flows)

    def fill_gradients(self, value: float) -> None:
        """Set every gradient of the stage to `value`."""
        for parameter in self.submod.parameters():
            if parameter.grad is not None:
                parameter.grad.fill_(value)

    def finish_sends(self) -> None:
        """Wait until every frame of the step has been sent."""
        sends, self.sends = self.sends, []
        for _, works in sends:
            for work in works:
                work.wait()
        for transport in self.transports.values():
            transport.finish()

    def end_step(self, failed: bool) -> None:
        """Close the step; `failed` where it ended in an exception."""
        self.announced = None
        self.plan = None
        self.early.end_step(failed)

    def _set_predicates(self) -> None:
        if self.microbatches is not None:
            self.predicates = {name: choice.predicate(self.microbatches) for name, choice in self._choices.items()}

    def _plan_step(self) -> None:
        """As soon as both are known: the announcement, and the number of micro-batches."""
        if self.announced is not None and self.microbatches is not None:
            tagged = torch.device(self.device).type == "cpu"  # NCCL matches by order
            first_tag = self._first_tag if tagged else None
            position = StagePosition(self.stage_index, self.num_stages, self.microbatches, first_tag)
            self.plan = plan_step(self.announced, position, self._coded, self.predicates)

    def before_shapes(self, microbatches: int) -> None:
        """Called before torch looks at the shapes of a batch of so many micro-batches."""
        self.microbatches = microbatches
        self.batch_inputs = {}  # torch looks at the shapes anew
        self._set_predicates()
        self._plan_step()


def _without_tokens(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A hook: tokens are for a stage's messages, and its module does not know them."""
    return args, {name: value for name, value in kwargs.items() if name != "tokens"}
