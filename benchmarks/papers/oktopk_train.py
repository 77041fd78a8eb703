"""One run of oktopk.py: all workers in one process, with one copy of the weights, which are equal on all of them.

Every step computes each worker's gradient of its own batch, one after the other (on a card that is one CUDA graph).
Then the gradients are averaged as the library's channels and collectives do, with every worker's own residual: all
workers at once where that is known to have their bits (oktopk_fast.py, oktopk_rows.py), else between members of an
in-process group, as it would be between processes.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from oktopk_fast import AllAtOnce, is_published
from oktopk_members import Workers
from oktopk_methods import METHODS
from oktopk_rows import Rows, is_known
from oktopk_tasks import Batch, Task
from torch import Tensor, nn

from thinwire.collectives import OkTopk
from thinwire.collectives.oktopk import put
from thinwire.config.wire import Reduction
from thinwire.data_parallel.gradient_units import is_exact
from thinwire.kernels import select

RAMP = 0.05  # of the steps the rate rises; a cosine then takes it to zero
PROBES = 20  # measurements of counts and ξ over a run
CURVE = 10  # of what is held out


@dataclass(frozen=True)
class Run:
    """task, method: names. seed: of weights, order and augmentation. workers: that share a batch. epochs: the length of
    the schedule. rate: times the task's learning rate."""

    task: str
    method: str
    seed: int
    workers: int
    epochs: float
    rate: float = 1.0

    def key(self) -> tuple[Any, ...]:
        return tuple(asdict(self).values())


class Weights:
    """A model whose parameters lie one after the other in one vector: those that are exact last, vectors at the end."""

    def __init__(self, model: nn.Module, reduction: Reduction) -> None:
        self.model = model
        named = sorted(
            model.named_parameters(), key=lambda pair: (is_exact(pair[0], pair[1].shape, reduction), pair[1].dim() <= 1)
        )
        self.shapes = {name: tuple(p.shape) for name, p in named}
        self.parameters = [p for _, p in named]
        self.flat = nn.Parameter(torch.cat([p.detach().reshape(-1) for p in self.parameters]))
        place = 0
        for p in self.parameters:
            p.data = self.flat.data[place : place + p.numel()].view(p.shape)
            place += p.numel()
        self.casts: list[tuple[Tensor, Tensor]] = []  # what the model uses, and the part of the vector that it is of

    def halve_convolutions(self) -> None:
        """The model's convolutions take bfloat16 copies, as autocast would make anew for every worker and pass."""
        for i, (name, p) in enumerate(zip(self.shapes, self.parameters)):
            if p.dim() == 4:
                half = nn.Parameter(p.detach().to(torch.bfloat16, memory_format=torch.channels_last))
                owner, _, own = name.rpartition(".")
                setattr(self.model.get_submodule(owner), own, half)
                self.parameters[i] = half
                self.casts.append((half.data, p.data))

    def refresh(self) -> None:
        """Copies as the weights are now."""
        for half, whole in self.casts:
            half.copy_(whole)


class Gradients:
    """float[workers, n]: every worker's gradient of its batch; `how` says whether a CUDA graph computes them."""

    def __init__(self, task: Task, weights: Weights, workers: int, example: Batch) -> None:
        self.task, self.weights, self.workers = task, weights, workers
        self.flat = torch.zeros(workers, weights.flat.numel(), device=task.device)
        self.losses = torch.zeros(workers, device=task.device)
        matrices = [(shape, math.prod(shape)) for shape in weights.shapes.values() if len(shape) > 1]
        ends = [0, *itertools.accumulate(count for _, count in matrices)]
        self.matrices = [(slice(a, b), shape) for a, b, (shape, _) in zip(ends, ends[1:], matrices)]
        self.vectors = ends[-1]  # the vectors' place
        self.how, self.graph = "eager", None  # or a CUDA graph
        if task.is_static and task.device.type == "cuda":
            self.batch = [torch.empty_like(part) for part in example]
            self._take(example)
            self._try_graphs()

    def __call__(self, batch: Batch) -> Tensor:
        if self.graph is not None:
            self._take(batch)
            self.graph.replay()
        else:
            self.batch = batch
            self.weights.refresh()
            for worker in range(self.workers):
                self._one(worker)
        return self.flat

    def _take(self, batch: Batch) -> None:
        for ours, given in zip(self.batch, batch, strict=True):
            ours.copy_(given)

    def _one(self, worker: int) -> None:
        """This worker's row."""
        batch = [part[worker] for part in self.batch] if self.task.is_static else self.batch[worker]
        with half(self.task):
            loss = self.task.loss(self.weights.model, batch, worker)
        parts = torch.autograd.grad(loss, self.weights.parameters)
        for (place, shape), part in zip(self.matrices, parts):
            self.flat[worker, place].view(shape).copy_(part)
        if self.vectors < self.flat.shape[1]:
            rest = [part.reshape(-1) for part in parts[len(self.matrices) :]]
            torch.cat(rest, out=self.flat[worker, self.vectors :])
        self.losses[worker].copy_(loss.detach())

    def _try_graphs(self) -> None:
        """Workers as branches of one graph, which the card may run at once; where that fails one after the other; where
        that fails without a graph. What was used is in the run's row."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for worker in [*range(self.workers)] * 2:
                self._one(worker)
        torch.cuda.current_stream().wait_stream(side)
        for how in ("branches", "sequence"):
            try:
                self.graph = self._captured(how == "branches")
            except RuntimeError as error:
                print(f"no graph of {how}: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
            else:
                self.how = how
                return

    def _captured(self, branches: bool) -> Any:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        streams = [torch.cuda.Stream() for _ in range(self.workers)]
        with torch.cuda.graph(graph):
            main = torch.cuda.current_stream()
            self.weights.refresh()
            for worker, stream in enumerate(streams):
                if not branches:
                    self._one(worker)
                    continue
                stream.wait_stream(main)
                with torch.cuda.stream(stream):
                    self._one(worker)
            for stream in streams if branches else ():
                main.wait_stream(stream)
        return graph


def half(task: Task) -> Any:
    """bf16 where a layer allows it, on a card; weights are cast anew in every use, for a graph keeps no cast."""
    on = task.is_static and task.device.type == "cuda"  # torch casts an LSTM to fp16, whose gradients would underflow
    return torch.autocast("cuda", torch.bfloat16, cache_enabled=False) if on else nullcontext()


Averaging = Workers | AllAtOnce | Rows


def averaging(run: Run, weights: Weights, reduction: Reduction) -> Averaging:
    """What averages the workers' gradients."""
    if is_published(reduction):
        return AllAtOnce(run.workers, weights.flat.numel(), reduction, weights.flat.device)
    return (Rows if is_known(reduction) else Workers)(run.workers, weights.shapes, reduction, run.seed)


