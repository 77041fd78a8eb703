"""Cases of the boundary tests: learned boundaries between real ranks beside straight-line code on one."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from pipeline_support import LENGTH, SCHEDULES, WIDTH, Run, batch, block, gathered, loss_of, placed
from rank_cases import check, check_equal, refused
from torch import Tensor, nn

from thinwire.boundaries.projected import Projected
from thinwire.boundaries.stiefel import EntryAdam, StiefelAdam, orthonormal
from thinwire.boundaries.synchronise import Boundaries
from thinwire.codecs import Quantize, Rotated
from thinwire.codecs import frame as framing
from thinwire.collectives.groups import Group
from thinwire.config.wire import Link, Wire
from thinwire.errors import RunFailed

RATE, TOKENS = 0.05, 11
SMALL = Projected(4, rate=0.5)
ANCHORED = Projected(4, anchors=3, vocabulary=TOKENS, rate=0.5)
TABLED = Projected(4, vocabulary=TOKENS, rate=0, tables=True)  # nothing is synchronised
BOTH = replace(ANCHORED, tables=True)
EMBEDDING = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
CODED = Wire(forward=Link(Rotated(Quantize(4, block=16))), backward=Link(Quantize(6, block=16)))


class Bounded(Run):
    """A pipeline whose boundaries learn."""

    def __init__(
        self, name: str, microbatches: int, config: Projected, wire: Wire | None = None, group: Group = None,
        replicas: Group = None,
    ) -> None:  # fmt: skip
        ranks = dist.get_world_size(group)
        self.count = ranks * SCHEDULES[name][1]
        rank_of = {stage: rank for rank in range(ranks) for stage in placed(name, ranks, rank)}
        self.inside = [s for s in range(self.count - 1) if rank_of[s] == rank_of[s + 1]]

        def make(index: int) -> nn.Module:
            return config.around(block(index), index, self.count, WIDTH, inside=self.inside)

        super().__init__(name, microbatches, wire or Wire(), make=make, group=group)
        self.boundaries = Boundaries(self.stages, replicas)
        for stage in self.stages:
            stage.submod.fill_table(EMBEDDING)
        self.optimiser = torch.optim.SGD([p for stage in self.stages for p in stage.submod.trained()], lr=RATE)

    def train(self, x: Tensor, y: Tensor, tokens: Tensor | None = None, replicas: Group = None) -> float | None:
        """One step; gradients of blocks and tables are averaged over replicas, if any. The loss, on the last stage."""
        self.optimiser.zero_grad()
        more = {} if tokens is None else {"tokens": tokens}
        losses: list[Tensor] = []
        with self.pipe.step():
            targets = {"target": y, "losses": losses} if self.last else {}
            self.schedule.step(*((x,) if self.first else ()), **targets, **more)
        for parameter in (p for p in self.optimiser.param_groups[0]["params"] if replicas is not None):
            dist.all_reduce(parameter.grad, group=replicas)
            parameter.grad /= dist.get_world_size(replicas)
        self.optimiser.step()
        self.boundaries.step(RATE)
        return float(torch.stack(losses).mean()) if losses else None

    def weights(self) -> dict[str, Tensor]:
        """Of this rank's blocks, tables and ends, by stage and boundary."""
        found = {
            f"{stage.stage_index}.{name}": value.detach().clone()
            for stage in self.stages
            for name, value in stage.submod.module.named_parameters()
        }
        tables = {stage.stage_index: stage.submod.table for stage in self.stages}
        found |= {f"{index}.table": t.detach().clone() for index, t in tables.items() if t is not None}
        for ends in (self.boundaries.receivers, self.boundaries.senders):
            for index, end in ends.items():
                found |= {f"boundary {index}.{n}": p.detach().clone() for n, p in end.named_parameters()}
        return found


