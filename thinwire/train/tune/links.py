"""How fast the network is: between neighbours of a group, and in exchanges of gradients; all ranks at the same time.

Between neighbours a few bytes say the latency, then messages double in size until one takes long enough: what a shaped
link lets through at once, TCP's first windows and the clock no longer matter then. Of gradients so large a part is
exchanged as takes as long uncompressed, and counted for all of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives import Dense
from thinwire.collectives.groups import world
from thinwire.config.wire import Reduction
from thinwire.data_parallel.exchange import Exchange
from thinwire.planner.network import LinkSpeed

SMALLEST, LARGEST = 1 << 14, 1 << 25  # bytes
LONG_ENOUGH = 0.3  # seconds of one message
PINGS = 8
FEWEST, MORE = 1 << 14, 4  # values of the first exchange, and how many times as many the next has
ROUNDS = 2  # of an exchange; the last counts, the first allocates
EXACT = Reduction(Dense())


def probe(group: Any, ahead: int, device: torch.device) -> LinkSpeed:
    """The link on which this rank hears the one `ahead` places before it. All ranks of the world call it together."""
    latency = sorted(_shift(4, group, ahead, device) for _ in range(PINGS))[PINGS // 2]
    size = SMALLEST
    while True:
        took = _shift(size, group, ahead, device)
        if slowest(took) >= LONG_ENOUGH or size == LARGEST:
            return LinkSpeed(8 * size / max(took - latency, 1e-9), latency)
        size *= 2


def slowest(seconds: float, group: Any = None, device: torch.device | str = "cpu") -> float:
    """The longest that any rank says."""
    longest = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=group)
    return float(longest)


def _shift(nbytes: int, group: Any, ahead: int, device: torch.device) -> float:
    """Seconds until this rank has what it was sent; in a group of one nothing is sent."""
    size, rank = world(group)
    dist.barrier()
    began = time.perf_counter()
    if size > 1:
        out, into = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
        receive = dist.P2POp(dist.irecv, into, group=group, group_peer=(rank - ahead) % size)
        send = dist.P2POp(dist.isend, out, group=group, group_peer=(rank + ahead) % size)
        first, *rest = dist.batch_isend_irecv([receive, send])
        first.wait()
        took = elapsed(began, device)
        for work in rest:
            work.wait()
        return took
    return elapsed(began, device)


def exchanges(
    shapes: Mapping[str, tuple[int, ...]], rungs: Sequence[Reduction | None], group: Any, device: torch.device
) -> list[tuple[float, float]]:
    """Of every rung (None: exact) the bytes a rank sends and the slowest's seconds, for tensors of these shapes."""
    total = sum(map(math.prod, shapes.values()))
    if not total or world(group)[0] == 1:
        return [(0.0, 0.0) for _ in rungs]
    share = FEWEST / total
    while True:
        part = {name: _first_rows(shape, min(1.0, share)) for name, shape in shapes.items()}
        exact = _exchange(part, EXACT, group, device)
        if share >= 1 or exact[1] >= LONG_ENOUGH:
            break
        share *= MORE
    factor = total / sum(map(math.prod, part.values()))
    costs = [exact if rung is None else _exchange(part, rung, group, device) for rung in rungs]
    return [(factor * sent, factor * seconds) for sent, seconds in costs]


def _first_rows(shape: tuple[int, ...], share: float) -> tuple[int, ...]:
    """So large a share of a tensor, in whole rows; a single number is one."""
    return (math.ceil(shape[0] * share), *shape[1:]) if shape else ()


def _exchange(
    shapes: Mapping[str, tuple[int, ...]], reduction: Reduction, group: Any, device: torch.device
) -> tuple[float, float]:
    exchange, took, before = Exchange(shapes, reduction, group), 0.0, 0
    for _ in range(ROUNDS):
        values = [noise(unit.numel).to(device) for unit in exchange.units]
        dist.barrier(group=group)
        began, before = time.perf_counter(), exchange.sent
        for unit, x in zip(exchange.units, values):
            exchange.reduce(unit, x)
        exchange.rollback()
        took = elapsed(began, device)
    return float(exchange.sent - before), slowest(took, group, device)


def noise(*shape: int) -> Tensor:
    """Values as gradients have them, from a generator of its own."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def elapsed(began: float, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
