"""Forward and backward of one batch on this rank's stages: through torch's pipeline schedule, or alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from thinwire.boundaries.synchronise import Boundaries
from thinwire.config.wire import Wire
from thinwire.errors import UsageError
from thinwire.pipeline.framed_stage import Progress
from thinwire.pipeline.message_choice import Plan
from thinwire.pipeline.overlap import run_ahead
from thinwire.pipeline.pipeline import Pipeline
from thinwire.pipeline.stage import CompressedStage
from thinwire.planner.schedule import SINGLE_STAGE
from thinwire.train.config.sections import TrainConfig
from thinwire.train.data.batches import Batch
from thinwire.train.data.samples import IGNORED
from thinwire.train.mesh import Mesh
from thinwire.train.model.boundaries import bounded, learned_boundaries
from thinwire.train.model.casting import casting
from thinwire.train.model.opening import Opening
from thinwire.train.model.stage import Stage
from thinwire.train.model.tables import Tables
from thinwire.train.model.tensor_parallel import Sliced
from thinwire.train.task.scores import Scores


class Loss:
    """Cross-entropy summed over a micro-batch, as its share of the step's mean over all replicas' labels.

    It is multiplied by the number of replicas, because gradients are averaged over them afterwards. `labelled` is set
    before each step: how many labels the step has on all replicas.
    """

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        self.labelled = 1

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        total = nn.functional.cross_entropy(
            logits.float().flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return total * (self.replicas / max(1, self.labelled))


class Alone:
    """A whole model on this rank: micro-batches one after the other, as a pipeline would add them up. Each is as
    long as its longest text."""

    scores: Scores | None  # of a classifier

    def __init__(self, config: TrainConfig, stage: Stage) -> None:
        self.stage = casting(stage, config)
        self.microbatches = config.mesh.microbatches
        self.loss = Loss(config.mesh.dp)
        self.device = next(stage.parameters()).device
        self.scores = _scores(stage, self.device)
        self.opening = Opening(config, {0: stage})
        self.tables = Tables({}, {})

    def run(
        self, batch: Batch, train: bool, upcoming: Tensor | None = None, done: Callable[[], None] | None = None
    ) -> Tensor | None:
        """This replica's loss; where `train`, gradients are added to .grad. `upcoming` and `done` are not used."""
        self.loss.labelled = batch.labelled
        self.stage.train(train)  # no dropout in evaluation
        total = torch.zeros((), device=self.device)
        with torch.set_grad_enabled(train):
            for part in (on_device(self.device, part.trimmed()) for part in batch.split(self.microbatches)):
                self.opening.seen["tokens"] = part.inputs
                logits = self.stage(part.inputs, **beside(part))
                loss = self.loss(logits, part.labels)
                if self.scores is not None:
                    self.scores.add(logits, part.labels)
                if train:
                    loss.backward()
                total += loss.detach()
        return total

    def tell_progress(self, progress: Progress) -> None:
        """There is nothing to be told of between two micro-batches."""

    def faults(self) -> int:
        """Nothing is sent, so nothing can be damaged."""
        return 0

    def settle(self, skipped: bool, rate: float) -> None:
        """Nothing is kept from step to step."""

    def learned(self) -> dict[str, Tensor]:
        return {}

    def load_learned(self, state: dict[str, Tensor], same_cut: bool) -> None:
        if state:
            raise UsageError(
                "the checkpoint has learned boundaries, and this run has none: take its mesh and [boundary]"
            )

    @property
    def boundary_sent(self) -> int:
        return 0

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        raise UsageError("the checkpoint holds pipeline state, but this run has no pipeline")

    def close(self) -> None:
        """Nothing is held."""


