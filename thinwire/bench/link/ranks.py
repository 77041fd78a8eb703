"""What the two ranks of `thinwire bench link` do on a long link: messages over flows, timed where they arrive."""

from __future__ import annotations

import socket
import time

import torch
import torch.distributed as dist

from thinwire.collectives.flows import Flows

MESSAGES = 3
PINGS = 5


def exchange(size: int, streams: int, both: bool) -> dict[str, float | str]:
    """Rank 0 sends to rank 1, or both to each other at once: one message first, then MESSAGES after one another.

    size: bytes of each. streams: flows. Returns what this rank has seen: `first` and `seconds` of the first and of the
    others (a receiver's: until all have arrived), `round_trip` of the shortest ping, and `congestion`.

    The first message lets TCP find its speed. The receives of the others are posted before they are sent, and the next
    message is sent while the one before is under way, as a training run's are.
    """
    dist.init_process_group("gloo")
    flows = Flows(None, streams)
    try:
        round_trip = min(_ping(flows) for _ in range(PINGS))
        first = _timed(flows, size, 1, both)
        seconds = _timed(flows, size, MESSAGES, both)
        dist.barrier()
    finally:
        flows.close()
        dist.destroy_process_group()
    return {"first": first, "seconds": seconds, "round_trip": round_trip, "congestion": congestion()}


def _ping(flows: Flows) -> float:
    """Seconds of one byte there and back, over the first flow; the answer's receive is posted before."""
    rank = dist.get_rank()
    mine, other = torch.zeros(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    receives = flows.irecv(other, 1 - rank)
    dist.barrier()
    began = time.perf_counter()
    sends = [] if rank else flows.isend(mine, 1)
    for work in receives:
        work.wait()
    seconds = time.perf_counter() - began
    if rank:
        sends = flows.isend(mine, 0)
    for work in sends:
        work.wait()
    return seconds if not rank else float("inf")


def _timed(flows: Flows, size: int, count: int, both: bool) -> float:
    """Seconds of `count` messages."""
    rank = dist.get_rank()
    outgoing, incoming = torch.zeros(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    # What arrives is not read, so all messages may arrive in one place.
    receives = [work for _ in range(count) for work in flows.irecv(incoming, 1 - rank)] if rank or both else []
    dist.barrier()
    began = time.perf_counter()
    sends = [work for _ in range(count) for work in flows.isend(outgoing, 1 - rank)] if not rank or both else []
    for work in receives or sends:
        work.wait()
    seconds = time.perf_counter() - began
    for work in sends if receives else ():
        work.wait()
    return seconds


def congestion() -> str:
    """The congestion control of a new connection."""
    with socket.socket() as one:
        return one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
