"""How many TCP connections a message is best cut over here: measured, by all members of a group together.

Every member sends to the next one and receives from the one before, both at once, over one connection, then over more,
as long as that is clearly faster. On a short and clean link one is enough, on a long or lossy one it is not
(collectives/flows.py says why).
"""

from __future__ import annotations

import logging
import time

import torch
import torch.distributed as dist

from thinwire.collectives.flows import Flows
from thinwire.collectives.groups import Group, unmetered, world
from thinwire.collectives.messages import maximum
from thinwire.quantities import show_rate

logger = logging.getLogger("thinwire")

COUNTS = (1, 4, 8, 16)  # connections that are tried
CLEARLY = 1.15  # how many times as fast more of them must be
SMALLEST = 1 << 16  # bytes of the first message
LARGEST = 1 << 25  # bytes of the last one
LONG_ENOUGH = 1.0  # seconds of a message


def settled_streams(streams: int | str, group: Group) -> int:
    """`streams`, or where it is "auto" how many the group's links need. All members call it together."""
    if not isinstance(streams, str):
        return streams
    count, rates = measure_streams(group)
    if rates:
        logger.info(describe_streams(count, rates))
    return count


def measure_streams(group: Group) -> tuple[int, dict[int, float]]:
    """(how many, the rate in bit/s by number of connections), the same on all members; 1 without others, and where
    NCCL is there, which opens connections by itself."""
    if world(group)[0] == 1 or "nccl" in str(dist.get_backend_config(unmetered(group))):
        return 1, {}
    rates: dict[int, float] = {}
    best = COUNTS[0]
    nbytes = SMALLEST
    for count in COUNTS:
        flows = Flows(group, count)
        rates[count], nbytes = _rate(flows, nbytes)
        flows.close()
        if count > 1 and rates[count] < CLEARLY * rates[best]:
            break
        best = count
    return best, rates


def describe_streams(count: int, rates: dict[int, float]) -> str:
    """The measurement in one line."""
    tried = ", ".join(f"{show_rate(float(f'{rate:.3g}'))} over {some}" for some, rate in rates.items())
    return f"[wire] streams = {count}: measured {tried} connection{'s' if len(rates) > 1 else ''}"


def _rate(flows: Flows, nbytes: int) -> tuple[float, int]:
    """Bits per second that the slowest member receives, and the bytes of the message by which it was measured."""
    group = flows.groups[0]
    while True:
        took = max(_pass_on(flows, nbytes), 1e-6)
        slowest = float(maximum(torch.tensor([took], dtype=torch.float64), group))
        if slowest >= LONG_ENOUGH or nbytes >= LARGEST:
            return 8 * nbytes / slowest, nbytes
        nbytes *= 2


def _pass_on(flows: Flows, nbytes: int) -> float:
    """Seconds until this member has its message, which was ready to be received before it was sent."""
    group = flows.groups[0]
    size, rank = world(group)
    into = torch.empty(nbytes, dtype=torch.uint8)
    receives = flows.irecv(into, (rank - 1) % size)
    dist.barrier(group=group)
    began = time.perf_counter()
    sends = flows.isend(torch.zeros(nbytes, dtype=torch.uint8), (rank + 1) % size)
    for work in receives:
        work.wait()
    took = time.perf_counter() - began
    for work in sends:
        work.wait()
    return took
