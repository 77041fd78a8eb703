"""The training loop of a member's rank: as thinwire/train/loop.py, in a group that others join and leave.

The samples of a step follow from its number, and are dealt to those who are there. So a step that does not count is
repeated with the same samples, and a run in which members come and go trains on the same batches as one in which
nobody does.

A member is one rank, or a pipeline of several: torch's default process group. Its ranks always do the same: all take
part in a step or none, whatever happens to the connections of one of them, and leave together.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.messages import gather
from thinwire.distributed.values import gather_json
from thinwire.elastic.quorum import Quorum
from thinwire.errors import InvalidExchange, RunFailed
from thinwire.train.build import Checked, Parts, build
from thinwire.train.checkpoint import CHECKPOINTS, Checkpoints, refuse_second_run
from thinwire.train.config.sections import TrainConfig
from thinwire.train.data.batches import Batch
from thinwire.train.learning_rate import rate
from thinwire.train.members.checks import alone, unit
from thinwire.train.members.clock import Clock
from thinwire.train.members.gradients import COUNTED, Gradients
from thinwire.train.members.inside import any_rank, held_out_loss
from thinwire.train.members.late import AWAY, Late, comes_later
from thinwire.train.members.roll import Roll
from thinwire.train.members.state import Numbers, Shared, checkpoint, restore
from thinwire.train.metrics import Metrics
from thinwire.train.saving.publish import publish
from thinwire.train.stop import StopRequest
from thinwire.train.tune.selection import select

ATTEMPTS = 3
PATIENCE = 60.0  # seconds for which a member that is through serves its state to who is fetching it


class MemberTrainer:
    """One rank of a member of a run whose members come and go.

    config: of the run. lighthouse: where members meet. host: this rank's address. name: of the member, shown to the
    others. resume: go on from this member's newest checkpoint. local_rank: this rank's number on its machine. say:
    called on the member's first rank with a line for the user.
    """

    def __init__(
        self, config: TrainConfig, checked: Checked, lighthouse: str, host: str, name: str, *, resume: bool,
        say: Callable[[str], None], local_rank: int = 0,
    ) -> None:  # fmt: skip
        self.config = config
        self.out = Path(config.run.out)
        self.name = name
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.say = say if self.rank == 0 else lambda _: None
        self.on_event: Callable[[dict[str, Any]], None] = lambda event: None
        self.checkpoints = Checkpoints(self.out / CHECKPOINTS, config.run.keep, local_rank)
        found = self.checkpoints.newest_sound(self.say)
        if found is not None:
            refuse_second_run(self.out, resume)
        self.parts: Parts = build(alone(config), checked, self.say)
        adam = self.parts.update.adam
        assert adam is not None
        self.numbers: Numbers = dict.fromkeys((*COUNTED, "seconds"), 0.0)
        self.shared = Shared(
            self.parts.named, adam, self.numbers, comes_later(config.run.heal, self.parts.named), self._taken
        )
        self.quorum = Quorum(
            {"thinwire train": self.shared}, lighthouse, host=host, min_members=config.run.min_replicas, name=name,
            inside=None,
        )  # fmt: skip
        wire = select(alone(config), checked.wire, None, self.parts.stages, self.parts.named)
        self.gradients = Gradients(self.parts, wire, self.quorum)
        means = self.out / f"means-{self.rank}"
        self.late = Late(self.shared, self.quorum.healing, means, self.gradients.optimise)
        self.roll = Roll(config.run.slow)
        self.bad = 0  # attempts at this step that gave NaN or Inf
        self.met = -1  # the quorum whose members are known
        self.healed = False
        self.before = torch.zeros(len(COUNTED), dtype=torch.float64)  # this rank's at its last step that counted
        self.clock = Clock()
        self.steps = self.parts.steps
        self.stop = StopRequest(self.rank == 0)
        self.leaves = False  # after this step, on all ranks of the member
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
            for part in (self.late, self.quorum, self.gradients, self.parts, self.metrics):
                if part is not None:
                    part.close()

    def _fit(self) -> float:
        config, held_out, begun = self.config.run, math.nan, False
        while self.step < self.steps and not self.leaves:
            if not self._train_step():
                continue
            if not begun:
                begun = True
                about = self.parts.about()
                mesh = about["mesh"] | {"dp": len(self.roll.names)}
                self._write("run", **about | {"mesh": mesh, "elastic": True, "member": self.name})
            if not self.late.is_whole or self.step == self.steps:
                continue
            with self.clock.paused():
                if config.eval_every and self.step % config.eval_every == 0:
                    held_out = self._evaluate()
                if config.checkpoint_every and self.step % config.checkpoint_every == 0:
                    self._save()
        if self.step < self.steps:
            if self.late.is_whole:
                self._save()
            left = "with a checkpoint" if self.late.is_whole else "before the others' state was here"
            self.say(f"left at step {self.step}, {left}; the others go on. Come back with --resume")
            return held_out
        self.late.offer(self.step)
        self._note(self.late.wait_to_the_end(self.step, PATIENCE))
        held_out = self._evaluate()
        self._save()
        self._write("end", seconds=self.numbers["seconds"])
        publish(self.parts, self.out / "model", self.checkpoints.shared)
        self.quorum.healing.finish_serving(PATIENCE)
        return held_out

    # --- a step

    def _train_step(self) -> bool:
        """One step: did it count?"""
        self.quorum.begin()
        if self.met < 0:
            self.clock.start()
        if self.metrics is None and self.rank == 0:
            self.metrics = Metrics(self.out, self.step if self.resume else None, self.config.run.loggers)
        if not self._meet():
            self.leaves = any_rank(self.stop.asked)
            self.quorum.commit()
            return False
        self.late.offer(self.step)
        self._note(self.late.proceed(self.step))
        at, lr = self.step, rate(self.config.optim, self.step, self.steps)
        told, norm = self._exchanged()
        counts = self.quorum.commit()
        self.gradients.settle(counts, lr)
        if not counts:
            self._check_losses(told)
            return False
        if self.late.is_whole:
            self.gradients.optimise(lr, norm)
        else:
            self.late.keep(at, lr, norm)
        self.late.members = [bool(whole) for whole in told[:, 2]]
        self.bad = 0
        self.before = self.gradients.counts()
        self.clock.count()
        seconds = float(told[:, 3].max())
        self.numbers["seconds"] += seconds
        for name, total in zip(COUNTED, told[:, 4:].sum(0).tolist()):
            self.numbers[name] += total
        for line in self.roll.time(told[:, 1].tolist()):
            self._write("member", text=line)
        self._write(
            "step", loss=float(told[:, 0].mean()), **{name: int(self.numbers[name]) for name in COUNTED},
            members=self.roll.names, hit_rate=None, errors={}, lr=lr, norm=norm, skips=self.gradients.skips,
            tokens=self.config.optim.batch * self.config.data.seq_len, seconds=self.numbers["seconds"],
            step_seconds=seconds,
        )  # fmt: skip
        return True

    def _check_losses(self, told: Tensor) -> None:
        """RunFailed where the same samples have given NaN or Inf ATTEMPTS times in a row. told: as `_tell` gave it."""
        self.bad += bool(told.numel()) and not bool(told[:, 0].isfinite().all())
        if self.bad == ATTEMPTS:
            raise RunFailed(f"step {self.step + 1} gave NaN or Inf {ATTEMPTS} times in a row: lower [optim] lr")

    def _meet(self) -> bool:
        """Learn who is there, where that has changed. False: no rank of this member takes part in the step."""
        if self.quorum.number == self.met:
            return True
        present: list[Any] = []
        if any_rank(not self.late.is_whole) and self.late.is_whole:
            self.late.begin()  # another rank of this member waits for its part
        try:
            present = gather_json([self.name, self.quorum.healing.token[:8], *self.late.about()], self.quorum)
        except RuntimeError as error:
            self.quorum.report(error)
        lost = "another rank of this member has no connections" if any_rank(not present) else ""
        if why := lost or self.late.meet([about for _, _, *about in present], AWAY):
            self.quorum.report(InvalidExchange(why))
            return False
        self.met = self.quorum.number
        line = self.roll.meet([(name, life) for name, life, *_ in present])
        if line is not None:
            self._write("member", text=line, members=self.roll.names, joined=self.healed)
            self.say(f"step {self.step}: {line}")
        if self.healed:
            self.healed = False
            took = f"took the others' state: {self.quorum.healing.received} bytes so far"
            self._note(took if self.late.is_whole else "is there, without samples until the others' state is here")
        return True

    def _exchanged(self) -> tuple[Tensor, float]:
        """This rank's part of a step, and its exchange with the others: what `_tell` gave, and the gradient's norm. An
        error in computing is the member's own, and ends it: repeating the step would not help."""
        batch = self._deal()
        began = time.perf_counter()
        loss = self.gradients.backward(batch)
        computed = (time.perf_counter() - began) / len(batch.ids) if len(batch.ids) else 0.0
        faults = self.gradients.faults()
        self.gradients.exchange()
        own = [self.parts.update.tied_checksum(), loss, self.gradients.squares(), faults, self.stop.asked]
        mine = torch.cat((torch.tensor(own, dtype=torch.float64), self.gradients.counts() - self.before))
        of_ranks = torch.stack(gather(mine, None))
        if len({checksum for checksum in of_ranks[:, 0].tolist() if checksum}) > 1:
            raise RunFailed("the copies of the tied embedding differ inside this member: start it again")
        loss, squares, faults, stop, *total = of_ranks[:, 1:].sum(0).tolist()
        self.leaves = stop > 0
        if faults:
            self.quorum.report(InvalidExchange("messages inside this member were damaged"))
        return self._tell([loss, computed, self.late.is_whole, self.clock.look(), *total]), math.sqrt(squares)

    def _deal(self) -> Batch:
        """This member's part of the step's samples."""
        size, place = self.quorum.place()
        self.parts.engine.loss.replicas = size
        self.late.share(self.parts.batches, place, unit(self.config))
        self.parts.batches.go_to(self.step)
        return self.parts.batches.next()

    def _tell(self, about: list[float]) -> Tensor:
        """[members, …]: loss, seconds per sequence, is it whole, seconds and COUNTED since the last step that counted,
        of everybody; empty where somebody was lost. about: this member's."""
        mine = torch.tensor(about, dtype=torch.float64)
        try:
            return torch.stack(gather(mine, self.quorum)) if self.quorum.size > 1 else mine[None]
        except RuntimeError as error:
            self.quorum.report(error)
            return torch.empty(0)

    def _taken(self, is_whole: bool) -> None:
        self.healed = True
        self.clock.start()
        if not is_whole:
            self.late.begin()

    def _evaluate(self) -> float:
        """The mean held-out loss. Every member computes all of it: the weights are the same."""
        held_out = held_out_loss(self.parts, self.config)
        if not math.isnan(held_out):
            sent = int(sum(self.numbers[name] for name in COUNTED[:4]))
            self._write("eval", held_out=held_out, seconds=self.numbers["seconds"], bytes=sent)
        return held_out

    def _note(self, what: str) -> None:
        """Of this member, where there is anything."""
        if what:
            self._write("member", text=f"{self.name} {what}")

    def _write(self, kind: str, **values: Any) -> None:
        if self.metrics is not None:
            self.metrics.write(kind, self.step, **values)
            self.on_event({"kind": kind, "step": self.step, **values})

    # --- checkpoints

    def _save(self) -> None:
        numbers = self.numbers | {"step": self.step, "batches": self.quorum.batches, "pp": self.ranks}
        numbers |= {f"data {name}": value for name, value in self.parts.batches.state_dict().items()}
        self.checkpoints.save(self.step, checkpoint(self.shared, self.gradients.state_dict(self.rank), numbers))

    def _load(self, path: Path) -> None:
        state = self.checkpoints.read(path, lambda name: True)
        numbers = restore(self.shared, state, self.ranks, str(path))
        self.gradients.load_state_dict(state, self.rank)
        self.parts.batches.load_state_dict(
            {name.removeprefix("data "): int(value) for name, value in numbers.items() if name.startswith("data ")}
        )
        self.numbers.update({name: numbers.get(name, 0.0) for name in self.numbers})
        self.quorum.go_on_from(int(numbers["step"]), int(numbers["batches"]))
        self.say(f"resumed at step {self.step} from {path}")
