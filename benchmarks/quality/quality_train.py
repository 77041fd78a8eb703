"""One training run on four ranks: what each rank does, and the bytes it hands to torch.distributed."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from quality_methods import METHODS, Method
from quality_tasks import RANKS, TASKS, Data, Task, loss_of
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.nn.parallel import DistributedDataParallel

from thinwire.collectives.messages import Swap
from thinwire.config.wire import Wire
from thinwire.data_parallel.reducer import Reducer

LIMIT = 900.0  # seconds, for one run: four ranks may share two busy cores
RAMP, FLOOR = 0.05, 0.1  # of the steps the rate rises; what a cosine leaves of it at the end


@dataclass(frozen=True)
class Run:
    task: str
    method: str
    rate: float
    seed: int
    steps: int
    data: str  # digest

    def key(self) -> tuple[Any, ...]:
        return tuple(asdict(self).values())


def use_reference_kernels() -> None:
    """Where Numba is missing: the plain torch version of every kernel, which gives the same bits."""
    for name, module in list(sys.modules.items()):
        if name.startswith("thinwire.kernels.") and hasattr(module, "choose"):
            module.choose = lambda x, impl=None: impl or "reference"  # type: ignore[attr-defined]


def preload() -> None:
    """Once, before ranks are forked: what torch imports at an optimiser's first step, and compiled kernels."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    for task in TASKS.values():
        optimiser = task.optimiser_of(nn.ParameterList([parameter]), 0.0)
        torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1.0)
        optimiser.step()
    for method in METHODS.values():
        state: dict[str, Tensor] = {}
        for step in range(2 if method.collective else 0):
            method.collective().exchange(torch.randn(64, 64), state=state, step=step)


def run_rank(run: Run, rank: int, store: str, data: Data) -> dict[str, Any]:
    """Train, then this run's row: held-out loss, bytes per rank and step."""
    torch.set_num_threads(1)
    wait = timedelta(seconds=LIMIT)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=wait)
    task, method, began = TASKS[run.task], METHODS[run.method], time.monotonic()
    torch.manual_seed(run.seed)
    model = task.build()
    generator = torch.Generator().manual_seed(1_000 * run.seed + rank + 1)
    loss, optimiser, average, close = attach(task, method, model, run)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: rate_at(step, run.steps))
    warm, at_warm = method.warmup(run.steps), 0.0
    with counted() as sent:
        for step in range(run.steps):
            if step == warm:
                at_warm = sent[0]
            optimiser.zero_grad()
            loss(task.batch_of(data, generator)).backward()
            average()
            optimiser.step()
            schedule.step()
    close()
    row = {
        **asdict(run), **_results(task, model, data, rank), "parameters": sum(p.numel() for p in model.parameters()),
        "bytes": _mean(sent[0] / run.steps), "steady_bytes": _mean((sent[0] - at_warm) / (run.steps - warm)),
        "warmup": warm, "seconds": time.monotonic() - began, "torch": torch.__version__.split("+")[0],
    }  # fmt: skip
    dist.barrier()
    dist.destroy_process_group()
    return row


def rate_at(step: int, steps: int) -> float:
    """A linear ramp, then a cosine down to FLOOR."""
    ramp = max(1, round(RAMP * steps))
    if step < ramp:
        return (step + 1) / ramp
    return FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * (step - ramp) / max(1, steps - ramp))) / 2


def attach(task: Task, method: Method, model: nn.Module, run: Run) -> tuple[Callable, Any, Callable, Callable]:
    """(loss of a batch, optimiser, what averages the gradients after backward, what ends it)."""
    optimiser = task.optimiser_of(model, run.rate)
    if method.frozen:
        from thinwire.data_parallel.frozen_adam import FrozenAdam

        same = {key: optimiser.defaults[key] for key in ("lr", "betas", "eps", "weight_decay")}
        wire = Wire(gradient=replace(method.reduction(run.steps), warmup=0))
        adam = FrozenAdam(model.named_parameters(), **same, wire=wire, freeze_after=method.warmup(run.steps))
        return (lambda batch: loss_of(model, batch)), adam, _nothing, _nothing
    if method.power:
        wrapped = DistributedDataParallel(model, bucket_cap_mb=1_000)  # one bucket: with several the hook hangs on Gloo
        state = power.PowerSGDState(None, method.power, start_powerSGD_iter=method.warmup(run.steps))
        wrapped.register_comm_hook(state, power.powerSGD_hook)
        return (lambda batch: loss_of(wrapped, batch)), optimiser, _nothing, _nothing
    wire = Wire(gradient=method.reduction(run.steps))
    reducer = Reducer(model.named_parameters(), wire, seed=run.seed)
    return (lambda batch: loss_of(model, batch)), optimiser, reducer.finish, reducer.close


def _nothing() -> None: ...


def _results(task: Task, model: nn.Module, data: Data, rank: int) -> dict[str, Any]:
    """Held-out loss over all ranks' shares; whether all ranks hold the same bits."""
    batch = task.held_out(data, rank)
    with torch.no_grad():
        total = torch.tensor([float(loss_of(model, batch, "sum")), float(batch[1].numel())], dtype=torch.float64)
    dist.all_reduce(total)
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).view(torch.int32)
    first = flat.clone()
    dist.broadcast(first, 0)
    differ = torch.tensor([int((first != flat).sum())])
    dist.all_reduce(differ)
    held = float(total[0] / total[1])
    return {"held": held if math.isfinite(held) else None, "ranks_agree": int(differ) == 0}


def _mean(value: float) -> float:
    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / RANKS


@contextmanager
def counted() -> Iterator[list[float]]:
    """[bytes] this rank sends, from what is handed to torch.distributed: a ring's 2b(P−1)/P for an all-reduce of b
    bytes, b(P−1) for an all-gather, b for a message to one peer."""
    sent, real = [0.0], (dist.all_reduce, dist.all_gather, dist.all_to_all_single, Swap.leaving)

    def count(tensor: Tensor, copies: float) -> None:
        sent[0] += tensor.numel() * tensor.element_size() * copies

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        count(tensor, 2 * (RANKS - 1) / RANKS)
        return real[0](tensor, *args, **kwargs)

    def all_gather(out: list[Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        count(tensor, RANKS - 1)
        return real[1](out, tensor, *args, **kwargs)

    def all_to_all(out: Tensor, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        count(tensor, (RANKS - 1) / RANKS)
        return real[2](out, tensor, *args, **kwargs)

    def leaving(swap: Swap, to: int) -> Tensor:
        message = real[3](swap, to)
        count(message, 1)
        return message

    changed = {"all_reduce": all_reduce, "all_gather": all_gather, "all_to_all_single": all_to_all}
    with mock.patch.multiple(dist, **changed), mock.patch.object(Swap, "leaving", leaving):
        yield sent
