"""Both copies of a tied embedding in one process: their gradients are averaged as two ranks would, a thread each."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.collectives import Dense
from thinwire.collectives.members import Members, Message
from thinwire.config.wire import Reduction, Wire, warmup_steps
from thinwire.data_parallel.exchange import Exchange
from thinwire.data_parallel.tied_embedding import NAME
from thinwire.errors import UsageError

PATIENCE = 60.0  # seconds that one thread waits for the other


class _Arrival(dist.Work):
    """A message on its way into x; without x one that was sent, for which nothing has to be waited."""

    def __init__(self, x: Tensor | None = None, mail: queue.SimpleQueue[Tensor] | None = None) -> None:
        super().__init__()
        self.x, self.mail = x, mail

    def wait(self, timeout: object = None) -> bool:
        if self.x is not None and self.mail is not None:
            self.x.copy_(self.mail.get(timeout=PATIENCE))
        return True


class Meeting:
    """Where two threads hand each other tensors."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2)
        self.shown: list[Tensor | None] = [None, None]
        self.mail: tuple[queue.SimpleQueue[Tensor], ...] = (queue.SimpleQueue(), queue.SimpleQueue())


class Member(Members):
    """One of two threads, as a group of two ranks."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank = meeting, rank

    def world(self) -> tuple[int, int]:
        return 2, self.rank

    @property
    def backends(self) -> str:
        return "cpu:gloo,cuda:nccl"

    def isend(self, x: Tensor, peer: int, tag: int = 0) -> dist.Work:
        self.meeting.mail[peer].put(x.clone())
        return _Arrival()

    def irecv(self, x: Tensor, peer: int, tag: int = 0) -> dist.Work:
        return _Arrival(x, self.meeting.mail[self.rank])

    def post(self, receives: Sequence[Message], sends: Sequence[Message]) -> list[dist.Work]:
        works = [self.irecv(x, peer) for x, peer in receives]
        return works + [self.isend(x, peer) for x, peer in sends]

    def all_gather(self, out: list[Tensor], x: Tensor) -> None:
        for place, value in zip(out, self._both(x)):
            place.copy_(value)

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        first, second = self._both(x)
        x.copy_(torch.maximum(first, second) if op == dist.ReduceOp.MAX else first + second)

    def broadcast(self, x: Tensor, source: int) -> None:
        x.copy_(self._both(x)[source])

    def _both(self, x: Tensor) -> list[Tensor]:
        self.meeting.shown[self.rank] = x.clone()
        self.meeting.barrier.wait(PATIENCE)
        found = [value for value in self.meeting.shown if value is not None]
        self.meeting.barrier.wait(PATIENCE)
        return found


class TiedPair:
    """The first and the last stage's copy of a tied embedding, as `TiedEmbedding` keeps them equal.

    copies: the two parameters. wire: its embedding section is used. seed: the run's.
    """

    def __init__(self, copies: tuple[nn.Parameter, nn.Parameter], wire: Wire, seed: int) -> None:
        reduction = wire.embedding or Reduction(Dense())
        if reduction.sync == "rows":
            raise UsageError("[wire.embedding] sync = 'rows': not in one process; take fused or separate")
        self.copies = copies
        self.sync = reduction.sync
        self.warmup = warmup_steps("embedding", reduction)
        meeting, inner = Meeting(), replace(reduction, exact_dims=0, exclude=())
        shapes = {NAME: tuple(copies[0].shape)}
        self.exchanges = [Exchange(shapes, inner, Member(meeting, rank), seed) for rank in range(2)]
        self.exact_bytes = 0
        self.threads = ThreadPoolExecutor(2)

    def reduce(self) -> None:
        """Both .grad ← their sum, as the wire carries it."""
        if self.sync == "separate":  # one replica: nothing to average on a stage, and between stages it is exact
            total = _gradient(self.copies[0]) + _gradient(self.copies[1])
            self.exact_bytes += 2 * total.nbytes
            for copy in self.copies:
                _gradient(copy).copy_(total)
            return
        for copy, mean in zip(self.copies, self.threads.map(self._mean, range(2))):
            _gradient(copy).copy_(mean.mul_(2))

    def settle(self, skipped: bool) -> None:
        """Keep what the step wrote, or drop it where it is `skipped`."""
        for exchange in self.exchanges if self.sync != "separate" else ():
            exchange.rollback() if skipped else exchange.commit()

    def sent(self) -> int:
        """Bytes that both have sent."""
        return self.exact_bytes + sum(exchange.sent for exchange in self.exchanges)

    def _mean(self, rank: int) -> Tensor:
        exchange = self.exchanges[rank]
        (unit,) = exchange.units
        values = _gradient(self.copies[rank]).reshape(-1).clone()
        mean = exchange.reduce(unit, values, exact=exchange.steps < self.warmup)
        return mean.view(self.copies[rank].shape)


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "a copy of the tied embedding has no gradient"
    return parameter.grad
