"""How fast the network is: between neighbours of a group, and in exchanges of gradients; all ranks at the same time.

Between neighbours a few bytes and their answer measure the latency. Then messages grow until one takes LONG_ENOUGH: the
burst that a shaped link lets through, TCP's first windows and the clock's resolution no longer matter then. Of the
gradients a part is exchanged that takes as long uncompressed, and next to nothing, which takes the latencies: what is
between them is scaled to all of them. What is timed is not preceded by a silence, as steps are: what TCP's slow start
adds then is computed for the whole step (timing.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives import Dense
from thinwire.collectives.flows import Flows
from thinwire.collectives.groups import has_cpu_backend, world
from thinwire.collectives.messages import maximum
from thinwire.config.wire import Reduction
from thinwire.data_parallel.exchange import Exchange
from thinwire.data_parallel.gradient_pass import MOST_IN_FLIGHT
from thinwire.distributed.packets import LossCount
from thinwire.planner.flows import LOSS_BLIND
from thinwire.planner.network import LinkSpeed
from thinwire.steps import finish_together

SMALLEST = 1 << 14  # bytes of the first message
LARGEST = 1 << 25  # bytes of the last message
LONG_ENOUGH = 0.3  # seconds of one message
PINGS = 8  # messages by which latency is measured
FEWEST = 1 << 14  # values of the first exchange
MORE = 4  # how many times as many values the next exchange has
ROUNDS = 3  # of an exchange, after one that allocates
MANY = 4  # latencies that an exchange takes at least, unless all of it is exchanged
EXACT = Reduction(Dense())
_TCP = Path("/proc/sys/net/ipv4")


def restarts_slowly() -> bool:
    """Does a connection of this machine that was silent start slowly again? True where it cannot be told."""
    if not _TCP.exists():
        return True
    return (_TCP / "tcp_slow_start_after_idle").read_text().strip() != "0" and congestion_control() not in LOSS_BLIND


def congestion_control() -> str:
    """This machine's, of TCP; "reno", from which others descend, where it cannot be told."""
    return (_TCP / "tcp_congestion_control").read_text().strip() if _TCP.exists() else "reno"


def probe(group: dist.ProcessGroup | None, ahead: int, device: torch.device, streams: int = 1) -> LinkSpeed:
    """The speed of the link on which this rank receives from the one `ahead` places before it in the group.

    All ranks of the world call it together. streams: connections that a message is cut over, on CPUs."""
    flows = Flows(group, streams if device.type == "cpu" else 1)
    latency = latency_of(flows, ahead, device)
    enough = LONG_ENOUGH + MANY * slowest(latency)  # the same on all ranks, which must end together
    nbytes = SMALLEST
    while True:
        took = _shift(nbytes, flows, ahead, device)
        longest = slowest(took)
        if longest >= enough or nbytes == LARGEST:
            break
        nbytes = min(LARGEST, nbytes * (2 if longest > enough / 8 else 4))
    flows.close()
    return LinkSpeed(8 * nbytes / max(took - latency, 1e-9), latency)


def latency_of(flows: Flows, ahead: int, device: torch.device) -> float:
    """Seconds of a few bytes one way: half of what they and their answer take; the fastest of several."""
    if not flows.groups:
        return 0.0
    if device.type != "cpu":
        return min(_shift(4, flows, ahead, device) for _ in range(PINGS))
    size, rank = world(flows.groups[0])
    source, to = (rank - ahead) % size, (rank + ahead) % size
    took: list[float] = []
    buffers = [torch.zeros(4, dtype=torch.uint8) for _ in range(3 * PINGS)]
    # All receives are posted before the first message: a message costs one latency, and ranks wait for each other once.
    asked = [flows.irecv(buffers[i], source, 2 * i + 1) for i in range(PINGS)]
    answered = [flows.irecv(buffers[PINGS + i], to, 2 * i + 2) for i in range(PINGS)]
    meet(flows.groups[0])
    sends: list[dist.Work] = []
    for i in range(PINGS):
        began = time.perf_counter()
        sends += flows.isend(buffers[2 * PINGS + i], to, 2 * i + 1)
        _wait(asked[i])
        sends += flows.isend(buffers[2 * PINGS + i], source, 2 * i + 2)
        _wait(answered[i])
        took.append((time.perf_counter() - began) / 2)
    _wait(sends)
    return min(took)