class Straight:
    """The same model and rule in one process: one subspace per boundary, whose gradient autograd adds up."""

    def __init__(self, like: Bounded, config: Projected) -> None:
        self.config = config
        self.blocks = [block(index) for index in range(like.count)]
        boundaries = [index for index in range(like.count - 1) if index not in like.inside]
        self.ends: Any = {i: config.around(nn.Identity(), 0, 2, WIDTH).out for i in boundaries}
        self.rules: Any = {
            i: {n: (StiefelAdam if n == "basis" else EntryAdam)(p.detach()) for n, p in end.named_parameters()}
            for i, end in self.ends.items()
        }
        outside = torch.eye(WIDTH) - orthonormal(WIDTH, config.rank, 0) @ orthonormal(WIDTH, config.rank, 0).T
        self.tables = {i: nn.Parameter(EMBEDDING @ outside) for i in boundaries if config.tables}
        own = [*(p for one in self.blocks for p in one.parameters()), *self.tables.values()]
        self.optimiser = torch.optim.SGD(own, lr=RATE)

    def train(self, x: Tensor, y: Tensor, tokens: Tensor | None = None) -> float:
        self.optimiser.zero_grad()
        for index, one in enumerate(self.blocks):
            x = one(x)
            if index in self.ends:
                x = self.ends[index].expand(self.ends[index].project(x, tokens), tokens)
            if index in self.tables:
                x = x + self.tables[index][tokens]
        loss = loss_of(x, y)
        loss.backward()
        self.optimiser.step()
        for index, end in self.ends.items():
            for name, parameter in end.named_parameters():
                rate = RATE * self.config.rate if name == "basis" else RATE
                if rate:
                    parameter.data = self.rules[index][name].step(parameter.detach(), parameter.grad, rate)
                parameter.grad = None
        return float(loss.detach())

    def weights(self) -> dict[str, Tensor]:
        found = {f"{i}.{n}": p.detach() for i, one in enumerate(self.blocks) for n, p in one.named_parameters()}
        found |= {f"{i + 1}.table": table.detach() for i, table in self.tables.items()}
        return found | {f"boundary {i}.{n}": p.detach() for i, e in self.ends.items() for n, p in e.named_parameters()}


def check_ends(what: str, run: Bounded) -> None:
    """Check that both ends of every boundary hold the same bits, and that its basis is orthonormal and has moved."""
    mine = {n: v for n, v in run.weights().items() if n.startswith("boundary")}
    everyone = gathered({n: v.numpy() for n, v in mine.items()})
    for name, value in mine.items():
        copies = [torch.from_numpy(other[name]) for other in everyone if name in other]
        check(len(copies) >= 2 and all(torch.equal(value, c) for c in copies), f"{what}: ends differ in {name}")
    for name, value in ((n, v) for n, v in mine.items() if n.endswith("basis")):
        off = (value.T @ value - torch.eye(value.shape[1])).abs().max()
        check(off < 1e-5, f"{what}: {name} is off orthonormal by {off:.1e}")
        start = SMALL.around(nn.Identity(), 0, 2, WIDTH).out.basis  # of every configuration here
        check((value - start).abs().max() > 1e-2, f"{what}: {name} has not moved")


def trains_as_straight_line_code(name: str) -> None:
    """Under every schedule: weights, bases and both ends after four steps."""
    microbatches = {"DualPipeV": 2 * 2 * dist.get_world_size()}.get(name, 4)
    run = Bounded(name, microbatches, SMALL)
    straight = Straight(run, SMALL)
    for step in range(4):
        x, y = batch(2 * microbatches, step)
        run.train(x, y)
        straight.train(x, y)
    check_equal(name, run.weights(), straight.weights(), 2e-5)
    check_ends(name, run)
    check(run.boundaries.sent > 0, "no bytes were counted")


def tokens_train_as_straight_line_code(name: str, config: Projected) -> None:
    """Token ids are given to every stage; both factors of anchors learn at both ends, and tables at the receiver."""
    run = Bounded(name, 4, config)
    straight = Straight(run, config)
    begun = run.boundaries.sent
    for step in range(4):
        x, y = batch(8, step)
        tokens = torch.randint(TOKENS, (8, LENGTH), generator=torch.Generator().manual_seed(step))
        loss, expected = run.train(x, y, tokens), straight.train(x, y, tokens)
        check(loss is None or abs(loss - expected) < 2e-5, f"step {step}: the loss is {loss}, not {expected}")
    check_equal(name, run.weights(), straight.weights(), 2e-5)
    tables = [v for n, v in run.weights().items() if n.endswith("table")]
    check(len(tables) == len(run.boundaries.receivers) * config.tables, f"there are {len(tables)} tables")
    if not config.learns:
        check(run.boundaries.sent == begun, "boundaries that do not learn have sent something")
        return
    check_ends(name, run)
    lifts = [v.abs().max() for n, v in run.weights().items() if n.endswith("lift")]
    check(lifts and min(lifts) > 1e-2, f"anchors have not moved: {lifts}")


