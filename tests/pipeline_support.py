"""What the pipeline cases share: schedules, blocks, a pipeline to run, its data, and what its two ends remember."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rank_cases import check, check_equal
from torch import Tensor, nn
from torch.distributed.pipelining import schedules as torch_schedules

from thinwire.codecs import Quantize
from thinwire.collectives.groups import Group
from thinwire.config.wire import Link, Wire
from thinwire.memory import Delta
from thinwire.parallel import CompressedStage, Pipeline
from thinwire.torch_private.pipelining import OpenStage

SCHEDULES = {  # name → (torch's class, stages per rank, V-shaped)
    "GPipe": (torch_schedules.ScheduleGPipe, 1, False),
    "1F1B": (torch_schedules.Schedule1F1B, 1, False),
    "Interleaved1F1B": (torch_schedules.ScheduleInterleaved1F1B, 2, False),
    "InterleavedZeroBubble": (torch_schedules.ScheduleInterleavedZeroBubble, 2, False),
    "ZBV": (torch_schedules.ScheduleZBVZeroBubble, 2, True),
    "DualPipeV": (torch_schedules.ScheduleDualPipeV, 2, True),
}
WIDTH, LENGTH = 16, 8
IDENTITY = Wire()
EIGHT = Link(Quantize(8, block=16))
DELTA = Wire(forward=Link(Quantize(4, block=16), Delta(cold=Quantize(8, block=16))), backward=EIGHT)


class Block(nn.Module):
    """float[rows, length, width] → the same shape."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 2 * width)
        self.outer = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.tanh(self.inner(self.norm(x))))


def block(index: int, make: Callable[[], nn.Module] = Block) -> nn.Module:
    """The module of a stage: the same weights for the same index."""
    with torch.random.fork_rng():
        torch.manual_seed(100 + index)
        return make()


def placed(name: str, ranks: int, rank: int) -> list[int]:
    _, virtual, v_shaped = SCHEDULES[name]
    if v_shaped:
        return [rank, 2 * ranks - 1 - rank]
    return [rank + ranks * v for v in range(virtual)]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


class Run:
    """One pipeline of a schedule: plain where `wire` is None."""

    def __init__(
        self, name: str, microbatches: int, wire: Wire | None, *, make: Callable[[int], nn.Module] = block,
        stage_options: dict[str, Any] | None = None, group: Group = None, **options: Any,
    ) -> None:  # fmt: skip
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        kind, virtual, _ = SCHEDULES[name]
        mine, count, device = placed(name, self.ranks, self.rank), self.ranks * virtual, torch.device("cpu")
        self.stages: list[Any] = []
        for index in mine:
            if wire is None:
                # torch's own stage, but for a greeting of 2.11 that V-shaped schedules send to themselves
                self.stages.append(OpenStage(make(index), index, count, device, group=group))
            else:
                more = {"group": group} | (stage_options or {})
                self.stages.append(CompressedStage(make(index), index, count, device, wire=wire, **more))
        given = self.stages[0] if virtual == 1 else self.stages
        self.schedule = kind(given, microbatches, loss_fn=loss_of)
        self.pipe = None if wire is None else Pipeline(self.stages, **options)
        self.first, self.last = 0 in mine, count - 1 in mine
        self.optimiser = torch.optim.SGD([p for s in self.stages for p in s.submod.parameters()], lr=0.05)

    def step(self, x: Tensor, y: Tensor, ids: Any = None, *, update: bool = False, **more: Any) -> list[float]:
        """Losses on the last stage's rank; gradients are left in place unless `update`."""
        losses: list[Tensor] = []
        self.optimiser.zero_grad()
        if self.pipe is None:
            self.torch_step(x, y, losses)
        else:
            with self.pipe.step(ids=ids if self.first else None, **more):
                self.torch_step(x, y, losses)
        if update and not (self.pipe is not None and self.pipe.skipped):
            self.optimiser.step()
        return [float(loss.detach()) for loss in losses]

    def torch_step(self, x: Tensor, y: Tensor, losses: list[Tensor]) -> None:
        """The schedule's own step, without the pipeline's bracket."""
        arguments = (x,) if self.first else ()
        targets = {"target": y, "losses": losses} if self.last else {}
        self.schedule.step(*arguments, **targets)

    def eval(self, x: Tensor, y: Tensor, **more: Any) -> Tensor | None:
        arguments, targets = (x,) if self.first else (), {"target": y} if self.last else {}
        if self.pipe is None:
            return self.schedule.eval(*arguments, **targets)
        with self.pipe.step(train=False, **more):
            return self.schedule.eval(*arguments, **targets)

    def gradients(self) -> dict[str, Tensor]:
        return {
            f"{stage.stage_index}.{name}": p.grad.clone()
            for stage in self.stages
            for name, p in stage.submod.named_parameters()
            if p.grad is not None
        }


