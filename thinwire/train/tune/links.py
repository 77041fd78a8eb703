"""How fast the network is: between neighbours of a group, and in exchanges of gradients; all ranks at the same time.

Between neighbours a few bytes measure the latency. Then messages double in size until one takes LONG_ENOUGH: the burst
that a shaped link lets through, TCP's first windows and the clock's resolution no longer matter then. Of the gradients
a part is exchanged that takes as long uncompressed; its time is scaled to all of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives import Dense
from thinwire.collectives.groups import world
from thinwire.config.wire import Reduction
from thinwire.data_parallel.exchange import Exchange
from thinwire.planner.network import LinkSpeed

SMALLEST = 1 << 14  # bytes of the first message
LARGEST = 1 << 25  # bytes of the last message
LONG_ENOUGH = 0.3  # seconds of one message
PINGS = 8  # messages by which latency is measured
FEWEST = 1 << 14  # values of the first exchange
MORE = 4  # how many times as many values the next exchange has
ROUNDS = 2  # of an exchange; the last counts, the first allocates
EXACT = Reduction(Dense())


def probe(group: dist.ProcessGroup | None, ahead: int, device: torch.device) -> LinkSpeed:
    """The speed of the link on which this rank receives from the one `ahead` places before it in the group.

    All ranks of the world call it together."""
    latency = sorted(_shift(4, group, ahead, device) for _ in range(PINGS))[PINGS // 2]
    size = SMALLEST
    while True:
        took = _shift(size, group, ahead, device)
        if slowest(took) >= LONG_ENOUGH or size == LARGEST:
            return LinkSpeed(8 * size / max(took - latency, 1e-9), latency)
        size *= 2


def slowest(seconds: float, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu") -> float:
    """The largest `seconds` of all ranks of the group."""
    longest = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=group)
    return float(longest)


def _shift(nbytes: int, group: dist.ProcessGroup | None, ahead: int, device: torch.device) -> float:
    """Seconds until this rank has received its message; in a group of one nothing is sent."""
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
    shapes: Mapping[str, tuple[int, ...]], settings: Sequence[Reduction | None], group: dist.ProcessGroup | None,
    device: torch.device,
) -> list[tuple[float, float]]:  # fmt: skip
    """Per setting (None: exact) the bytes that this rank sends and the seconds of the slowest rank, for one exchange of
    tensors of these shapes."""
    total = sum(map(math.prod, shapes.values()))
    if not total or world(group)[0] == 1:
        return [(0.0, 0.0) for _ in settings]
    share = FEWEST / total
    while True:
        part = {name: _first_rows(shape, min(1.0, share)) for name, shape in shapes.items()}
        exact = _exchange(part, EXACT, group, device)
        if share >= 1 or exact[1] >= LONG_ENOUGH:
            break
        share *= MORE
    factor = total / sum(map(math.prod, part.values()))
    costs = [exact if setting is None else _exchange(part, setting, group, device) for setting in settings]
    return [(factor * sent, factor * seconds) for sent, seconds in costs]


def _first_rows(shape: tuple[int, ...], share: float) -> tuple[int, ...]:
    """The shape of this share of a tensor, in whole rows; a scalar is taken whole."""
    return (math.ceil(shape[0] * share), *shape[1:]) if shape else ()


def _exchange(
    shapes: Mapping[str, tuple[int, ...]], reduction: Reduction, group: dist.ProcessGroup | None, device: torch.device
) -> tuple[float, float]:
    exchange = Exchange(shapes, reduction, group)
    took = 0.0
    before = 0
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
    """Normally distributed values, as gradients are, from a generator of its own."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def elapsed(began: float, device: torch.device) -> float:
    """Seconds since `began` (of time.perf_counter), once the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
