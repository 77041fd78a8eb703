"""`thinwire train` with replicas and a pipeline, in one process: stages one after another, messages through lanes.

Losses, weights and bytes have the bits of real ranks (tests/test_one_process.py), so quality can be measured without a
network, one process per run. Replicas take turns with one copy of the weights. What is left out: tensor parallelism,
sites, boundaries that learn, `auto`, dropout (attention draws it from each rank's own generator), weights that all
stages share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.bench.one_process.crossing import Crossing, cross
from thinwire.bench.one_process.pair import TiedPair
from thinwire.bench.one_process.replicas import Averaged, Frozen
from thinwire.config.stages import SLACK
from thinwire.config.wire import Wire, warmup_steps
from thinwire.errors import UsageError
from thinwire.memory.deferred import fetch
from thinwire.pipeline.lane import DIRECTIONS
from thinwire.pipeline.message_choice import Message, MessageChoice, Plan
from thinwire.planner.step import Traffic
from thinwire.train.build import Checked, check
from thinwire.train.config.sections import TrainConfig
from thinwire.train.data.batches import Batch, Batches, held_out_batches
from thinwire.train.engine import Loss, beside, on_device
from thinwire.train.learning_rate import groups, moments, rate, total_steps
from thinwire.train.model.blueprint import build_stages
from thinwire.train.model.casting import casting
from thinwire.train.model.stage import Stage
from thinwire.train.task.scores import Scores, summary
from thinwire.train.tune.selection import select
from thinwire.train.update import sum_of_squares

Event = dict[str, Any]


class OneProcess:
    """A run, with all its stages here.

    config: run.toml; any dp and pp, one stage per rank. checked: what `check` gave for it, or for a configuration
    that differs only in wire, seeds, rates and lengths of the run: reading the data again is spared.
    """

    def __init__(self, config: TrainConfig, checked: Checked | None = None) -> None:
        _refuse(config)
        checked = checked or check(config)
        self.config, self.samples = config, checked.samples
        given, dp = (self.samples, config.optim.batch, config.data.seed), config.mesh.dp
        self.batches = [Batches(*given, replica, dp) for replica in range(dp)]
        epoch, stages = self.batches[0].steps_per_epoch, config.mesh.pp
        self.wire = Wire.of(config.wire).with_epoch(epoch, config.optim.accumulate)
        self.steps, self.epoch = total_steps(config.optim, epoch), epoch
        blueprint = replace(checked.blueprint, model=config.model)
        device = config.run.device
        built = [build_stages(blueprint, [i], config.run.seed, device, config.run.recompute)[i] for i in range(stages)]
        if any(stage.shared for stage in built):
            raise UsageError(f"{blueprint.family.architecture}: stages share weights, which one process does not sum")
        self.device = next(built[0].parameters()).device
        self.named = [{n: p for n, p in stage.named_parameters() if p.requires_grad} for stage in built]
        self.scores = Scores(built[0].config.num_labels, self.device) if built[0].family.task == "classify" else None
        self.modules = [casting(stage, config) for stage in built]
        self.crossings = [
            [Crossing(self.wire, boundary, config.run.seed) for boundary in range(stages - 1)] for _ in range(dp)
        ]
        self.choices = self._choices(stages)
        self.tied = self._tie([stage.tied for stage in built])
        self.averages = [self._averaged(index, stage) for index, stage in enumerate(built)]
        weights = {(stage, name): p for stage, own in enumerate(self.named) for name, p in own.items()
                   if config.optim.name == "adamw" or name in self._copies}  # fmt: skip
        self.adam: torch.optim.AdamW | None = None
        if weights:
            self.adam = torch.optim.AdamW(groups(config.optim, weights), **moments(config), foreach=True)  # type: ignore[arg-type]
        self.loss = Loss(dp)
        self.step = self.passes = 0

    def fit(self, tell: Callable[[Event], None] = lambda event: None) -> list[Event]:
        """Train to the end. Events, in metrics.jsonl's words: `eval` before the first step and as `eval_every` says,
        `step` after every step; each is told as it comes."""
        events: list[Event] = []

        def note(kind: str, **values: Any) -> None:
            events.append({"kind": kind, "step": self.step, **values})
            tell(events[-1])

        every = self.config.run.eval_every
        note("eval", **self.evaluate())
        while self.step < self.steps:
            loss, norm = self.train_step()
            note("step", loss=loss, norm=norm, bytes=sum(self.sent().values()))
            if self.step == self.steps or (every and self.step % every == 0):
                note("eval", **self.evaluate(), bytes=sum(self.sent().values()))
        return events

    def train_step(self) -> tuple[float, float | None]:
        """(the step's loss, the gradient's norm); None where the step was skipped."""
        total, faults, local = 0.0, 0, []
        for replica in range(self.config.mesh.dp):
            loss, found = self._replica(replica)
            total, faults = total + loss / self.config.mesh.dp, faults + found
            local.append([{n: p.grad for n, p in own.items() if p.grad is not None} for own in self.named])
        for stage, average in enumerate(self.averages):
            average.reduce([own[stage] for own in local])
        if self.tied is not None:
            first, last = self._copies
            self.tied.reduce([(own[0][first], own[-1][last]) for own in local])
        norm = self._norm()
        skipped = faults > 0 or not math.isfinite(norm)
        self._end_pass(not skipped)
        for part in (*self.averages, *([] if self.tied is None else [self.tied])):
            part.settle(skipped)
        if not skipped:
            self._update(norm)
        self.step += 1
        return total, None if skipped else norm

    def _replica(self, replica: int) -> tuple[float, int]:
        """One replica's part of a step, its gradients in .grad: (its loss, how many messages were wrong)."""
        for parameter in (p for own in self.named for p in own.values()):
            parameter.grad = None
        passes = self.batches[replica].next().split(self.config.optim.accumulate)
        total, faults = 0.0, 0
        for number, batch in enumerate(passes):
            done = self.passes + number
            loss, found = self._pass(self.crossings[replica], batch, done, last=number + 1 == len(passes))
            total, faults = total + loss, faults + found
        if replica + 1 == self.config.mesh.dp:
            self.passes += len(passes)
        return total, faults

    def _gradients(self, copy: int) -> list[list[nn.Parameter]]:
        """By stage, the parameters whose .grad are a replica's, or all replicas'; a tied embedding once."""
        return [
            [average.copies[copy].get(n, p) for n, p in own.items() if i == 0 or n not in self._copies]
            for i, (own, average) in enumerate(zip(self.named, self.averages))
        ]

    def _norm(self) -> float:
        """Of the whole gradient; of replicas whose gradients are local the root of the mean of their squares."""
        copies = range(len(self.averages[0].copies))
        squares = torch.stack([sum_of_squares(own) for copy in copies for own in self._gradients(copy)]).tolist()
        per = len(self.averages)
        sums = [sum(squares[copy * per : (copy + 1) * per]) for copy in copies]
        return math.sqrt(sum(sums) / len(sums))

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Mean held-out loss, with nothing coded; of a classifier accuracy and Matthews' correlation too."""
        total, labels = 0.0, 0
        self.loss.replicas = 1  # of all held-out samples
        for batch in held_out_batches(self.samples, self.config.optim.batch):
            self.loss.labelled = batch.labelled
            parts = [micro for part in batch.split(self.config.optim.accumulate) for micro in self._split(part)]
            total += float(torch.stack([self._evaluated(micro) for micro in parts]).sum()) * batch.labelled
            labels += batch.labelled
        self.loss.replicas = self.config.mesh.dp
        scores = {} if self.scores is None else summary(self.scores.take())
        return {"held_out": total / labels if labels else math.nan, **scores}

    def sent(self) -> dict[str, int]:
        """Bytes so far, of all ranks: forward and backward over all boundaries, of gradients between replicas, and
        between the copies of a tied embedding."""
        crossed = {way: sum(c.sent(way) for line in self.crossings for c in line) for way in DIRECTIONS}
        between = sum(average.sent() for average in self.averages)
        return {**crossed, "gradient": between, "embedding": self.tied.sent() if self.tied else 0}

    # --- inside

    def _pass(self, line: Sequence[Crossing], batch: Batch, done: int, last: bool) -> tuple[float, int]:
        """One pipeline pass: (its loss, how many messages were wrong). It stays open where it is the step's last.

        line: the replica's boundaries. done: passes before it.
        """
        lanes = [lane for crossing in line for lane in crossing.all()]
        coded = {way: done >= warmup_steps(way, getattr(self.wire, way)) for way in DIRECTIONS}
        for lane in lanes:
            lane.begin(done + 1)
        self.loss.labelled = batch.labelled
        losses = []
        for number, micro in enumerate(self._split(batch)):
            loss = self._forward(line, micro, number, coded)
            loss.backward()
            losses.append(loss.detach())
        fetch(channel.deferred for lane in lanes for _, channel in lane.channels())
        faults = sum(len(crossing.faults()) for crossing in line)
        for lane in lanes if not last else ():
            lane.end_step(not faults)
        return float(torch.stack(losses).sum()), faults

    def _end_pass(self, keep: bool) -> None:
        for crossing in (crossing for line in self.crossings for crossing in line):
            for lane in crossing.all():
                lane.end_step(keep)

    def _forward(self, line: Sequence[Crossing], micro: Batch, number: int, coded: dict[str, bool]) -> Tensor:
        """The micro-batch's share of the loss, with its graph."""
        ids, x = tuple(micro.ids.tolist()), micro.inputs
        for index, module in enumerate(self.modules):
            x = module(x, **beside(micro))
            if index < len(line):
                senders = zip(DIRECTIONS, (index, index + 1))
                chosen = [coded[way] and self.choices[way](sender, number) for way, sender in senders]
                x = cross(x, line[index], [Message(number, ids, one) for one in chosen])
        return self.loss(x, micro.labels)

    def _evaluated(self, micro: Batch) -> Tensor:
        x = micro.inputs
        for module in self.modules:
            x = module(x, **beside(micro))
        if self.scores is not None:
            self.scores.add(x, micro.labels)
        return self.loss(x, micro.labels)

    def _split(self, batch: Batch) -> list[Batch]:
        """Its micro-batches, on the device; sample ids stay on the host. A whole model takes texts without padding."""
        parts, whole = batch.split(self.config.mesh.microbatches), self.config.mesh.pp == 1
        return [on_device(self.device, part.trimmed() if whole else part) for part in parts]

    def _update(self, norm: float) -> None:
        clip = self.config.optim.clip
        if clip and norm > clip:
            copies = [copy for average in self.averages for copy in average.copies]
            tied = [] if self.tied is None else self.tied.copies
            for parameter in (*(p for copy in copies for p in copy.values()), *tied):
                assert parameter.grad is not None
                parameter.grad.mul_(clip / norm)
        lr = rate(self.config.optim, self.step, self.steps)
        if self.adam is not None:
            for group in self.adam.param_groups:
                group["lr"] = lr
            self.adam.step()
        for average in self.averages:
            average.update(lr)

    def _choices(self, stages: int) -> dict[str, Callable[[int, int], bool]]:
        mesh, plan = self.config.mesh, Plan(self.config.mesh.schedule)
        links = {Traffic.FORWARD: self.wire.forward, Traffic.BACKWARD: self.wire.backward}
        whens = {traffic: "always" if link is None else link.when for traffic, link in links.items()}
        made = {traffic: MessageChoice(when, traffic, plan, stages, stages) for traffic, when in whens.items()}
        return {str(traffic): choice.predicate(mesh.microbatches) for traffic, choice in made.items()}

    def _tie(self, names: list[str | None]) -> TiedPair | None:
        self._copies: tuple[str, ...] = ()
        if names[0] is None or names[-1] is None or len(names) == 1:
            return None
        self._copies = names[0], names[-1]
        copies: tuple[nn.Parameter, nn.Parameter] = self.named[0][names[0]], self.named[-1][names[-1]]
        return TiedPair(copies, self.wire, self.config.run.seed, self.config.mesh.dp)

    def _averaged(self, index: int, stage: Stage) -> Averaged | Frozen:
        rest = {name: p for name, p in self.named[index].items() if name not in self._copies}
        wire, mesh = select(self.config, self.wire, None, {index: stage}, rest), self.config.mesh
        if self.config.optim.name == "frozen_adam":
            return Frozen(self.config, rest, wire, self.epoch)
        return Averaged(rest, wire, mesh.dp, self.config.run.seed)


def _refuse(config: TrainConfig) -> None:
    """UsageError where the run has what one process cannot have."""
    mesh, wire = config.mesh, Wire.of(config.wire)
    unlike = {
        "[mesh] tp": mesh.tp > 1, "[mesh] sites": mesh.sites > 1,
        "[mesh] virtual": len(mesh.plan().rank_of) != mesh.pp, "[wire] auto": wire.auto,
        "[wire.gradient] stages": wire.gradient is not None and wire.gradient.stages == SLACK,
        "[boundary]": bool(config.boundary.rank or config.boundary.open), "[model] dropout": config.model.dropout > 0,
    }  # fmt: skip
    found = [name for name, has in unlike.items() if has]
    if found:
        raise UsageError(
            f"{found[0]}: a run in one process has one site, one stage per rank, whole tensors, no dropout"
        )
