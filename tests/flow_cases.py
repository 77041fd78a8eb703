"""Cases of the tests of flows: what arrives over several flows is what was sent, to the bit."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
import time
from unittest import mock

import torch
import torch.distributed as dist
from rank_cases import check
from torch import Tensor

from thinwire.collectives.early import Early
from thinwire.collectives.flows import LEAST, Flows
from thinwire.collectives.groups import Metered, destroy, twin
from thinwire.collectives.messages import Swap
from thinwire.distributed import streams
from thinwire.torch_private.groups import known_groups

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.bool)
BYTES = (0, 1, 3, LEAST - 1, LEAST, 2 * LEAST - 1, 2 * LEAST, 3 * LEAST + 1, 5 * LEAST + 7, 1_000_003)


def message(source: int, to: int, number: int, nbytes: int) -> Tensor:
    """What one rank sends to another, known to both."""
    generator = torch.Generator().manual_seed(1000 * source + 100 * to + number)
    dtype = DTYPES[number % len(DTYPES)]
    data = torch.randint(0, 2, (nbytes,), generator=generator, dtype=torch.uint8)
    if dtype is not torch.bool:
        data = data * 255
    return data[: nbytes // dtype.itemsize * dtype.itemsize].view(dtype)


def all_to_all_at_once(streams: int, metered: bool) -> None:
    """Every rank sends messages of all sizes to every other, all posted at once: tags apart, and under one tag."""
    rank, size = dist.get_rank(), dist.get_world_size()
    flows = Flows(Metered(None) if metered else None, streams)
    others = [peer for peer in range(size) if peer != rank]
    works, received = [], []
    for peer in others:
        for number, nbytes in enumerate(BYTES):
            expected = message(peer, rank, number, nbytes)
            received.append((torch.zeros_like(expected), expected))
            works += flows.irecv(received[-1][0], peer, number // 2)
    for peer in others:
        for number, nbytes in enumerate(BYTES):
            works += flows.isend(message(rank, peer, number, nbytes), peer, number // 2)
    for work in works:
        work.wait()
    for got, expected in received:
        same = torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
        check(same, f"{streams} streams: {expected.nbytes} bytes of {expected.dtype} arrived as others")
    flows.close()


def one_stream_opens_no_connection() -> None:
    before = addresses()
    flows = Flows(None, 1)
    check(flows.groups == [dist.group.WORLD] and flows.count == 1, f"the flow is {flows.groups}, of {flows.count}")
    check(addresses() == before, "connections were opened for one stream")
    flows.close()
    dist.barrier()


def closing_frees_what_was_opened() -> None:
    dist.barrier()
    before, known = addresses(), known_groups()
    flows = Flows(None, 3)
    opened = len(addresses() - before)
    check(opened == 2 * (dist.get_world_size() - 1), f"{opened} connections were opened for three streams")
    check(known_groups() == known, "torch knows of more groups")
    dist.barrier()  # nobody closes before all have counted
    flows.close()
    dist.barrier()
    check(addresses() <= before, f"{len(addresses() - before)} connections are left")
    dist.barrier()


def who_cannot_open_connections_says_why_on_all_ranks() -> None:
    """One backend of rank 1 fails: every rank raises with its words, and nobody waits."""
    rank, real = dist.get_rank(), dist.ProcessGroupGloo
    made: list[int] = []

    def fails(*args: object) -> dist.ProcessGroupGloo:
        made.append(1)
        if rank == 1 and len(made) == 2:
            raise OSError("no descriptors left")
        return real(*args)

    with mock.patch.object(dist, "ProcessGroupGloo", fails):
        try:
            Flows(None, 4)
        except RuntimeError as error:
            check("rank 1 of the group" in str(error) and "no descriptors left" in str(error), f"it says {error}")
        else:
            check(False, "connections that were not made were taken for made")
    for thread in threading.enumerate():
        if thread.name.startswith("thinwire-connection"):
            thread.join(10)
            check(not thread.is_alive(), "a thread that makes connections is left")
    dist.barrier()


def a_lost_flow_is_an_error() -> None:
    """Two of rank 0's connections are cut while the others live: it raises, with the connection's words.

    Who raises cuts its other flows, as a process that ends does, so that nobody waits on those.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    before = connections()
    base = twin(None)
    flows = Flows(base, 3)
    made = sorted(connections() - before)
    dist.barrier()
    if rank == 0:
        cut(made[:2])
    outgoing = torch.ones(8 * LEAST)
    incoming = torch.empty_like(outgoing)
    try:
        works = flows.irecv(incoming, (rank - 1) % size) + flows.isend(outgoing, (rank + 1) % size)
        for work in works:
            work.wait()
    except RuntimeError as error:
        words = ("onnection closed", "onnection reset", "roken pipe")
        check(any(word in str(error) for word in words), f"it says {error}")
        cut(made)
    else:
        check(rank != 0, "a flow was cut, and nothing was raised")
    dist.barrier()
    flows.close()
    destroy(base)


