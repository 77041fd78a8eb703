"""Some steps of a row on real ranks, one stage each, over shaped links of the lab: what they take and send."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import ScheduleGPipe

from thinwire.bench.pipeline_ranks import loss_of
from thinwire.bench.scratch.corpus import text
from thinwire.bench.scratch.optimisers import Optimisers
from thinwire.bench.scratch.options import Scratch
from thinwire.bench.scratch.rows import Row
from thinwire.bench.scratch.training import bounded_stages, wire_of
from thinwire.boundaries.projected import BoundedStage
from thinwire.boundaries.synchronise import Boundaries
from thinwire.lab.network import Network
from thinwire.pipeline.pipeline import Pipeline
from thinwire.pipeline.stage import CompressedStage

RATE, LATENCY = "200mbit", "50ms"
PRELOAD = ("torch", "torch.distributed.pipelining", "thinwire.bench.scratch.ranks")
LIMIT = 300.0  # seconds for one row


def measure(row: Row, setup: Scratch, steps: int) -> dict[str, Any]:
    """Median seconds of so many steps after the first, and bytes that all ranks' frames and boundaries take in one."""
    with Network(hosts=setup.stages, rate=RATE, latency=LATENCY, preload=PRELOAD) as net:
        found = net.start(timed, row, setup, steps + 1, echo=False).wait(LIMIT)
    seconds = [max(at) for at in zip(*(one["seconds"] for one in found))][1:]
    sent = sum(one["sent"] for one in found) / (steps + 1)
    return {"row": row.name, "seconds": statistics.median(seconds), "sent": round(sent)}


def timed(row: Row, setup: Scratch, steps: int, microbatches: int = 1) -> dict[str, Any]:
    """What a rank runs: so many steps; their seconds, bytes sent, losses on the last rank, and its weights' sums."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = RankedStage(row, setup, microbatches)
    samples, _ = text(setup, 0)
    seconds, losses = [], []
    for step in range(steps):
        batch = samples[step * setup.rows : (step + 1) * setup.rows].long()
        dist.barrier()
        began = time.perf_counter()
        losses.append(rank.step(batch, setup.rate))
        seconds.append(time.perf_counter() - began)
    sent = rank.sent()
    weights = [p.detach().double().sum().item() for p in rank.module.parameters()]
    dist.barrier()
    dist.destroy_process_group()
    return {"seconds": seconds, "sent": sent, "losses": losses, "weights": weights}


class RankedStage:
    """This rank's stage of a row, under GPipe."""

    def __init__(self, row: Row, setup: Scratch, microbatches: int) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        self.first, self.last = rank == 0, rank == size - 1
        stages = bounded_stages(row, replace(setup, stages=size), 0)
        self.module = around = stages[rank]
        self.stage = CompressedStage(around, rank, size, torch.device("cpu"), wire=wire_of(row), seed=0)
        self.pipe = Pipeline([self.stage])
        self.boundaries = Boundaries([self.stage]) if isinstance(around, BoundedStage) else None
        self.schedule: Any = ScheduleGPipe(self.stage, microbatches, loss_fn=loss_of)
        self.optimiser = Optimisers(setup, [around])

    def step(self, batch: torch.Tensor, rate: float) -> float | None:
        """Train on a batch of bytes at a learning rate; the loss on the last rank."""
        losses: list[torch.Tensor] = []
        self.optimiser.zero_grad()
        x, y = batch[:, :-1], batch[:, 1:]
        more = {"tokens": x} if self.boundaries is not None or self.stage.told else {}
        with self.pipe.step():
            target = {"target": y, "losses": losses} if self.last else {}
            self.schedule.step(*((x,) if self.first else ()), **target, **more)
        self.optimiser.set_rate(rate)
        self.optimiser.step()
        if self.boundaries is not None:
            self.boundaries.step(rate)
        return float(torch.stack([loss.detach() for loss in losses]).mean()) if losses else None

    def sent(self) -> int:
        """Bytes of this rank so far: frames, and of learned boundaries."""
        stats = self.pipe.stats
        own = 0 if self.boundaries is None else self.boundaries.sent
        return stats.forward_bytes + stats.backward_bytes + own