def resumed_boundaries_have_the_same_bits() -> None:
    """Coded each way, learning in every second step; weights, pipeline and boundaries are saved after three steps."""
    config = Projected(4, rate=0.5, every=2)
    whole, again = Bounded("ZBV", 4, config, CODED), Bounded("ZBV", 4, config, CODED)
    for step in range(3):
        whole.train(*batch(8, step))
    for stage, new in zip(whole.stages, again.stages):
        new.submod.module.load_state_dict(stage.submod.module.state_dict())
    again.pipe.load_state_dict(whole.pipe.state_dict())
    again.boundaries.load_state_dict(whole.boundaries.state_dict())
    moved = []
    for step in range(3, 6):
        before = whole.weights()
        whole.train(*batch(8, step))
        again.train(*batch(8, step))
        check_equal(f"step {step}", again.weights(), whole.weights())
        moved.append(any(not torch.equal(before[n], v) for n, v in whole.weights().items() if n.endswith("basis")))
    check(moved == [False, True, False], f"learning in every second step moved bases in {moved}")
    with refused("basis is not there, here it is (16, 4)"):
        again.boundaries.load_state_dict({"steps": torch.tensor(1)})


def skipped_step_moves_nothing() -> None:
    """A NaN on the first stage: the step is rolled back, and no end has a gradient left."""
    run = Bounded("1F1B", 4, SMALL)
    x, y = batch(8)
    before = run.weights()
    with run.pipe.step():
        run.torch_step(x * torch.nan, y, [])
    run.boundaries.step(RATE, skipped=run.pipe.skipped)
    ends = [*run.boundaries.senders.values(), *run.boundaries.receivers.values()]
    check(run.pipe.skipped and all(p.grad is None for end in ends for p in end.parameters()), "gradients were kept")
    check_equal("skipped", run.weights(), before)


def damaged_message_is_found() -> None:
    """A flipped bit between the ends: the rank that receives it says so."""
    run = Bounded("1F1B", 4, SMALL)
    seal = framing.seal

    def damaged(header: framing.Header, frame: Tensor) -> Tensor:
        sealed = seal(header, frame)
        sealed[40] ^= 1
        return sealed

    x, y = batch(8)
    with run.pipe.step():
        run.torch_step(x, y, [])
    with mock.patch.object(framing, "seal", damaged):
        gradients = {i: torch.ones(WIDTH * SMALL.rank) for i in run.boundaries.receivers}
        empty = {i: torch.empty(WIDTH * SMALL.rank) for i in run.boundaries.senders}
        with refused("cannot be used: frame is damaged", RunFailed) if empty else contextlib.nullcontext():
            run.boundaries.links.move(empty, gradients, up=True)


def replicas_train_as_one(config: Projected) -> None:
    """dp 2 × pp 2: gradients of both ends are averaged over replicas, and all four ranks hold one basis."""
    rank = dist.get_rank()
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    replica, position = divmod(rank, 2)
    run = Bounded("1F1B", 2, config, group=rows[replica], replicas=columns[position])
    straight = Straight(run, config)
    for step in range(4):
        x, y = batch(8, step)
        tokens = torch.randint(TOKENS, (8, LENGTH), generator=torch.Generator().manual_seed(step))
        mine = slice(4 * replica, 4 * replica + 4)
        given = (tokens,) if config.anchors else ()
        run.train(x[mine], y[mine], *(t[mine] for t in given), replicas=columns[position])
        straight.train(x, y, *given)
    check_equal("dp 2 × pp 2", run.weights(), straight.weights(), 2e-5)
    check_ends("dp 2 × pp 2", run)


def ranks_must_agree() -> None:
    """Another rank of the basis on the last stage."""
    config = Projected(4 if dist.get_rank() + 1 < dist.get_world_size() else 5)
    with refused("differs from rank 0"):
        Bounded("1F1B", 4, config)