def cut(numbers: list[int]) -> None:
    """End these connections of this process."""
    for number in numbers:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as one:
            one.shutdown(socket.SHUT_RDWR)


def connections() -> set[int]:
    """The descriptors of this process's connections to other ranks, those of the store left out."""
    store, found = int(os.environ["MASTER_PORT"]), set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(entry))) as one:
                internet = one.family in (socket.AF_INET, socket.AF_INET6)
                if internet and store not in (one.getsockname()[1], one.getpeername()[1]):
                    found.add(int(entry))
        except OSError:  # no socket, or one that is not connected
            continue
    return found


def addresses() -> set[object]:
    """Both ends of each of them: descriptors have their numbers again once others are closed."""
    found = set()
    for number in connections():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as one:
            found.add((one.getsockname(), one.getpeername()))
    return found


def groups_of_some_ranks_are_made_again_and_again() -> None:
    """Of two of the ranks, each destroyed before the next is made, while the other rank makes none."""
    pair = dist.new_group([0, 1])
    before = known_groups()
    names = set()
    for number in range(4) if dist.get_rank() < 2 else ():
        again = twin(pair)
        check(again.group_name not in names, f"group {number} has the name of one before, with dead addresses")
        names.add(again.group_name)
        total = torch.tensor([dist.get_rank() + number])
        dist.all_reduce(total, group=again)
        check(int(total) == 2 * number + 1, f"group {number}: the sum is {int(total)}")
        destroy(again)
    check(known_groups() == before, "groups are left over")
    everyone = twin(None)
    dist.barrier(group=everyone)
    destroy(everyone)


def who_is_done_first_may_leave_first() -> None:
    """The next exchange's receives are posted after the last one too, from members that have left by then: an error
    of the exchange that asks them again, and of that alone."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = twin(None)
    early = Early(Flows(group, 1), first_tag=1)
    metered = Metered(group, early=early)
    payload = [torch.full((100,), rank, dtype=torch.uint8) for _ in range(size)]
    arriving = Swap(payload, [100] * size, metered).arriving()
    got = [next(arriving) for _ in range(size)]
    check(all(bool((x == source).all()) for source, x in got), "what arrived is not what was sent")
    dist.barrier()
    if rank:
        destroy(group)
        del group, metered, early, arriving  # the connections end with who holds them
    dist.barrier()
    if rank == 0:
        time.sleep(0.2)  # the end of a connection takes its way
        check(next(arriving, None) is None, "more arrived than members sent")
        early.begin()
        try:
            Swap(payload, [100] * size, metered).wait()
        except RuntimeError as error:
            check("peer" in str(error), f"the error says nothing of the member: {error}")
        else:
            check(False, "an exchange with members that have left came to an end")
        destroy(group)


def streams_are_as_many_as_are_clearly_faster() -> None:
    """The rates are given, by the number of connections and by rank; what is measured is the same on all ranks."""
    rank = dist.get_rank()
    known = known_groups()
    for rates, best, tried in (
        ({1: 9e7, 4: 9.5e7}, 1, [1, 4]),
        ({1: 5e6, 4: 2e7, 8: 2.1e7}, 4, [1, 4, 8]),
        ({1: 5e6, 4: 2e7, 8: 4e7, 16: 7e7}, 16, [1, 4, 8, 16]),
    ):
        asked = []

        def rate(flows: Flows, nbytes: int, rates: dict[int, float] = rates, asked: list[int] = asked) -> tuple:
            asked.append(flows.count)
            return rates[flows.count], nbytes

        with mock.patch.object(streams, "_rate", rate):
            check(streams.settled_streams("auto", None) == best, f"rank {rank}: not {best} for {rates}")
        check(asked == tried, f"tried were {asked}")
    check(known_groups() == known, "groups are left over")
    check(streams.settled_streams(3, None) == 3, "a number is taken as it is")
    with mock.patch.object(streams, "LONG_ENOUGH", 1e-9):
        count, rates = streams.measure_streams(None)
    check(count in rates and all(rate > 0 for rate in rates.values()), f"measured {count} by {rates}")


CASES = [
    functools.partial(all_to_all_at_once, 1, False),
    functools.partial(all_to_all_at_once, 2, True),
    functools.partial(all_to_all_at_once, 5, False),
    one_stream_opens_no_connection,
    closing_frees_what_was_opened,
    who_cannot_open_connections_says_why_on_all_ranks,
    groups_of_some_ranks_are_made_again_and_again,
    streams_are_as_many_as_are_clearly_faster,
    who_is_done_first_may_leave_first,
    a_lost_flow_is_an_error,
]
