"""What every rank of the pipeline tests runs; importable by the lab's forked ranks."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import schedules as torch_schedules

from thinwire.codecs import Quantize
from thinwire.config.wire import Link, Wire
from thinwire.memory import Delta
from thinwire.parallel import CompressedStage, Pipeline
from thinwire.torch_private.pipelining import OpenStage

SCHEDULES = {  # name → (torch's class, stages a rank, V-shaped)
    "GPipe": (torch_schedules.ScheduleGPipe, 1, False),
    "1F1B": (torch_schedules.Schedule1F1B, 1, False),
    "Interleaved1F1B": (torch_schedules.ScheduleInterleaved1F1B, 2, False),
    "InterleavedZeroBubble": (torch_schedules.ScheduleInterleavedZeroBubble, 2, False),
    "ZBV": (torch_schedules.ScheduleZBVZeroBubble, 2, True),
    "DualPipeV": (torch_schedules.ScheduleDualPipeV, 2, True),
}
WIDTH, LENGTH = 16, 8
IDENTITY = Wire()
DELTA = Wire(
    forward=Link(Quantize(4, block=16), Delta(cold=Quantize(8, block=16))), backward=Link(Quantize(8, block=16))
)


def start() -> tuple[int, int]:
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=90))
    return dist.get_world_size(), dist.get_rank()


class Block(nn.Module):
    """float[rows, length, width] → the same shape."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.tanh(self.inner(self.norm(x))))


def block(index: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(100 + index)
        return Block()


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
        stage_options: dict[str, Any] | None = None, group: Any = None, **options: Any,
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
            self._torch(x, y, losses)
        else:
            with self.pipe.step(ids=ids if self.first else None, **more):
                self._torch(x, y, losses)
        if update and not (self.pipe is not None and self.pipe.skipped):
            self.optimiser.step()
        return [float(loss.detach()) for loss in losses]

    def _torch(self, x: Tensor, y: Tensor, losses: list[Tensor]) -> None:
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


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def fitting(name: str, ranks: int) -> list[int]:
    """Numbers of micro-batches the schedule allows, fewer than stages among them where it does."""
    stages = ranks * SCHEDULES[name][1]
    return {
        "GPipe": [1, ranks - 1, 2 * ranks + 1], "1F1B": [ranks, 2 * ranks + 1], "Interleaved1F1B": [ranks, 2 * ranks],
        "InterleavedZeroBubble": [ranks, 2 * ranks], "ZBV": [1, ranks, stages + 1], "DualPipeV": [stages, stages + 3],
    }[name]  # fmt: skip


def identity() -> list[str]:
    """Every schedule, several numbers of micro-batches, two steps: gradients bitwise those of the plain stage."""
    ranks, _ = start()
    wrong = []
    for name in SCHEDULES:
        for microbatches in fitting(name, ranks):
            plain, ours = Run(name, microbatches, None), Run(name, microbatches, IDENTITY)
            for step in range(2):
                x, y = batch(2 * microbatches, step)
                losses = [run.step(x, y) for run in (plain, ours)]
                if losses[0] != losses[1] or not same(plain.gradients(), ours.gradients()):
                    wrong.append(f"{name}, {microbatches} micro-batches, step {step}")
            if ours.pipe is not None and ours.pipe.stats.skips:
                wrong.append(f"{name}: a step was skipped")
    return wrong
