"""How fast the network is: between neighbours of a group, in exchanges of gradients, and in a vote; all ranks at the
same time, and as in training: receives are posted before messages are sent, which go over as many streams.

Between neighbours a few bytes measure the latency. Then messages double in size until one takes LONG_ENOUGH: the burst
that a shaped link lets through, TCP's first windows and the clock's resolution no longer matter then. Of the gradients
a part is exchanged that takes as long uncompressed, and next to nothing, which takes the latencies: what is between
them is scaled to all of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives import Dense
from thinwire.collectives.early import Early
from thinwire.collectives.flows import Flows
from thinwire.collectives.groups import Metered, destroy, twin, world
from thinwire.collectives.messages import gather
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
SILENCE = 0.4  # seconds before what is timed: after about so long without a message TCP starts slowly again
EXACT = Reduction(Dense())


def probe(group: dist.ProcessGroup | None, ahead: int, device: torch.device, streams: int = 1) -> LinkSpeed:
    """The speed of the link on which this rank receives from the one `ahead` places before it in the group.

    All ranks of the world call it together. streams: connections that a message is cut over, on CPUs."""
    flows = Flows(group, streams if device.type == "cpu" else 1)
    latency = sorted(_shift(4, flows, ahead, device) for _ in range(PINGS))[PINGS // 2]
    nbytes = SMALLEST
    while True:
        took = _shift(nbytes, flows, ahead, device)
        if slowest(took) >= LONG_ENOUGH or nbytes == LARGEST:
            break
        nbytes *= 2
    flows.close()
    return LinkSpeed(8 * nbytes / max(took - latency, 1e-9), latency)


def slowest(seconds: float, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu") -> float:
    """The largest `seconds` of all ranks of the group."""
    longest = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=group)
    return float(longest)


def vote_seconds() -> float:
    """Seconds until every rank has a kilobyte of every other one, of the slowest rank."""
    if dist.get_world_size() == 1:
        return 0.0
    own = twin(None)
    group = Metered(own, early=Early(Flows(own, 1), 0))
    took = []
    for _ in range(PINGS):
        dist.barrier()
        began = time.perf_counter()
        assert group.early is not None
        group.early.begin()
        gather(torch.zeros(1024, dtype=torch.uint8), group)
        took.append(time.perf_counter() - began)
    destroy(own)
    return slowest(sorted(took)[PINGS // 2])


def trains(
    group: dist.ProcessGroup | None, ahead: int, device: torch.device, streams: int, sizes: Sequence[int], count: int
) -> list[float]:
    """Per size, the seconds in which this rank receives `count` messages of so many bytes from the one `ahead` places
    before it. They leave at once, after a silence as there is between steps: TCP then starts slowly again.

    All ranks of the world call it together."""
    flows = Flows(group, streams if device.type == "cpu" else 1)
    took = []
    for nbytes in sizes:
        runs = []
        for _ in range(ROUNDS):
            time.sleep(SILENCE)
            runs.append(_shift(nbytes, flows, ahead, device, count))
        took.append(min(runs))
    flows.close()
    return took


def _shift(nbytes: int, flows: Flows, ahead: int, device: torch.device, count: int = 1) -> float:
    """Seconds until this rank has received its messages; in a group of one nothing is sent."""
    if not flows.groups:
        dist.barrier()
        return 0.0
    size, rank = world(flows.groups[0])
    source, to = (rank - ahead) % size, (rank + ahead) % size
    out = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    into = [torch.empty_like(out) for _ in range(count)]
    works = [work for x in into for work in flows.irecv(x, source)] if device.type == "cpu" else []
    dist.barrier()
    began = time.perf_counter()
    if device.type == "cpu":
        sends = [work for _ in into for work in flows.isend(out, to)]
    else:  # NCCL takes both in one batch
        receives = [dist.P2POp(dist.irecv, x, group=flows.groups[0], group_peer=source) for x in into]
        send = dist.P2POp(dist.isend, out, group=flows.groups[0], group_peer=to)
        works, sends = dist.batch_isend_irecv([*receives, *[send] * count]), []
    for work in works:
        work.wait()
    took = elapsed(began, device)
    for work in sends:
        work.wait()
    return took


def exchanges(
    shapes: Mapping[str, tuple[int, ...]], settings: Sequence[Reduction | None], group: dist.ProcessGroup | None,
    device: torch.device, streams: int = 1,
) -> list[tuple[float, float]]:  # fmt: skip
    """Per setting (None: exact) the bytes that this rank sends and the seconds of the slowest rank, for one exchange of
    tensors of these shapes."""
    total = sum(map(math.prod, shapes.values()))
    if not total or world(group)[0] == 1:
        return [(0.0, 0.0) for _ in settings]
    place = group, device, streams
    share = FEWEST / total
    while True:
        part = {name: _first_rows(shape, min(1.0, share)) for name, shape in shapes.items()}
        exact = _exchange(part, EXACT, *place)
        if share >= 1 or exact[1] >= LONG_ENOUGH:
            break
        share *= MORE
    least = {name: _first_rows(shape, 1e-9) for name, shape in shapes.items()}
    more = _values(shapes) / _values(part) - 1  # how many times what lies between the two parts is added to the larger
    costs = []
    for setting in settings:
        sent, seconds = exact if setting is None else _exchange(part, setting, *place)
        if more > 0:
            few, shortest = _exchange(least, setting or EXACT, *place)
            between = _values(part) / max(1, _values(part) - _values(least))
            sent += more * between * (sent - few)
            seconds += more * between * max(0.0, seconds - shortest)
        costs.append((sent, seconds))
    return costs


def _values(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(map(math.prod, shapes.values()))


def _first_rows(shape: tuple[int, ...], share: float) -> tuple[int, ...]:
    """The shape of this share of a tensor, in whole rows; a scalar is taken whole."""
    return (math.ceil(shape[0] * share), *shape[1:]) if shape else ()


def _exchange(
    shapes: Mapping[str, tuple[int, ...]], reduction: Reduction, group: dist.ProcessGroup | None,
    device: torch.device, streams: int,
) -> tuple[float, float]:  # fmt: skip
    own = twin(group)  # receives of a next step stay posted in it
    exchange = Exchange(shapes, reduction, own, own_group=True, streams=streams)
    took = 0.0
    before = 0
    for _ in range(ROUNDS):
        values = [noise(unit.numel).to(device) for unit in exchange.units]
        time.sleep(SILENCE)
        dist.barrier(group=group)
        began, before = time.perf_counter(), exchange.sent
        for unit, x in zip(exchange.units, values):
            exchange.reduce(unit, x)
        exchange.rollback()
        took = elapsed(began, device)
    sent = float(exchange.sent - before)
    exchange.leave_group()
    destroy(own)
    return sent, slowest(took, group, device)


def noise(*shape: int) -> Tensor:
    """Normally distributed values, as gradients are, from a generator of its own."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def elapsed(began: float, device: torch.device) -> float:
    """Seconds since `began` (of time.perf_counter), once the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
