"""Many ranks in one process, a thread each: what collectives need of torch.distributed, without a network.

`run(size, work)` gives work(rank) for every rank. Sums are taken in rank order. Real processes are tested beside it;
this makes many world sizes, and long runs, cheap.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from thinwire.collectives import groups, members, messages

LIMIT = 60.0  # seconds a rank waits for the others


@dataclass(eq=False)
class Group:
    """Members are global ranks."""

    ranks: list[int]
    slots: dict[int, Any] = field(default_factory=dict)
    mail: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(len(self.ranks))

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Everybody's value, in rank order."""
        self.slots[rank] = value
        self.barrier.wait(LIMIT)
        out = [self.slots[r] for r in self.ranks]
        self.barrier.wait(LIMIT)
        return out


@dataclass
class Operation:
    op: str
    tensor: Tensor
    group: Any = None
    group_peer: int = 0


@dataclass
class Receipt:
    """An operation under way: a receive waits until the other side has posted its message."""

    wait: Callable[[], None]


class ThreadDist:
    """The few functions of torch.distributed, between the threads of one `run`. `sent` counts payload per rank."""

    isend, irecv, P2POp = "send", "receive", Operation

    def __init__(self, size: int) -> None:
        self.world, self.mine = Group(list(range(size))), threading.local()
        self.group = SimpleNamespace(WORLD=self.world)
        self.groups: dict[tuple[int, ...], Group] = {}
        self.sent, self.arrival = [0] * size, threading.Condition()

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return hasattr(self.mine, "rank")

    def get_world_size(self, group: Group | None = None) -> int:
        return len((group or self.world).ranks)

    def get_rank(self, group: Group | None = None) -> int:
        return (group or self.world).ranks.index(self.mine.rank)

    def get_process_group_ranks(self, group: Group | None = None) -> list[int]:
        return (group or self.world).ranks

    def new_group(self, ranks: list[int], among: Any = None, options: Any = None) -> Group:
        return self.groups.setdefault(tuple(ranks), Group(ranks))

    def all_gather(self, out: list[Tensor], tensor: Tensor, group: Group | None = None) -> None:
        for place, value in zip(out, (group or self.world).exchange(self.mine.rank, tensor.clone())):
            place.copy_(value)

    def all_reduce(self, tensor: Tensor, op: Any = None, group: Group | None = None) -> None:
        tensor.copy_(torch.stack((group or self.world).exchange(self.mine.rank, tensor.clone())).sum(0))

    def batch_isend_irecv(self, operations: list[Operation]) -> list[Receipt]:
        return [self._post(o, o.group or self.world) for o in operations]

    def _post(self, operation: Operation, group: Group) -> Receipt:
        me, peer = self.mine.rank, group.ranks[operation.group_peer]
        if operation.op == self.isend:
            self.sent[me] += operation.tensor.numel()
            with self.arrival:
                group.mail.setdefault((me, peer), []).append(operation.tensor.clone())
                self.arrival.notify_all()
            return Receipt(lambda: None)

        def receive() -> None:
            with self.arrival:
                assert self.arrival.wait_for(lambda: group.mail.get((peer, me)), LIMIT), f"{me} got nothing from {peer}"
                message = group.mail[peer, me].pop(0)
            assert message.numel() == operation.tensor.numel(), "a message of another length than expected"
            operation.tensor.copy_(message)

        return Receipt(receive)


def run(size: int, work: Callable[[int], Any]) -> tuple[list[Any], ThreadDist]:
    """(work(rank) for every rank, the group they shared); the first exception of a rank is raised here."""
    fake, out, errors = ThreadDist(size), [None] * size, []

    def member(rank: int) -> None:
        fake.mine.rank = rank
        try:
            out[rank] = work(rank)
        except BaseException as error:
            errors.append(error)
            for group in (fake.world, *fake.groups.values()):
                group.barrier.abort()

    threads = [threading.Thread(target=member, args=(r,), daemon=True) for r in range(size)]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    own_groups = mock.patch.multiple(groups, dist=fake, new_group=fake.new_group)
    own_messages = mock.patch.multiple(messages, dist=fake, DIRECT_MEMBERS=0)  # `sent` counts what is swapped only
    with own_groups, own_messages, mock.patch.object(members, "dist", fake):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20 * LIMIT)
    torch.set_num_threads(before)
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return out, fake
