"""The training loop of one rank: batches in, metrics and checkpoints out.

Everything that a step depends on is in the checkpoint or follows from the step's number. So a run that was stopped and
resumed has the same bits as one that was not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from thinwire.train.build import Checked, Parts, build, check
from thinwire.train.checkpoint import CHECKPOINTS, Checkpoints, refuse_second_run
from thinwire.train.config.sections import TrainConfig
from thinwire.train.data.batches import held_out_batches
from thinwire.train.learning_rate import rate
from thinwire.train.metrics import Metrics, say_unreadable
from thinwire.train.rows import fetch_rows, lend_rows, offer_rows
from thinwire.train.saving.publish import publish
from thinwire.train.saving.snapshot import DECISION, Position, Snapshot
from thinwire.train.sites.member import Member
from thinwire.train.stop import StopRequest
from thinwire.train.totals import NUMBERS, Totals, peak_memory
from thinwire.train.tune.replan import StepWatch, carried_over, is_same
from thinwire.train.vote import Ballot, Vote


class Trainer:
    """One rank of a run.

    resume: go on from the newest checkpoint. local_rank: this rank's number on its machine.
    say: called on rank 0 with a line for the user. rate: of the links in bit/s, where it is known; it is only recorded.
    checked: what `check(config)` returned, where it has been called already.
    `on_event` may be set: it is called on rank 0 with every event that is recorded.
    """

    def __init__(
        self, config: TrainConfig, *, resume: bool = False, local_rank: int = 0, say: Callable[[str], None] = print,
        rate: float | None = None, checked: Checked | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        self.out = Path(config.run.out)
        self.rate = rate
        self.rank = dist.get_rank()
        self.say = say if self.rank == 0 else (lambda line: None)
        self.metrics: Metrics | None = None
        self.on_event: Callable[[dict[str, Any]], None] = lambda event: None
        self.notes: list[str] = []  # from before there are metrics
        self.checked = checked or check(config)
        self.checkpoints = Checkpoints(self.out / CHECKPOINTS, config.run.keep, local_rank)
        found = self.checkpoints.newest_sound(self._note)
        if found is not None:
            refuse_second_run(self.out, resume)
        kept = None if found is None else self.checkpoints.read(found, lambda name: name == DECISION).get(DECISION)
        self.parts: Parts = build(config, self.checked, self._note, kept)
        self.step = 0
        self.seconds = 0.0
        self.last_seconds = 0.0  # of the last step
        self.last_hit_rate: float | None = None  # of its samples
        self.stop = StopRequest(self.rank == 0, config.mesh.sites)
        self.agreed_to_stop = False
        self.totals = self._totals()
        self.watch = self._watch()
        self.plans_anew = False
        self.vote = Vote(NUMBERS, self.parts.update.exchanging, self.parts.mesh.inside)
        self.sites: Member | None = None  # where there are several
        if found is not None:
            self._load(found)
        else:
            self.parts.engine.tables.begin(self.parts.blueprint, config.run.seed, self.parts.mesh.dp)
            if config.mesh.sites > 1:
                self.sites = self._join_sites(0)
        if self.sites is not None:
            self.sites.begin()
        if self.rank == 0:
            self.metrics = Metrics(self.out, self.step if found is not None else None, config.run.loggers)
            if found is not None and self.metrics.unreadable:
                self._note(f"{self.metrics.path}: {say_unreadable(self.metrics.unreadable)}")
        for text in self.notes:
            self._write("note", text=text)
        self.steps = self.parts.steps
        self.parts.engine.opening.check(self.steps)

    def fit(self) -> float:
        """Train to the end; returns the held-out loss there (NaN without held-out samples)."""
        try:
            with self.stop:
                held_out = self._fit()
            if self.sites is not None:  # not after an error: its threads may wait for sites that are gone
                self.sites.close()
            return held_out
        finally:
            self.parts.update.close()
            self.vote.close()
            if self.metrics is not None:
                self.metrics.close()

    def _fit(self) -> float:
        config, held_out = self.config.run, math.nan
        if self.step == 0:
            self._write("run", **self.parts.about(), rate=self.rate)
            if self.parts.decision is not None:
                self._write("decision", **asdict(self.parts.decision))
            self._evaluate()
        while self.step < self.steps:
            self._train_step()
            last = self.step == self.steps
            planned = self.plans_anew and not last and not self.agreed_to_stop
            if planned:
                self._plan_anew()
            if last or (config.eval_every and self.step % config.eval_every == 0):
                held_out = self._evaluate()
            if self.agreed_to_stop:
                self._save()
                self.say(f"stopped at step {self.step}, with a checkpoint: go on with --resume")
                return held_out
            if last or planned or (config.checkpoint_every and self.step % config.checkpoint_every == 0):
                self._save()
        self._write("end", seconds=self.seconds, memory=peak_memory(config.device))
        publish(self.parts, self.out / "model", self.checkpoints.shared)
        return held_out

    def _train_step(self) -> None:
        began = time.perf_counter()
        update, passes = self.parts.update, self.config.optim.accumulate
        update.zero_grad()
        batch = self.parts.batches.next()
        fetch_rows(update.rows, batch.inputs)
        parts = batch.split(passes)
        self.parts.engine.opening.begin(self.step)
        following = [part.ids for part in parts[1:]] + [self._next_ids()]
        done = [None] * (passes - 1) + [update.begin]
        losses = [self.parts.engine.run(part, True, ids, then) for part, ids, then in zip(parts, following, done)]
        lr = rate(self.config.optim, self.step, self.steps)
        good = update.exchanged()
        ballots = self.vote.hold(Ballot(
            self.step, self.parts.engine.faults() + (not good), update.squares(), self.stop.asked,
            update.tied_checksum(), self.last_seconds, self.totals.mine(losses), self.vote.tables(update.tables()),
        ))  # fmt: skip
        self.plans_anew = self.watch.departs(ballots[0].seconds, self.last_hit_rate)
        norm = update.norm([ballot.squares for ballot in ballots])
        faults = any(ballot.faults for ballot in ballots) or not self.vote.intact(ballots)
        skipped = faults or not math.isfinite(norm)
        self.parts.engine.settle(skipped, lr)
        update.heal_tied([ballot.tied for ballot in ballots])
        update.apply(lr, norm, skipped)
        self.agreed_to_stop = any(ballot.stop for ballot in ballots)
        self.step += 1
        numbers = self.totals.step([ballot.numbers for ballot in ballots])
        if self.sites is not None:
            self._average(0 if skipped else batch.labelled, numbers)
        if self.step < self.steps:
            offer_rows(update.rows, self.parts.batches.peek_inputs())
        self.last_hit_rate = numbers["hit_rate"]
        self.last_seconds = time.perf_counter() - began
        self.seconds += self.last_seconds
        self._write(
            "step", **numbers, lr=lr,
            norm=None if skipped else norm, tokens=batch.inputs.numel() * self.config.mesh.replicas,
            seconds=self.seconds, step_seconds=self.last_seconds, wait_seconds=update.waited, skips=update.skips,
            healed=update.tied.healed if update.tied else 0,
        )  # fmt: skip

    def _average(self, tokens: int, numbers: dict[str, Any]) -> None:
        """Between sites, after a step: weights, and what sites tell each other; `numbers` then count all sites'."""
        assert self.sites is not None
        heard = self.sites.after(self.step, tokens, self.step == self.steps, self.agreed_to_stop, numbers)
        self.agreed_to_stop = heard is not None and heard.pop("stop")
        if heard is not None:
            self._write("sites", **heard)

    def _join_sites(self, began: int) -> Member:
        return Member(self.config, self.parts.mesh, self.parts.update, self.totals, began)

    def _next_ids(self) -> Tensor:
        """The sample ids of the next pass, so that the state kept for its samples can be read ahead."""
        ids = self.parts.batches.peek()
        return ids[: len(ids) // self.config.optim.accumulate]

    def _evaluate(self) -> float:
        """Mean held-out loss over all replicas, with the weights that all sites share; the state kept for training
        samples is not changed."""
        place, replicas = self.parts.mesh.replica_of_all, self.config.mesh.replicas
        before = self.totals.state()
        self.parts.engine.opening.begin(self.step, train=False)
        batches = list(held_out_batches(self.parts.samples, self.config.optim.batch, place, replicas))
        shared = nullcontext() if self.sites is None else self.sites.at_anchor()
        with shared, lend_rows(self.parts.update.rows, (batch.inputs for batch in batches)):
            passes, run = self.config.optim.accumulate, self.parts.engine.run
            losses = [([run(part, False) for part in batch.split(passes)], batch.labelled) for batch in batches]
        held_out = self.totals.mean_loss(losses)
        self.totals.leave_out(before)
        if not math.isnan(held_out):
            scores = self.totals.scores()
            self._write("eval", held_out=held_out, **scores, seconds=self.seconds, bytes=self.totals.bytes)
        return held_out

    def _plan_anew(self) -> None:
        """Measure and decide again, on all ranks after the same step, and go on with what fits the new plan; a
        checkpoint must follow."""
        old, typical = self.parts.decision, self.watch.typical
        assert old is not None
        self._note(f"step {self.step}: steps take {typical:.3g} s, not the planned {self.watch.expected:.3g} s")
        state = {name: value.clone() for name, value in self._state().items()}
        self.parts.close()
        self.parts = build(self.config, self.checked, self._note, mesh=self.parts.mesh)
        new = self.parts.decision
        assert new is not None
        if is_same(old, new):
            self._note("measured again, the plan is the same")
            new = replace(new, expected=typical)
            self.parts = replace(self.parts, decision=new)
        self.totals = self._totals()
        self.watch = self._watch()
        self._restore(carried_over(state, old, new), "the new plan")
        self._write("decision", **asdict(new))

    def _totals(self) -> Totals:
        return Totals(self.parts.engine, self.parts.update, self.config.mesh.dp * self.config.mesh.tp)

    def _watch(self) -> StepWatch:
        plan = self.parts.decision
        return StepWatch(None if plan is None else plan.expected or plan.seconds)

    def _note(self, text: str) -> None:
        """A line for the user: on the terminal of rank 0, and in the metrics."""
        self.say(text)
        if self.metrics is None:
            self.notes.append(text)
        self._write("note", text=text)

    def _write(self, kind: str, **values: Any) -> None:
        if self.metrics is not None:
            self.metrics.write(kind, self.step, **values)
            self.on_event({"kind": kind, "step": self.step, **values})

    # --- checkpoints

    def _save(self) -> None:
        self.checkpoints.save(self.step, self._state())

    def _state(self) -> dict[str, Tensor]:
        return self._snapshot().take(self.step, self.seconds, self.sites)

    def _load(self, path: Path) -> None:
        """Go on from the checkpoint; between sites last, since they must begin with the same weights."""
        snapshot = self._snapshot()
        found = self._restore(self.checkpoints.read(path, snapshot.wants), str(path))
        if self.config.mesh.sites > 1:
            self.sites = self._join_sites(found.began)
            if found.sites > 1:
                self.sites.load_state_dict(snapshot.placed(self.checkpoints.read(path, self.sites.wants)))
        self.say(f"resumed at step {self.step} from {path}")

    def _restore(self, state: dict[str, Tensor], source: str) -> Position:
        found = self._snapshot().put_back(state, source)
        self.step, self.seconds = found.step, found.seconds
        return found

    def _snapshot(self) -> Snapshot:
        return Snapshot(self.parts, self.totals, self._note)