def batch(rows: int, seed: int = 0, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, length, WIDTH, generator=g), torch.randn(rows, length, WIDTH, generator=g)


def fitting(name: str, ranks: int) -> list[int]:
    """Numbers of micro-batches the schedule allows, fewer than stages among them where it does."""
    stages = ranks * SCHEDULES[name][1]
    return {
        "GPipe": [1, ranks - 1, 2 * ranks + 1], "1F1B": [ranks, 2 * ranks + 1], "Interleaved1F1B": [ranks, 2 * ranks],
        "InterleavedZeroBubble": [ranks, 2 * ranks], "ZBV": [1, ranks, stages + 1], "DualPipeV": [stages, stages + 3],
    }[name]  # fmt: skip


class Data:
    """`samples` rows with ids; `epoch(e)` gives batches of them in a new order each epoch."""

    def __init__(self, samples: int, rows: int, length: int = LENGTH) -> None:
        self.x, _ = batch(samples, 7, length)
        self.y = torch.tanh(self.x.roll(1, dims=1))
        self.samples, self.rows = samples, rows

    def epoch(self, number: int) -> list[tuple[list[int], Tensor, Tensor]]:
        order = torch.randperm(self.samples, generator=torch.Generator().manual_seed(number))
        return [(part.tolist(), self.x[part], self.y[part]) for part in order.split(self.rows)]


def mean_loss(losses: list[float]) -> float:
    return sum(losses) / len(losses) if losses else math.nan


def train(run: Run, data: Data, epochs: range, **more: Any) -> float:
    """The last epoch's mean loss, on the last stage's rank."""
    losses = []
    for number in epochs:
        losses = [mean_loss(run.step(x, y, ids, update=True, **more)) for ids, x, y in data.epoch(number)]
    return mean_loss(losses)


def total(run: Run, *names: str) -> list[int]:
    """Counters of the pipeline summed over all ranks."""
    counts = torch.tensor([getattr(run.pipe.stats, name) for name in names])
    dist.all_reduce(counts)
    return counts.tolist()


def gathered(value: Any) -> list[Any]:
    """Everybody's value, by rank."""
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


def mirrors_differ(run: Run, ids: list[int]) -> list[str]:
    """Names of the boundaries whose two ends do not hold the same digests, or hold none."""
    mine = {(lane.name, lane.end): lane.digests(ids).tolist() for lane in run.pipe.lanes() if lane.per_sample}
    ends = {key: value for theirs in gathered(mine) for key, value in theirs.items()}
    names = {name for name, _ in ends}
    return [n for n in sorted(names) if ends[n, "send"] != ends[n, "recv"] or min(ends[n, "send"]) < 0]


def check_mirrors(what: str, run: Run, ids: list[int]) -> None:
    """Check that the two ends of every boundary remember the same of these samples."""
    differ = mirrors_differ(run, ids)
    check(not differ, f"{what}: mirrors differ at {differ}")


def check_counts(what: str, run: Run, **expected: int) -> None:
    """Check counters of the pipeline, summed over all ranks."""
    counts = dict(zip(expected, total(run, *expected)))
    check(counts == expected, f"{what}: {counts}, not {expected}")


def check_same_step(what: str, plain: Run, ours: Run, x: Tensor, y: Tensor, ids: list[int] | None = None) -> None:
    """Check that a step gives the losses and gradients of the plain stage, to the bit."""
    expected, losses = plain.step(x, y), ours.step(x, y, ids)
    check(losses == expected, f"{what}: losses {losses}, not {expected}")
    check_equal(what, ours.gradients(), plain.gradients())
