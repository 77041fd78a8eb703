"""Frames beside the computation: every boundary and direction has a group of its own, and nobody waits to have sent.

Torch's 1F1B waits for a rank's sends and receives before it computes on, all on one group: a slow link and the
computation take turns, and so do the two directions. Here a frame is on its way as soon as it is encoded, receives are
posted a micro-batch ahead, and only the decoding of a frame waits for that frame. The schedule's order of computation
stays its own; it must ask for micro-batches in ascending order, as GPipe and 1F1B do.

On a card every transport has a stream, where its codecs run: a frame is decoded when it arrives, not when the
computation comes to it, and the computation goes on while its last result is encoded. A receive there is a kernel that
spins until its frame is there, and things that happen once (loading a kernel, a group's first message) wait for all
kernels. So groups are tried when they are made, and no receive is posted that needs more of this rank than what it has
enqueued before: under GPipe and 1F1B the next micro-batch's never does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.groups import subgroup, whole, world
from thinwire.errors import UsageError
from thinwire.torch_private.pipelining import only_stage, pretend_stages

AHEAD = 2  # micro-batches whose frames are waited for at a time: the one asked for, and the next
WAYS = ("forward", "backward")


@dataclass
class Transport:
    """One boundary in one direction, as one of its ends sees it."""

    group: Any
    peer: int  # 0 or 1, its rank in the group
    stream: Any = None  # on a card: where codecs run and receives are posted, so that they wait for no computation
    sent: list[dist.Work] = field(default_factory=list)
    posted: dict[int, tuple[list[Tensor], list[dist.Work]]] = field(default_factory=dict)
    next: int = 0  # the micro-batch to post
    given: Sequence[Tensor] = ()  # the computation's memory, which the transport's stream reads
    _there: Any = None  # an event of each stream, for the other to wait for
    _here: Any = None

    def begin(self) -> None:
        """The step's start: memories may have been changed by the computation's stream."""
        if self.stream is not None:
            self._here = self._here or torch.cuda.Event()
            self._here.record(torch.cuda.current_stream(self.stream.device))
            self.stream.wait_event(self._here)

    @contextmanager
    def on_stream(self, given: Sequence[Tensor] = ()) -> Iterator[None]:
        """Work on this stream: it waits for `given`, which the computation has made, and for nothing else."""
        if self.stream is None:
            yield
            return
        if given:
            self.release()
            self.begin()
            self.given = given
        with torch.cuda.stream(self.stream):
            yield

    def release(self) -> None:
        """Of what was given before: the computation may write over it once the transport's stream has read it. (Where
        torch keeps account of that, `record_stream`, it asks the card at every allocation.)"""
        if self.given:
            self.deliver([])
            self.given = ()

    def deliver(self, tensors: list[Tensor]) -> list[Tensor]:
        """Work of the transport's stream to the computation, which waits for it."""
        if self.stream is not None:
            here = torch.cuda.current_stream(self.stream.device)
            self._there = self._there or torch.cuda.Event()
            self._there.record(self.stream)
            here.wait_event(self._there)
            for x in tensors:
                x.record_stream(here)
        return tensors

    def send(self, frames: list[Tensor]) -> None:
        self.sent += self._start(dist.isend, frames)

    def post(self, chunk: int, frames: list[Tensor]) -> None:
        """Buffers that the frames of a micro-batch will arrive in."""
        if chunk != self.next:
            raise UsageError(
                f"overlap: this schedule asks for micro-batch {chunk} where {self.next} comes next: use overlap=False"
            )
        self.posted[chunk] = frames, self._start(dist.irecv, frames)
        self.next += 1

    @contextmanager
    def arrived(self, chunk: int) -> Iterator[None]:
        """Beside, where the frames of a micro-batch are there (on a card: that stream waits, the host does not)."""
        _, works = self.posted.pop(chunk)
        with self.on_stream():
            for work in works:
                work.wait()
            yield

    def finish(self) -> None:
        """The step's end: everything has been sent."""
        sent, self.sent, self.next = self.sent, [], 0
        for work in sent:
            work.wait()
        self.deliver([])
        self.given = ()
        if self.posted:
            raise RuntimeError(f"frames of micro-batches {sorted(self.posted)} were expected and never asked for")

    def _start(self, operation: Any, frames: list[Tensor]) -> list[dist.Work]:
        operations = [dist.P2POp(operation, frame, group=self.group, group_peer=self.peer) for frame in frames]
        return dist.batch_isend_irecv(operations) if operations else []


def make_transports(
    stage: int, place: dict[int, int], group: Any, device: torch.device
) -> dict[tuple[str, str], Transport]:
    """(way, "in" or "out") → transport, of the only stage of this rank; called by all ranks of the pipeline together.

    Every rank makes as many groups as the others, in the same order: of a boundary, or of itself alone.
    """
    size, rank = world(group)
    if sorted(place.values()) != list(range(size)):
        raise UsageError("overlap needs one stage a rank (GPipe or 1F1B): use overlap=False")
    transports: dict[tuple[str, str], Transport] = {}
    for parity in (0, 1):
        for way in WAYS:
            left = stage if stage % 2 == parity else stage - 1
            if left < 0 or left + 1 not in place:
                subgroup([rank], whole(group))
                continue
            made = subgroup([place[left], place[left + 1]], whole(group), _one_block(device))
            outwards = (way == "forward") == (left == stage)
            peer = place[left + 1] if left == stage else place[left]
            ranks = dist.get_process_group_ranks(whole(group))
            stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
            transport = Transport(made, dist.get_group_rank(made, ranks[peer]), stream)
            byte = [torch.zeros(1, dtype=torch.uint8, device=device)]
            for work in transport._start(dist.isend if outwards else dist.irecv, byte):
                work.wait()
            transports[way, "out" if outwards else "in"] = transport
    return transports


def _one_block(device: torch.device) -> Any:
    """Options of a transport's group. On a card a message is a kernel that waits for most of its life: of one block, so
    that the computation has the other processors."""
    if device.type != "cuda":
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas = options.config.max_ctas = 1
    return options


def run_ahead(schedule: Any, depth: int = 2) -> None:
    """Let torch's 1F1B begin more micro-batches before the first backward, so that transfers have time to hide.

    Stage s has w_s micro-batches in flight. For the gradient of one to be back when its turn comes, a cycle must last
    T ≥ (f + b + τ_f + τ_b) / (w_s − w_{s+1}): forward, backward and both transfers. Torch's w_s = S − s makes them take
    turns; w_s = depth·(S − 1 − s) + 1 with depth 2 hides whichever is shorter, for as many more activations kept. Where
    they are about equal a depth of 3 is 3 % faster, since the two directions share a link (docs/gpu.md).
    """
    stage = only_stage(schedule)
    if depth < 1 or stage is None:
        raise UsageError(f"run_ahead takes a 1F1B schedule of one stage and a depth from 1, not {schedule}, {depth}")
    pretend_stages(schedule, stage.stage_index + depth * (stage.num_stages - 1 - stage.stage_index) + 1)
