"""Many members of a group in one process, a thread each: losses without a network, on one machine or one card.

    group = InProcessGroup(4)
    means = group.run(lambda member: collectives.OkTopk(0.01).exchange(gradients[member.rank], member, state=…)[0])

Losses do not depend on the network. What a member computes and sends here has the bits that it has between processes
(a test compares 200 steps of training); sums that a backend would take in its own order are taken in rank order.

One member runs at a time, and hands on to the next where it has to wait for a message. So a run repeats to the bit,
threads do not compete for the interpreter, and members that all wait are found at once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.members import Members, Message

Answer = TypeVar("Answer")


class MemberStopped(RuntimeError):
    """Another member of the group ended with an error, or all of them wait for each other."""


@dataclass
class Round:
    """One collective operation: what members gave so far, and how many have taken the outcome."""

    given: dict[int, Tensor] = field(default_factory=dict)
    total: Tensor | None = None
    taken: int = 0


class InProcessGroup:
    """`size` members. Their mail lives as long as the group, their threads as long as a `run`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.members = [InProcess(self, rank) for rank in range(size)]
        self.mail: dict[tuple[int, int, int], deque[Tensor]] = {}  # (from, to, tag)
        self.rounds: dict[int, Round] = {}
        self.turns: list[threading.Semaphore] = []
        self.there: list[int] = []  # whose work has not ended
        self.idle = 0  # members that handed on since anything was given
        self.broken = False

    def run(self, work: Callable[[InProcess], Answer]) -> list[Answer]:
        """work(member) for every member, in rank order; the first error of a member is raised here. On a card work
        is put on the device's default stream, whatever the caller's."""
        self.mail.clear()
        self.rounds.clear()
        self.turns = [threading.Semaphore(0) for _ in range(self.size)]
        self.there, self.idle, self.broken = list(range(self.size)), 0, False
        for member in self.members:
            member.operations = 0
        answers: list[Any] = [None] * self.size
        errors: list[BaseException] = []
        grad = torch.is_grad_enabled()
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

        def member_of(rank: int) -> None:
            self.turns[rank].acquire()
            try:
                torch.set_grad_enabled(grad)  # both are a thread's own
                if device is not None:
                    torch.cuda.set_device(device)
                self._go_on()
                answers[rank] = work(self.members[rank])
            except BaseException as error:
                errors.append(error)
                self.broken = True
            self._leave(rank)

        threads = [threading.Thread(target=member_of, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        self.turns[0].release()
        for thread in threads:
            thread.join()
        if errors:
            raise next((error for error in errors if not isinstance(error, MemberStopped)), errors[0])
        return answers

    def wait_until(self, ready: Callable[[], bool], rank: int, what: str) -> None:
        """Hand on to other members until ready(). MemberStopped where that can never be. what: for its message."""
        while not ready():
            self.idle += 1
            if self.idle > len(self.there):
                raise MemberStopped(f"member {rank} waits for {what}, and no other member can go on")
            following = self._next(rank)
            if following != rank:
                self.turns[following].release()
                self.turns[rank].acquire()
            self._go_on()

    def _go_on(self) -> None:
        if self.broken:
            raise MemberStopped("another member ended with an error")

    def _leave(self, rank: int) -> None:
        following = self._next(rank)
        self.there.remove(rank)
        self.idle = 0
        if self.there:
            self.turns[following].release()

    def _next(self, rank: int) -> int:
        """The next of those that are there."""
        place = self.there.index(rank)
        return self.there[(place + 1) % len(self.there)]


@dataclass
class Receipt:
    """An operation under way, as torch's Work."""

    wait: Callable[[], None]


class InProcess(Members):
    """One member; taken wherever a group is."""

    def __init__(self, group: InProcessGroup, rank: int) -> None:
        self.group, self.rank, self.operations = group, rank, 0

    def world(self) -> tuple[int, int]:
        return self.group.size, self.rank

    @property
    def backends(self) -> str:
        return "in_process"

    def isend(self, x: Tensor, peer: int, tag: int = 0) -> dist.Work:
        self.group.mail.setdefault((self.rank, peer, tag), deque()).append(x.clone())
        self.group.idle = 0
        return cast(dist.Work, Receipt(lambda: None))

    def irecv(self, x: Tensor, peer: int, tag: int = 0) -> dist.Work:
        def receive() -> None:
            box = self.group.mail.setdefault((peer, self.rank, tag), deque())
            self.group.wait_until(lambda: bool(box), self.rank, f"a message of member {peer}")
            message = box.popleft()
            if message.shape != x.shape:
                raise RuntimeError(
                    f"member {self.rank} expected {x.numel()} values of {peer} and got {message.numel()}"
                )
            x.copy_(message)

        return cast(dist.Work, Receipt(receive))

    def post(self, receives: Sequence[Message], sends: Sequence[Message]) -> list[dist.Work]:
        return [self.isend(x, peer) for x, peer in sends] + [self.irecv(x, peer) for x, peer in receives]

    def all_gather(self, out: list[Tensor], x: Tensor) -> None:
        for place, given in zip(out, self._everybody(x)[0], strict=True):
            place.copy_(given)

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        given, now = self._everybody(x)
        if now.total is None:  # the first that sees all
            now.total = given[0].clone()
            for other in given[1:]:
                if op == dist.ReduceOp.MAX:
                    torch.maximum(now.total, other, out=now.total)
                else:
                    now.total += other
        x.copy_(now.total)

    def start_all_reduce(self, x: Tensor) -> dist.Work:
        self.all_reduce(x)
        return cast(dist.Work, Receipt(lambda: None))

    def broadcast(self, x: Tensor, source: int) -> None:
        x.copy_(self._everybody(x)[0][source])

    def _everybody(self, x: Tensor) -> tuple[list[Tensor], Round]:
        """What all members give in this operation, in rank order; every one has to take part."""
        number, self.operations = self.operations, self.operations + 1
        now = self.group.rounds.setdefault(number, Round())
        now.given[self.rank] = x.clone()
        self.group.idle = 0
        self.group.wait_until(lambda: len(now.given) == self.group.size, self.rank, "the others' part of a collective")
        now.taken += 1
        if now.taken == self.group.size:
            del self.group.rounds[number]
        return [now.given[rank] for rank in range(self.group.size)], now
