"""A Gloo group in which nobody waits for a member that is gone.

Gloo's waits cannot be ended from outside. So another thread waits, and the caller waits for it or for the alarm. A
thread whose wait nobody wants any more stays behind until Gloo's time-out, and keeps the group and the memory of the
message until then. Messages have memory of their own: what arrives late is written nowhere else.
"""

from __future__ import annotations

from abc import abstractmethod
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.members import DirectMembers
from thinwire.elastic.alarm import Alarm
from thinwire.elastic.aside import within
from thinwire.torch_private.torchft import store_at


class AlarmedMembers(DirectMembers):
    """A process group by its own methods, and its alarm."""

    @property
    @abstractmethod
    def alarm(self) -> Alarm:
        """That of the present group."""

    def isend(self, x: Tensor, peer: int, tag: int = 0) -> dist.Work:
        group = self.process_group()
        return cast(dist.Work, Receipt(self.alarm, group, group.send([x.clone()], peer, tag)))

    def irecv(self, x: Tensor, peer: int, tag: int = 0) -> dist.Work:
        group, held = self.process_group(), torch.empty_like(x)
        return cast(dist.Work, Receipt(self.alarm, group, group.recv([held], peer, tag), x, held))

    def all_gather(self, out: list[Tensor], x: Tensor) -> None:
        held = [torch.empty_like(place) for place in out]
        super().all_gather(held, x.clone())
        for place, found in zip(out, held, strict=True):
            place.copy_(found)

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        held = x.clone()
        super().all_reduce(held, op)
        x.copy_(held)

    def start_all_reduce(self, x: Tensor) -> dist.Work:
        group, held = self.process_group(), x.clone()
        work = group.allreduce([held], dist.AllreduceOptions())
        return cast(dist.Work, Receipt(self.alarm, group, work, x, held))

    def broadcast(self, x: Tensor, source: int) -> None:
        held = x.clone()
        super().broadcast(held, source)
        x.copy_(held)

    def finish(self, group: dist.ProcessGroup, work: dist.Work) -> None:
        Receipt(self.alarm, group, work).wait()


class Receipt:
    """A message under way. `wait` is as torch's Work has it.

    alarm: that ends the wait. group: that is kept while the message is under way. work: Gloo's. into: where what
    arrives goes from `held`, Gloo's place for it.
    """

    def __init__(
        self, alarm: Alarm, group: dist.ProcessGroup, work: dist.Work, into: Tensor | None = None,
        held: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.alarm, self.group, self.work, self.into, self.held = alarm, group, work, into, held

    def wait(self) -> bool:
        """RuntimeError where a member is gone, or gave the step up, or the time-out is over."""
        self.alarm.wait_for(self._wait)
        if self.into is not None and self.held is not None:
            self.into.copy_(self.held)
        return True

    def _wait(self) -> None:
        self.work.wait()


def meet(host: str, timeout: timedelta, address: str, rank: int, size: int) -> tuple[dist.Store, Alarm]:
    """The store of a quorum, and its alarm. address: the store's. Others as for Alarm. TimeoutError where that takes
    longer than `timeout`: torch waits without end for a store whose process is frozen."""

    def find() -> tuple[dist.Store, Alarm]:
        store = store_at(address, timeout)
        return store, Alarm(store, rank, size, host, timeout.total_seconds())

    found: tuple[dist.Store, Alarm] = within(
        timeout.total_seconds(), find, lambda late: late[1].ring("this member had given the meeting up")
    )
    return found