def xi_of(workers: Averaging, gradients: Tensor) -> Any:
    """What `noted` needs of a step before it: the mean accumulated gradient and the mean gradient."""
    kept = [workers.residual(rank) for rank in range(len(gradients))]
    acc = torch.stack([g if e is None else g + e for g, e in zip(gradients, kept)]).mean(0)
    return acc, gradients.mean(0)


def noted(before: Any, mean: Tensor, workers: Averaging, step: int) -> dict[str, Any]:
    """Counts and both ξ of a step: by the norm of the mean accumulated gradient, and of the mean gradient (Assumption
    1)."""
    acc, gradient = before
    counts = workers.selected()
    best = put(acc.numel(), *select.top(acc, counts[0][1]))
    missed = torch.linalg.vector_norm(best - mean)
    local = [pair[0] for pair in counts]
    return {
        "step": step, "local": sum(local) / len(local), "local_most": max(local), "passed": counts[0][1],
        "xi_acc": float(missed / torch.linalg.vector_norm(acc)),
        "xi": float(missed / torch.linalg.vector_norm(gradient)),
    }  # fmt: skip


def clipped(mean: Tensor, most: float) -> Tensor:
    """The mean gradient, of norm `most` at most; 0: any."""
    return mean * (most / torch.linalg.vector_norm(mean).clamp(min=1e-12)).clamp(max=1) if most else mean


def rate_at(step: int, steps: int) -> float:
    ramp = max(1, round(RAMP * steps))
    return (step + 1) / ramp if step < ramp else (1 + math.cos(math.pi * (step - ramp) / max(1, steps - ramp))) / 2


def train(run: Run, task: Task, most: int = 0, until: float = math.inf) -> dict[str, Any]:
    """The run's row. most: end after so many steps of the schedule (0: not), to measure its speed. until: of
    time.time(); TimeoutError after it."""
    torch.manual_seed(run.seed)
    reduction, steps = METHODS[run.method].reduction(task.warmup), task.steps(run.epochs)
    weights = Weights(task.build().to(task.device), reduction)
    if task.device.type == "cuda":
        weights.halve_convolutions()
    workers = averaging(run, weights, reduction)
    optimiser = task.optimiser_of(weights.flat, run.rate * task.rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: rate_at(step, steps))
    batches = task.batches(run.seed, run.workers, steps)
    began, gradients = time.monotonic(), None
    curve, probes, done = [], [], 0
    for step, batch in enumerate(batches):
        if gradients is None:
            kept = [b.clone() for b in weights.model.buffers()]
            gradients = Gradients(task, weights, run.workers, batch)
            for buffer, first in zip(weights.model.buffers(), kept):  # capturing has moved running means
                buffer.copy_(first)
            began = time.monotonic()
        if time.time() > until:
            raise TimeoutError(f"given up at step {step} of {steps}; so far: {curve[-1:]}")
        rows = gradients(batch)
        probed = (
            isinstance(reduction.collective, OkTopk) and step >= workers.warmup and step % max(1, steps // PROBES) == 0
        )
        before = xi_of(workers, rows) if probed else None
        with torch.no_grad():
            means = workers.average(rows)
            if probed:
                probes.append(noted(before, means[0], workers, step))
            weights.flat.grad = clipped(means[0], task.clip)
        optimiser.step()
        schedule.step()
        done = step + 1
        if done == most:
            break
        if done % max(1, steps // CURVE) == 0 or done == steps:
            curve.append({"step": done, **measured(task, weights), "train": float(gradients.losses.mean())})
            if not math.isfinite(curve[-1]["loss"]):
                break
    if task.device.type == "cuda":
        torch.cuda.synchronize()
    sent = [nbytes / done for nbytes in workers.sent()]
    agree = all(torch.equal(means[0], mean) for mean in means[1:])
    return {
        **asdict(run), **(curve[-1] if curve else {}), "steps": done, "seconds": time.monotonic() - began,
        "n": weights.flat.numel(), "bytes": sum(sent) / len(sent), "busiest": max(sent) * len(sent) / sum(sent),
        "agree": agree, "how": gradients.how if gradients else "", "curve": curve, "probes": probes,
        "torch": torch.__version__.split("+")[0], "device": torch.cuda.get_device_name() if task.device.type == "cuda"
        else "cpu",
    }  # fmt: skip


@torch.no_grad()
def measured(task: Task, weights: Weights) -> dict[str, float]:
    weights.refresh()
    with half(task):
        return task.measure(weights.model)