class Piped:
    """This rank's stages under one of torch's schedules, their messages compressed as `wire` says.

    plan: which messages are compressed. mesh: the groups of this rank. stages: by number. samples: how many there are
    to train on. say: called with a line for the user.
    """

    def __init__(
        self, config: TrainConfig, wire: Wire, plan: Plan, mesh: Mesh, stages: Mapping[int, Stage], samples: int,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.rank_of = config.mesh.plan().rank_of
        self.group = mesh.pp
        self.microbatches = config.mesh.microbatches
        some = next(iter(stages.values()))
        weight = next(some.parameters())
        hidden = some.config.hidden_size // config.mesh.tp
        self.width = config.boundary.rank or hidden  # of what crosses
        self.dtype = weight.dtype
        self.device = weight.device
        self.scores = _scores(some, self.device)
        projected = learned_boundaries(config, some.config.vocab_size)
        self.opening = Opening(config, stages)
        modules = {index: _sliced(casting(stage, config), stage, mesh) for index, stage in sorted(stages.items())}
        modules = self.opening.around(modules)
        if projected is not None:
            modules = bounded(projected, modules, self.rank_of, hidden, self.device)
        self.tables, self.tabled = Tables(modules, stages), config.boundary.tables
        self.parts = [
            CompressedStage(
                module, index, len(self.rank_of), self.device, group=mesh.pp, wire=wire, seed=config.run.seed,
                dropout="seed",
            )
            for index, module in modules.items()
        ]  # fmt: skip
        self.boundaries = None if projected is None else Boundaries(self.parts, mesh.dp)
        self.told = wire.needs_tokens
        self.loss = Loss(config.mesh.dp)
        row = config.data.seq_len, self.width
        overlap = config.mesh.depth > 1 or (self.device.type == "cuda" and config.mesh.schedule in SINGLE_STAGE)
        self.pipeline = Pipeline(self.parts, plan=plan, samples=samples, row=row, say=say, overlap=overlap)
        kind = get_schedule_class(config.mesh.schedule)
        given: Any = self.parts if issubclass(kind, PipelineScheduleMulti) else self.parts[0]
        self.schedule: Any = kind(given, config.mesh.microbatches, loss_fn=self.loss, scale_grads=False)
        if config.mesh.depth > 1:
            run_ahead(self.schedule, config.mesh.depth)
        self.first, self.last = mesh.is_first, mesh.is_last
        self.progress: Progress | None = None

    def tell_progress(self, progress: Progress) -> None:
        """From now on `progress` is told how far this rank's stages are, in the last pass of every step."""
        self.progress = progress

    def run(
        self, batch: Batch, train: bool, upcoming: Tensor | None = None, done: Callable[[], None] | None = None
    ) -> Tensor | None:
        """This replica's loss on the rank of the last stage, None elsewhere.

        batch: this replica's part of the step. train: with backward. upcoming: the sample ids of the next pass, which
        are read ahead. done: called when this rank's gradients are complete, while other ranks may still compute; the
        pass then waits for `settle`.
        """
        self.loss.labelled, batch = batch.labelled, on_device(self.device, batch)
        for part in self.parts:
            part.submod.train(train)
        if not train:
            return self._evaluate(batch)
        losses: list[Tensor] = []
        about: dict[str, Any] = {}
        for part in self.parts:
            part.progress = None if done is None else self.progress
        if self.first:
            shape = tuple(batch.inputs.shape)
            about = {"shape": shape, "ids": batch.ids, "next_ids": upcoming, "next_certain": upcoming is not None}
        with self.pipeline.step(**about, settles=done is None):
            target = {"target": batch.labels, "losses": losses} if self.last else {}
            more = self._beside(batch) | ({"tokens": batch.inputs} if self.told else {})
            logits = self.schedule.step(*((batch.inputs,) if self.first else ()), **target, **more)
            if self.scores is not None and self.last:
                self.scores.add(logits, batch.labels)
            if done is not None:
                done()
        return torch.stack([loss.detach() for loss in losses]).sum() if self.last else None

    @torch.no_grad()
    def _evaluate(self, batch: Batch) -> Tensor | None:
        """Forward only, uncompressed, micro-batch by micro-batch: torch's V schedules cannot leave backward out."""
        total = torch.zeros((), device=self.device)
        mine = {part.stage_index: part for part in self.parts}
        sends: list[dist.Work] = []
        for micro in batch.split(self.microbatches):
            x = micro.inputs
            for stage, rank in enumerate(self.rank_of):
                if stage not in mine:
                    continue
                if stage > 0 and self.rank_of[stage - 1] != rank:
                    x = torch.empty(*micro.inputs.shape, self.width, dtype=self.dtype, device=self.device)
                    for work in self._exchange(dist.irecv, x, self.rank_of[stage - 1]):
                        work.wait()
                x = mine[stage].submod(x, **self._beside(micro))
                if stage == len(self.rank_of) - 1:
                    total += self.loss(x, micro.labels)
                    if self.scores is not None:
                        self.scores.add(x, micro.labels)
                elif self.rank_of[stage + 1] != rank:
                    sends += self._exchange(dist.isend, x, self.rank_of[stage + 1])
        for work in sends:
            work.wait()
        return total if self.last else None

    def _exchange(self, operation: Any, x: Tensor, peer: int) -> list[dist.Work]:
        """In a batch at both ends, even of one operation: outside a batch NCCL makes a communicator per pair."""
        return dist.batch_isend_irecv([dist.P2POp(operation, x, group=self.group, group_peer=peer)])

    def faults(self) -> int:
        """What went wrong on this rank in the pass that waits for `settle`."""
        return len(self.pipeline.faults)

    def _beside(self, batch: Batch) -> dict[str, Tensor]:
        """What every stage is called with; learned boundaries may need the tokens."""
        told = self.boundaries is not None or self.opening.needs_tokens
        return beside(batch) | ({"tokens": batch.inputs} if told else {})

    def settle(self, skipped: bool, rate: float) -> None:
        """End the pass: keep what it wrote, or drop it where the step is `skipped`; on all ranks alike. Boundaries that
        learn do so at this learning rate."""
        self.pipeline.settle(skipped)
        if self.boundaries is not None:
            self.boundaries.step(rate, skipped)

    def learned(self) -> dict[str, Tensor]:
        """The state of boundaries that learn; empty without any."""
        marked = {"tables": torch.tensor(1)} if self.tabled else {}  # they themselves are weights of the model
        return {} if self.boundaries is None else self.boundaries.state_dict() | marked

    def load_learned(self, state: dict[str, Tensor], same_cut: bool) -> None:
        """Go on from a `learned`; same_cut: it is of the same split, to which boundaries belong."""
        same = bool(state) == (self.boundaries is not None) and ("tables" in state) == self.tabled
        if not same or (state and not same_cut):
            raise UsageError(
                "[boundary] rank: learned boundaries belong to the split of their pipeline, and the checkpoint has "
                f"{'other ones' if state else 'none'}: resume with its [mesh] and [boundary]"
            )
        if self.boundaries is not None:
            self.boundaries.load_state_dict(state)

    @property
    def boundary_sent(self) -> int:
        """Bytes of gradients and values of learned boundaries that this rank has sent."""
        return 0 if self.boundaries is None else self.boundaries.sent

    def state_dict(self) -> dict[str, Tensor]:
        return self.pipeline.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.pipeline.load_state_dict(state)

    def close(self) -> None:
        """Forget what is remembered of samples, and free the groups."""
        self.pipeline.close()
        if self.boundaries is not None:
            self.boundaries.close()


def on_device(device: torch.device, batch: Batch) -> Batch:
    """The batch on the stages' device; its ids stay on the host, which looks them up."""
    segments = None if batch.segments is None else batch.segments.to(device)
    return batch._replace(inputs=batch.inputs.to(device), labels=batch.labels.to(device), segments=segments)


def beside(batch: Batch) -> dict[str, Tensor]:
    """What every stage is called with beside its input; torch splits it into micro-batches as it does the input."""
    return {} if batch.segments is None else {"segments": batch.segments}


def _scores(stage: Stage, device: torch.device) -> Scores | None:
    return Scores(stage.config.num_labels, device) if stage.family.task == "classify" else None


def _sliced(module: nn.Module, stage: Stage, mesh: Mesh) -> nn.Module:
    return module if mesh.config.tp == 1 else Sliced(module, mesh.tp, stage.is_first, stage.is_last)