def slowest(seconds: float, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu") -> float:
    """The largest `seconds` of all ranks of the group."""
    return float(maximum(torch.tensor([seconds], dtype=torch.float64, device=device), group))


def meet(group: dist.ProcessGroup | None = None) -> None:
    """Wait for all ranks of the group: directly between them, since Gloo's barrier goes round a ring."""
    if has_cpu_backend(group):
        maximum(torch.zeros(1, dtype=torch.uint8), group)
    else:
        dist.barrier(group=group)


def _shift(nbytes: int, flows: Flows, ahead: int, device: torch.device) -> float:
    """Seconds until this rank has received its message; in a group of one nothing is sent."""
    if not flows.groups:
        meet()
        return 0.0
    size, rank = world(flows.groups[0])
    source, to = (rank - ahead) % size, (rank + ahead) % size
    out, into = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    works = flows.irecv(into, source) if device.type == "cpu" else []
    meet()
    began = time.perf_counter()
    if device.type == "cpu":
        sends = flows.isend(out, to)
    else:  # NCCL takes both in one batch
        receive = dist.P2POp(dist.irecv, into, group=flows.groups[0], group_peer=source)
        send = dist.P2POp(dist.isend, out, group=flows.groups[0], group_peer=to)
        works, sends = dist.batch_isend_irecv([receive, send]), []
    _wait(works)
    took = elapsed(began, device)
    _wait(sends)
    return took


def _wait(works: Iterable[dist.Work]) -> None:
    for work in works:
        work.wait()


class ExchangeCost(NamedTuple):
    """Bytes that a rank sends, seconds of the slowest rank without slow start, how many of these pass without a
    transfer, and bytes per connection."""

    sent: float
    seconds: float
    waiting: float
    burst: float


NOTHING = ExchangeCost(0.0, 0.0, 0.0, 0.0)


def exchanges(
    shapes: Mapping[str, tuple[int, ...]], settings: Sequence[Reduction | None], group: dist.ProcessGroup | None,
    device: torch.device, streams: int = 1, losses: LossCount | None = None,
) -> list[ExchangeCost]:  # fmt: skip
    """Per setting (None: exact) what one exchange of tensors of these shapes costs. streams: as of `probe`. losses:
    counts what is sent again meanwhile."""
    if not _values(shapes) or world(group)[0] == 1:
        return [NOTHING for _ in settings]
    flows = Flows(group, streams) if streams > 1 and device.type == "cpu" else None
    least = {name: _first_rows(shape, 1e-9) for name, shape in shapes.items()}
    losses = losses or LossCount()
    _, shortest = _exchange(least, EXACT, group, device, flows, LossCount())
    share = FEWEST / _values(shapes)
    while True:
        part = {name: _first_rows(shape, min(1.0, share)) for name, shape in shapes.items()}
        exact = _exchange(part, EXACT, group, device, flows, losses)
        if share >= 1 or exact[1] >= LONG_ENOUGH + MANY * shortest:
            break
        share *= MORE
    # Of a Gloo message half of the latency is the receiver's word, which in training has come before.
    waiting = shortest / 2 if device.type == "cpu" else shortest
    factor = _values(shapes) / _values(part)
    costs = []
    for setting in settings:
        sent, seconds = exact if setting is None else _exchange(part, setting, group, device, flows, losses)
        transfer = factor * max(0.0, seconds - shortest)
        burst = factor * sent / (world(group)[0] - 1)
        costs.append(ExchangeCost(factor * sent, transfer + waiting, waiting, burst))
    if flows is not None:
        flows.close()
    return costs


def _values(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(map(math.prod, shapes.values()))


def _first_rows(shape: tuple[int, ...], share: float) -> tuple[int, ...]:
    """The shape of this share of a tensor, in whole rows; a scalar is taken whole."""
    return (math.ceil(shape[0] * share), *shape[1:]) if shape else ()


def _exchange(
    shapes: Mapping[str, tuple[int, ...]], reduction: Reduction, group: dist.ProcessGroup | None, device: torch.device,
    flows: Flows | None, losses: LossCount,
) -> tuple[float, float]:  # fmt: skip
    """Bytes that this rank sends, and seconds of the slowest rank: of several exchanges, one after another. Their
    units are in flight together as they are in training."""
    exchange = Exchange(shapes, reduction, group)
    exchange.group.flows = flows
    values = [noise(unit.numel).to(device) for unit in exchange.units]
    before, took = 0, 0.0
    for number in range(1 + ROUNDS):
        if number == 1:
            before, took = exchange.sent, 0.0
        units = (exchange.reduce_steps(unit, x) for unit, x in zip(exchange.units, values))
        with losses.round():
            began = time.perf_counter()
            finish_together(units, MOST_IN_FLIGHT.get(device.type, 0))
            took += elapsed(began, device)
        exchange.rollback()
    return (exchange.sent - before) / ROUNDS, slowest(took / ROUNDS, group, device)


def noise(*shape: int) -> Tensor:
    """Normally distributed values, as gradients are, from a generator of its own."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def elapsed(began: float, device: torch.device) -> float:
    """Seconds since `began` (of time.perf_counter), once the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
