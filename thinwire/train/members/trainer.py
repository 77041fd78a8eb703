"""The training loop of a member: as thinwire/train/loop.py, in a group that others join and leave.

The samples of a step follow from its number, and are dealt to those who are there. So a step that does not count is
repeated with the same samples, and a run in which members come and go trains on the same batches as one in which
nobody does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.collectives.messages import gather
from thinwire.data_parallel.reducer import Reducer
from thinwire.distributed.values import gather_json
from thinwire.elastic.quorum import Quorum
from thinwire.errors import RunFailed
from thinwire.train.build import Checked, Parts, build
from thinwire.train.checkpoint import CHECKPOINTS, Checkpoints, refuse_second_run
from thinwire.train.config.sections import TrainConfig
from thinwire.train.data.batches import Batch, held_out_batches
from thinwire.train.learning_rate import rate
from thinwire.train.members.checks import alone
from thinwire.train.members.roll import Roll
from thinwire.train.members.state import Numbers, Shared, checkpoint, restore
from thinwire.train.metrics import Metrics
from thinwire.train.saving.publish import publish
from thinwire.train.stop import StopRequest
from thinwire.train.tune.selection import select

ATTEMPTS = 3
COUNTED = ("gradient_bytes", "raw_bytes", "healed_bytes")  # of all members, added up step by step


class MemberTrainer:
    """One member of a run whose members come and go.

    config: of the run. lighthouse: where members meet. host: this member's address. name: shown to the others.
    resume: go on from this member's newest checkpoint. say: called with a line for the user.
    """

    def __init__(
        self, config: TrainConfig, checked: Checked, lighthouse: str, host: str, name: str, *, resume: bool,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.config = config
        self.out = Path(config.run.out)
        self.name = name
        self.say = say
        self.on_event: Callable[[dict[str, Any]], None] = lambda event: None
        self.checkpoints = Checkpoints(self.out / CHECKPOINTS, config.run.keep)
        found = self.checkpoints.newest_sound(say)
        if found is not None:
            refuse_second_run(self.out, resume)
        self.parts: Parts = build(alone(config), checked, say)
        adam = self.parts.update.adam
        assert adam is not None
        self.adam = adam
        self.numbers: Numbers = dict.fromkeys((*COUNTED, "seconds"), 0.0)
        self.shared = Shared(self.parts.named, adam, self.numbers, self._taken)
        self.quorum = Quorum(
            {"thinwire train": self.shared}, lighthouse, host=host, min_members=config.run.min_replicas, name=name
        )
        wire = select(alone(config), checked.wire, None, self.parts.stages, self.parts.named)
        self.reducer = Reducer(self.parts.named.items(), wire, self.quorum, seed=config.run.seed)
        self.roll = Roll(config.run.slow)
        self.bad = 0  # attempts at this step that gave NaN or Inf
        self.met = -1  # the quorum whose members are known
        self.healed = False
        self.before = (0, 0, 0)  # this member's COUNTED at its last step that counted
        self.steps = self.parts.steps
        self.stop = StopRequest(True)
        self.resume = resume
        if found is not None:
            self._load(found)
        self.metrics: Metrics | None = None  # from the first meeting on, which says from which step this member goes on

    @property
    def step(self) -> int:
        """That counted, since the run began."""
        return self.quorum.steps

    def fit(self) -> float:
        """Train to the end of the run, or until asked to stop: the held-out loss (NaN without held-out samples)."""
        try:
            with self.stop:
                return self._fit()
        finally:
            self.quorum.close()
            self.reducer.close()
            self.parts.close()
            if self.metrics is not None:
                self.metrics.close()

    def _fit(self) -> float:
        config, held_out, begun = self.config.run, math.nan, False
        while self.step < self.steps and not self.stop.asked:
            if not self._train_step():
                continue
            if not begun:
                begun = True
                self._write("run", **self._about())
            if self.step == self.steps or (config.eval_every and self.step % config.eval_every == 0):
                held_out = self._evaluate()
            if self.step == self.steps or (config.checkpoint_every and self.step % config.checkpoint_every == 0):
                self._save()
        if self.step < self.steps:
            self._save()
            self.say(f"left at step {self.step}, with a checkpoint; the others go on. Come back with --resume")
            return held_out
        self._write("end", seconds=self.numbers["seconds"])
        publish(self.parts, self.out / "model", True)
        return held_out

    def _about(self) -> dict[str, Any]:
        about = self.parts.about()
        return about | {"mesh": about["mesh"] | {"dp": len(self.roll.names)}, "elastic": True, "member": self.name}

    # --- a step

    def _train_step(self) -> bool:
        """One step: did it count?"""
        began = time.perf_counter()
        self.quorum.begin()
        if self.metrics is None:
            self.metrics = Metrics(self.out, self.step if self.resume else None, self.config.run.loggers)
        lr = rate(self.config.optim, self.step, self.steps)
        told = self._exchanged()
        norm = self._norm()
        if not self.quorum.commit():
            self._check_losses(told)
            return False
        self.bad = 0
        self._apply(lr, norm)
        self.before = self._counts()
        seconds = time.perf_counter() - began
        self.numbers["seconds"] += seconds
        for name, total in zip(COUNTED, told[:, 2:].sum(0).tolist()):
            self.numbers[name] += total
        for line in self.roll.time(told[:, 1].tolist()):
            self._write("member", text=line)
        self._write(
            "step", loss=float(told[:, 0].mean()), **{name: int(self.numbers[name]) for name in COUNTED},
            members=self.roll.names, hit_rate=None, errors={}, lr=lr, norm=norm, skips=self.reducer.skips,
            tokens=self.config.optim.batch * self.config.data.seq_len, seconds=self.numbers["seconds"],
            step_seconds=seconds,
        )  # fmt: skip
        return True

    def _check_losses(self, told: Tensor) -> None:
        """RunFailed where the same samples have given NaN or Inf ATTEMPTS times in a row. told: as `_tell` gave it."""
        self.bad += bool(told.numel()) and not bool(told[:, 0].isfinite().all())
        if self.bad == ATTEMPTS:
            raise RunFailed(
                f"step {self.step + 1} gave NaN or Inf {ATTEMPTS} times in a row: lower [optim] lr, or clip"
            )

    def _exchanged(self) -> Tensor:
        """This member's part of a step, and its exchange with the others: what `_tell` gave, empty where a member was
        lost. An error in computing is this member's own, and ends it: repeating the step would not help."""
        try:
            self._meet()
            batch = self._deal()
        except RuntimeError as error:
            self.quorum.report(error)
            return torch.empty(0)
        began = time.perf_counter()
        loss = self._backward(batch)
        computed = (time.perf_counter() - began) / max(1, len(batch.ids))
        try:
            self.reducer.finish()
            return self._tell(loss, computed)
        except RuntimeError as error:
            self.quorum.report(error)
            return torch.empty(0)

    def _meet(self) -> None:
        """Learn who is there, where that has changed."""
        if self.quorum.number == self.met:
            return
        present = gather_json([self.name, self.quorum.healing.token[:8]], self.quorum)
        line = self.roll.meet([(name, life) for name, life in present])
        self.met = self.quorum.number
        if line is not None:
            self._write("member", text=line, members=self.roll.names)
            self.say(f"step {self.step}: {line}")
        if self.healed:
            self.healed = False
            self._write(
                "member", text=f"{self.name} took the others' state: {self.quorum.healing.received} bytes so far"
            )

    def _deal(self) -> Batch:
        """This member's part of the step's samples."""
        size, rank = self.quorum.world()
        self.parts.engine.loss.replicas = size
        self.parts.batches.share(rank, size)
        self.parts.batches.go_to(self.step)
        return self.parts.batches.next()

    def _backward(self, batch: Batch) -> float:
        """The member's loss as its share of the step's; gradients are in .grad."""
        for p in self.parts.named.values():
            p.grad = None
        if not len(batch.ids):  # more members than sequences in a step
            for p in self.parts.named.values():
                p.grad = torch.zeros_like(p)
            return 0.0
        parts = batch.split(self.config.optim.accumulate)
        losses = [self.parts.engine.run(part, True) for part in parts]
        return sum(float(loss) for loss in losses if loss is not None)

    def _tell(self, loss: float, seconds: float) -> Tensor:
        """[members, …]: loss, seconds per sequence, and COUNTED since the last step that counted, of everybody."""
        counts = [now - before for now, before in zip(self._counts(), self.before)]
        mine = torch.tensor([loss, seconds, *counts], dtype=torch.float64)
        return torch.stack(gather(mine, self.quorum)) if self.quorum.size > 1 else mine[None]

    def _counts(self) -> tuple[int, int, int]:
        exchange = self.reducer.exchange
        return exchange.sent, exchange.ring_bytes, self.quorum.healing.sent

    def _norm(self) -> float:
        norms = [
            torch.linalg.vector_norm(p.grad, dtype=torch.float64)
            for p in self.parts.named.values()
            if p.grad is not None
        ]
        return float(torch.stack(norms).norm()) if norms else math.nan

    def _apply(self, lr: float, norm: float) -> None:
        clip = self.config.optim.clip
        if clip and norm > clip:
            for p in self.parts.named.values():
                if p.grad is not None:
                    p.grad.mul_(clip / norm)
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()

    def _taken(self) -> None:
        self.healed = True

    def _evaluate(self) -> float:
        """The mean held-out loss. Every member computes all of it: the weights are the same."""
        engine, config = self.parts.engine, self.config
        replicas, engine.loss.replicas = engine.loss.replicas, 1
        total, labels = 0.0, 0
        for batch in held_out_batches(self.parts.samples, config.optim.batch):
            losses = [engine.run(part, False) for part in batch.split(config.optim.accumulate)]
            total += sum(float(loss) for loss in losses if loss is not None) * batch.labelled
            labels += batch.labelled
        engine.loss.replicas = replicas
        held_out = total / labels if labels else math.nan
        if labels:
            sent = int(self.numbers["gradient_bytes"])
            self._write("eval", held_out=held_out, seconds=self.numbers["seconds"], bytes=sent)
        return held_out

    def _write(self, kind: str, **values: Any) -> None:
        assert self.metrics is not None, "before the first meeting"
        self.metrics.write(kind, self.step, **values)
        self.on_event({"kind": kind, "step": self.step, **values})

    # --- checkpoints

    def _save(self) -> None:
        batches = self.quorum.batches
        numbers = self.numbers | {"step": self.step, "batches": batches}
        numbers |= {f"data {name}": value for name, value in self.parts.batches.state_dict().items()}
        self.checkpoints.save(self.step, checkpoint(self.shared, self.reducer.exchange, numbers))

    def _load(self, path: Path) -> None:
        state = self.checkpoints.read(path, lambda name: True)
        numbers = restore(self.shared, self.reducer.exchange, state, str(path))
        self.parts.batches.load_state_dict(
            {name.removeprefix("data "): int(value) for name, value in numbers.items() if name.startswith("data ")}
        )
        self.numbers.update({name: numbers[name] for name in self.numbers})
        self.quorum.go_on_from(int(numbers["step"]), int(numbers["batches"]))
        self.say(f"resumed at step {self.step} from {path}")
