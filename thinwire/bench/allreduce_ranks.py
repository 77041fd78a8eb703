"""What every rank of `thinwire bench allreduce` runs: one collective for a few steps with error feedback, timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numba
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from thinwire.collectives.base import Collective, State
from thinwire.collectives.groups import is_alone, world
from thinwire.collectives.messages import Swap
from thinwire.kernels import select
from thinwire.kernels.cpu.compile import compiled_once

WARM = 1 << 12  # values of the exchange without a group that loads the compiled kernels
PAYLOAD = (torch.uint8, torch.float16, torch.float32)  # other dtypes are counts and histograms


@dataclass(frozen=True)
class HalfHook(Collective):
    """torch's own fp16_compress_hook, through DDP: a model of one parameter whose gradient is u."""

    models: dict[int, DistributedDataParallel] = field(default_factory=dict, init=False, compare=False)

    def exchange(
        self, u: Tensor, group: Any = None, *, state: State, key: object = "", step: int = 0, seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        """The mean of `u` over `group`, and what this rank contributed to it. `state`, `key`, `step` and `seed` are not
        used: the hook remembers nothing."""
        if is_alone(group):
            return u, u
        if u.numel() not in self.models:
            model = DistributedDataParallel(_Product(u.numel()), process_group=group, init_sync=False)
            model.register_comm_hook(group, fp16_compress_hook)
            self.models[u.numel()] = model
        model = self.models[u.numel()]
        model.zero_grad()
        model(u.reshape(-1)).backward()
        mean, size = model.module.weight.grad, world(group)[0]
        assert mean is not None
        return mean.view(u.shape), (u.half() / size).to(u.dtype) * size


class _Product(torch.nn.Module):
    """x → w·x, whose gradient in w is x."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(n))

    def forward(self, x: Tensor) -> Tensor:
        return torch.dot(self.weight, x)


@dataclass
class Counters:
    """Bytes this rank handed to torch.distributed: payload, and counts and histograms beside it."""

    payload: float = 0.0
    beside: float = 0.0
    calls: list[str] = field(default_factory=list)

    def add(self, call: str, tensor: Tensor, copies: float) -> None:
        """Count a `call` that sends `copies` of `tensor`."""
        sent = tensor.numel() * tensor.element_size() * copies
        if tensor.dtype in PAYLOAD:
            self.payload += sent
        else:
            self.beside += sent
        self.calls.append(call)


@contextmanager
def tallied(size: int) -> Iterator[Counters]:
    """Counts what goes through torch.distributed in a group of `size`: rings send 2b(P−1)/P for all-reduce and b(P−1)
    for all-gather."""
    tally, real = Counters(), (dist.all_reduce, dist.all_gather, Swap.leaving)

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        tally.add("all-reduce", tensor, 2 * (size - 1) / size)
        return real[0](tensor, *args, **kwargs)

    def all_gather(out: list[Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        tally.add("all-gather", tensor, size - 1)
        return real[1](out, tensor, *args, **kwargs)

    def leaving(swap: Swap, to: int) -> Tensor:
        message = real[2](swap, to)
        tally.add("send", message.view(swap.dtype), 1)
        return message

    with (
        mock.patch.object(dist, "all_reduce", all_reduce),
        mock.patch.object(dist, "all_gather", all_gather),
        mock.patch.object(Swap, "leaving", leaving),
    ):
        yield tally


def gradients(workers: str, shape: tuple[int, int], k: int, rank: int, size: int) -> Callable[[int], Tensor]:
    """step → the gradient of `rank` out of `size`, of that `shape`, of the kind that `workers` names.

    Similar workers share a signal twice their noise. Skewed ones have all their large values in one region each,
    another worker's by equal cuts. Adversarial ones have `k` large values in the region −rank, so that no cyclic shift
    of owners keeps them home, and rank 1's are the largest, all in one owner's region."""
    n = shape[0] * shape[1]

    def draw(step: int) -> Tensor:
        x = torch.randn(n, generator=torch.Generator().manual_seed(1_000 * step + rank + 1))
        if workers == "similar":
            x.add_(torch.randn(n, generator=torch.Generator().manual_seed(1_000 * step)), alpha=2.0)
        elif workers == "skewed":
            low = (rank + 1) % size * n // size
            x[low : low + n // size] *= 1000
        else:
            place = (-rank % size * n // size + torch.arange(k)) % n
            x.mul_(1e-4)[place] = (100.0 if rank == 1 else 10.0) * (1 + torch.rand(k))
        return x.view(shape)

    return draw


def measure(collective: Collective, shape: tuple[int, int], k: int, workers: str, steps: int) -> list[dict[str, float]]:
    """`steps` exchanges of `collective` with error feedback, of gradients of that `shape` as `workers` says, with `k`
    large entries; per step this rank's seconds and bytes."""
    _one_team()
    with compiled_once():
        collective.exchange(torch.randn(WARM).view(64, -1), state={})
    dist.init_process_group("gloo")
    rows = exchanges(collective, shape, k, workers, steps)
    dist.barrier()
    dist.destroy_process_group()
    return rows


def exchanges(
    collective: Collective, shape: tuple[int, int], k: int, workers: str, steps: int
) -> list[dict[str, float]]:
    """`measure` in a process group that is there; kernels are compiled already."""
    size, rank = world(None)
    draw, rows = gradients(workers, shape, k, rank, size), []
    state: State = {}
    residual: Tensor | float = 0.0
    dist.all_reduce(torch.ones(1))
    for step in range(steps):
        u = draw(step) + residual
        dist.barrier()
        with tallied(size) as tally:
            began = time.perf_counter()
            mean, own = collective.exchange(u, state=state, step=step, seed=step)
            seconds = time.perf_counter() - began
        rows.append({
            "seconds": seconds, "payload": tally.payload, "beside": tally.beside, "calls": len(tally.calls),
            "passed": int(torch.count_nonzero(mean)),
        })  # fmt: skip
        residual = u - own
        del mean, own
    return rows


def selection(numel: int, k: int) -> dict[str, float] | None:
    """Seconds rank 0 needs to pick k of numel values while all others wait: exact, and by a threshold it knows."""
    _one_team()
    dist.init_process_group("gloo")
    out = None
    if dist.get_rank() == 0:
        x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
        threshold = select.kth_magnitude(x, k)
        out = {
            "exact": _seconds(lambda: select.top(x, k)),
            "reused": _seconds(lambda: select.select(x, threshold, numel)),
        }
    dist.barrier()
    dist.destroy_process_group()
    return out


def _one_team() -> None:
    """No more OpenMP threads than torch has: all ranks share this machine, and an idle thread of a team that has to be
    waited for costs milliseconds a kernel on a busy one."""
    numba.config.NUMBA_NUM_THREADS = torch.get_num_threads()  # type: ignore[attr-defined]


def _seconds(work: Callable[[], object], times: int = 5) -> float:
    """Median after one call to warm up."""
    work()
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)
