"""From a step to its task graph.

- A rank runs its actions in order, one at a time; an overlapped pair is its halves, one after the other.
- Encoding and decoding occupy the rank, right after and right before the computation. Sending does not: the
  message holds a port for its wire time (pipeline traffic before gradients) and arrives a latency later.
- The receiver waits only where it needs the tensor; stages on one rank pass tensors on at no cost.
- After a stage's last weight backward (in all replicas) its gradient units are exchanged one after another, each
  encoded, reduced and decoded beside the computation. On the wire they are sent in slices, between which a pipeline
  message may be sent: with slices of its own length it is delayed as if two flows shared the port.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from thinwire.planner.actions import Action, Kind
from thinwire.planner.graph import NONE, Graph
from thinwire.planner.step import Hop, Send, Step, Traffic

MOST_SLICES = 32  # of one unit
BEGUN = 1  # priority at a port of a unit that has begun; pipeline messages have 0, and are sent first
FRESH = 2  # priority of a unit that has not begun
COMPUTE = "compute"
ENCODE = "encode"
WIRE = "wire"
DECODE = "decode"


class About(NamedTuple):
    """What a task does, and on which rank."""

    what: str  # one of the four above
    replica: int
    rank: int
    subject: Action | Send


class Builder:
    """Makes the task graph of a step. After `build` its `graph`, `about` (one entry per task) and `messages` (of
    replica 0) are complete."""

    def __init__(self, step: Step) -> None:
        self.step, self.schedule = step, step.schedule
        self.graph = Graph()
        self.about: list[About] = []
        self.messages: dict[Send, tuple[int, int, Hop]] = {}  # first and last task on the wire, cost
        self._ends: dict[tuple[int, int], int] = {}  # replica, stage -> its last weight backward
        self._made: dict[tuple[int, Send], int] = {}  # replica, tensor -> the task after which it is there
        self._needs: list[tuple[tuple[int, Send], int]] = []

    def build(self) -> Builder:
        replicas = range(self.step.machine.replicas)
        for replica in replicas:
            for rank in range(len(self.schedule.ranks)):
                self._program(replica, rank)
        for tensor, task in self._needs:
            self.graph.edge(self._made[tensor], task)
        for replica in replicas:
            reduced = [self._reduce(replica, s, units) for s, units in enumerate(self.step.gradients)]
            if self.step.embedding is not None:
                self._tie(replica, self.step.embedding, reduced)
        return self

    def _program(self, replica: int, rank: int) -> None:
        previous = NONE
        for action in self.schedule.compute(rank):
            chain = self._chain(replica, rank, action)
            for task in chain:
                if previous != NONE:
                    self.graph.edge(previous, task)
                previous = task

    def _chain(self, replica: int, rank: int, action: Action) -> list[int]:
        """The tasks of one action on its rank: decode, compute, encode."""
        stage, kind, part, _ = action
        assert part is not None
        compute = self._busy(COMPUTE, replica, rank, action, self.step.work.seconds(action))
        if kind is Kind.W:
            self._ends[replica, stage] = compute
            return [compute]
        traffic, ahead = (Traffic.FORWARD, 1) if kind is Kind.F else (Traffic.BACKWARD, -1)
        decode = self._receive(replica, rank, Send(traffic, stage - ahead, part), stage, compute)
        encode = self._send(replica, rank, Send(traffic, stage, part), stage + ahead, compute)
        if kind is Kind.B:
            self._ends[replica, stage] = [compute, *encode][-1]  # the last send is on its way before gradients
        return [*decode, compute, *encode]

    def _receive(self, replica: int, rank: int, send: Send, stage: int, compute: int) -> list[int]:
        if not 0 <= send.stage < self.schedule.stages:
            return []
        seconds = self.step.hop(send).decode if self.schedule.remote(send.stage, stage) else 0.0
        decode = [self._busy(DECODE, replica, rank, send, seconds)] if seconds else []
        self._needs.append(((replica, send), decode[0] if decode else compute))
        return decode

    def _send(self, replica: int, rank: int, send: Send, to: int, compute: int) -> list[int]:
        if not self.schedule.remote(send.stage, to):
            self._made[replica, send] = compute
            return []
        hop = self.step.hop(send)
        encode = [self._busy(ENCODE, replica, rank, send, hop.encode)] if hop.encode else []
        wire = self._made[replica, send] = self._wire(replica, rank, send, hop)
        if not replica:
            self.messages[send] = (wire, wire, hop)
        self.graph.edge(encode[0] if encode else compute, wire)
        return encode

    def _reduce(self, replica: int, stage: int, units: Sequence[Hop]) -> int:
        """The stage's units in a row, after its last weight backward everywhere; returns the last task."""
        before, last = self._finished(stage), self._ends[replica, stage]
        for unit, hop in enumerate(units):
            last = self._exchange(replica, Send(Traffic.GRADIENT, stage, unit), hop, before)
            before = [last]
        return last

    def _tie(self, replica: int, hop: Hop, reduced: list[int]) -> None:
        """The tied embedding's exchange, on first and last stage: fused after their backward, else after both sums."""
        first, final = 0, self.schedule.stages - 1
        fused = self.step.embedding_fused or not reduced
        before = self._finished(first) + self._finished(final) if fused else [reduced[first], reduced[final]]
        for stage in (first, final):
            self._exchange(replica, Send(Traffic.EMBEDDING, stage, 0), hop, before)

    def _exchange(self, replica: int, send: Send, hop: Hop, before: list[int]) -> int:
        """Encode, reduce, decode; returns the last of them."""
        rank = self.schedule.rank_of[send.stage]
        tasks = [self._busy(ENCODE, replica, rank, send, hop.encode)] if hop.encode else []
        slices = max(1, min(MOST_SLICES, math.ceil(hop.wire / self.step.slice))) if self.step.slice else 1
        pieces = [hop._replace(wire=hop.wire / slices, latency=0.0)] * (slices - 1)
        pieces.append(hop._replace(wire=hop.wire / slices))  # what is sent without a pause arrives one latency later
        tasks += [self._wire(replica, rank, send, x, BEGUN if at else FRESH) for at, x in enumerate(pieces)]
        if not replica:
            self.messages[send] = (tasks[-slices], tasks[-1], hop)
        if hop.decode:
            tasks.append(self._busy(DECODE, replica, rank, send, hop.decode))
        for task in tasks:
            for earlier in before:
                self.graph.edge(earlier, task)
            before = [task]
        return tasks[-1]

    def _finished(self, stage: int) -> list[int]:
        return [self._ends[replica, stage] for replica in range(self.step.machine.replicas)]

    def _busy(self, what: str, replica: int, rank: int, subject: Action | Send, seconds: float) -> int:
        """A task that needs the rank, and one of its machine's cores where they are counted."""
        machine, pool = self.step.machine, NONE
        if machine.cores:
            place = replica * len(self.schedule.ranks) + rank
            pool = self.graph.add_pool(("cores", place // machine.ranks if machine.ranks else 0), machine.cores)
        self.about.append(About(what, replica, rank, subject))
        return self.graph.task(seconds, pool)

    def _wire(self, replica: int, rank: int, send: Send, hop: Hop, priority: int = 0) -> int:
        pool = self.graph.add_pool(("port", replica, self.step.occupies(send)))
        self.about.append(About(WIRE, replica, rank, send))
        return self.graph.task(hop.wire, pool, hop.latency, priority)
