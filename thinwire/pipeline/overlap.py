"""Overlap: frames travel while the stages compute. A transport carries one boundary in one direction, in its own group.

Torch's 1F1B waits for a rank's sends and receives before it goes on computing, all on one group: a slow link and the
computation take turns, and so do the two directions. Here a frame is sent as soon as it is encoded, receives are
posted one micro-batch ahead, and only the decoding of a frame waits for that frame. The order of computation stays the
schedule's; it must ask for micro-batches in ascending order, as GPipe and 1F1B do.

On a GPU every transport has a stream, where its codecs run. A frame is decoded when it arrives, not when the
computation needs it, and the computation goes on while its last result is encoded. A receive there is a kernel that
spins until its frame arrives, and one-time work (loading a kernel, a group's first message) waits for all kernels. So
every group exchanges a byte when it is made, and no receive is posted that depends on work which this rank has not
enqueued yet: under GPipe and 1F1B the next micro-batch's never does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.flows import Flows
from thinwire.collectives.groups import explicit, subgroup, world
from thinwire.errors import UsageError
from thinwire.pipeline.lane import DIRECTIONS
from thinwire.torch_private.pipelining import only_stage, pretend_stages

AHEAD = 2  # micro-batches whose receives are posted at a time: the one asked for, and the next


@dataclass
class Transport:
    """One boundary in one direction, at one of its ends.

    group: of the two ends.
    peer: the other end's rank in the group, 0 or 1.
    stream: on a GPU: where codecs run and receives are posted, so that they wait for no computation.
    flows: over which frames go, where there are several.
    """

    group: dist.ProcessGroup | None
    peer: int
    stream: torch.cuda.Stream | None = None
    flows: Flows | None = None
    sent: list[dist.Work] = field(default_factory=list)
    posted: dict[int, tuple[list[Tensor], list[dist.Work]]] = field(default_factory=dict)
    next: int = 0  # the micro-batch to post
    given: Sequence[Tensor] = ()  # tensors of the computation that the transport's stream reads
    _transport_done: torch.cuda.Event | None = None  # recorded on the transport's stream, for the computation's
    _compute_done: torch.cuda.Event | None = None  # recorded on the computation's stream, for the transport's

    def begin(self) -> None:
        """At step start: let the transport's stream wait for the computation's, which may have changed memories."""
        if self.stream is not None:
            self._compute_done = self._compute_done or torch.cuda.Event()
            self._compute_done.record(torch.cuda.current_stream(self.stream.device))
            self.stream.wait_event(self._compute_done)

    @contextmanager
    def on_stream(self, given: Sequence[Tensor] = ()) -> Iterator[None]:
        """Work on the transport's stream; it waits for `given`, tensors of the computation, and for nothing else."""
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
        """Let the computation wait until the tensors given before have been read; then it may overwrite them. (torch's
        own way, `record_stream`, queries the GPU at every allocation.)"""
        if self.given:
            self.deliver([])
            self.given = ()

    def deliver(self, tensors: list[Tensor]) -> list[Tensor]:
        """Hand `tensors` made on the transport's stream to the computation, which waits for them."""
        if self.stream is not None:
            compute = torch.cuda.current_stream(self.stream.device)
            self._transport_done = self._transport_done or torch.cuda.Event()
            self._transport_done.record(self.stream)
            compute.wait_event(self._transport_done)
            for x in tensors:
                x.record_stream(compute)
        return tensors

    def send(self, frames: list[Tensor]) -> None:
        """Start sending the `frames` of a micro-batch."""
        self.sent += self._start(dist.isend, frames)

    def post(self, chunk: int, frames: list[Tensor]) -> None:
        """Start receiving micro-batch `chunk` into these buffers, one per frame."""
        if chunk != self.next:
            raise UsageError(
                f"overlap: this schedule asks for micro-batch {chunk} where {self.next} comes next: use overlap=False"
            )
        self.posted[chunk] = frames, self._start(dist.irecv, frames)
        self.next += 1

    @contextmanager
    def arrived(self, chunk: int) -> Iterator[None]:
        """Work on the transport's stream after the frames of micro-batch `chunk` have arrived; on a GPU the stream
        waits for them, not the host."""
        _, works = self.posted.pop(chunk)
        with self.on_stream():
            for work in works:
                work.wait()
            yield

    def finish(self) -> None:
        """At the end of a step: wait until everything has been sent."""
        sent = self.sent
        self.sent = []
        self.next = 0
        for work in sent:
            work.wait()
        self.deliver([])
        self.given = ()
        if self.posted:
            raise RuntimeError(f"frames of micro-batches {sorted(self.posted)} were expected and never asked for")

    def _start(self, operation: Callable[..., Any], frames: list[Tensor]) -> list[dist.Work]:
        if self.flows is not None:
            start = self.flows.isend if operation is dist.isend else self.flows.irecv
            return [work for frame in frames for work in start(frame, self.peer)]
        operations = [dist.P2POp(operation, frame, group=self.group, group_peer=self.peer) for frame in frames]
        return dist.batch_isend_irecv(operations) if operations else []


def make_transports(
    stage: int, rank_of: Mapping[int, int], group: dist.ProcessGroup | None, device: torch.device, streams: int = 1
) -> dict[tuple[str, str], Transport]:
    """(direction, "in" or "out") → transport, of the only stage of this rank. All ranks call it together.

    Every rank makes as many groups as the others, in the same order: of a boundary, or of itself alone.

    stage: this rank's. rank_of: stage → rank in the group. group: the ranks of the pipeline. device: this rank's.
    streams: flows per transport.
    """
    size, rank = world(group)
    if sorted(rank_of.values()) != list(range(size)):
        raise UsageError("overlap needs one stage per rank (GPipe or 1F1B): use overlap=False")
    transports: dict[tuple[str, str], Transport] = {}
    for parity in (0, 1):  # boundaries that begin at even stages, then those at odd ones: no stage is in two at once
        for direction in DIRECTIONS:
            left = stage if stage % 2 == parity else stage - 1
            if left < 0 or left + 1 not in rank_of:
                subgroup([rank], explicit(group))
                continue
            pair = subgroup([rank_of[left], rank_of[left + 1]], explicit(group), _one_block(device))
            is_out = (direction == "forward") == (left == stage)
            peer = rank_of[left + 1] if left == stage else rank_of[left]
            ranks = dist.get_process_group_ranks(explicit(group))
            stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
            flows = Flows(pair, streams) if streams > 1 and stream is None else None
            transport = Transport(pair, dist.get_group_rank(pair, ranks[peer]), stream, flows)
            byte = [torch.zeros(1, dtype=torch.uint8, device=device)]
            for work in transport._start(dist.isend if is_out else dist.irecv, byte):
                work.wait()
            transports[direction, "out" if is_out else "in"] = transport
    return transports


def _one_block(device: torch.device) -> Any:
    """Options of a transport's group. On a GPU a message is a kernel that mostly waits: it gets one block, so that the
    computation has the other processors."""
    if device.type != "cuda":
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas = options.config.max_ctas = 1
    return options


def run_ahead(schedule: Any, depth: int = 2) -> None:
    """Let torch's 1F1B begin more micro-batches before the first backward, so that transfers overlap with computation.

    schedule: a Schedule1F1B. depth: 1 is torch's own, see below.

    Stage s has w_s micro-batches in flight. For the gradient of one to be back when its turn comes, a cycle must last
    T ≥ (f + b + τ_f + τ_b) / (w_s − w_{s+1}): forward, backward and both transfers. With torch's w_s = S − s
    computation and transfers take turns; w_s = depth·(S − 1 − s) + 1 with depth 2 hides whichever is shorter, and keeps
    twice the activations. Where they are about equal, depth 3 is 3 % faster, since the two directions share a link
    (docs/gpu.md).
    """
    stage = only_stage(schedule)
    if depth < 1 or stage is None:
        raise UsageError(f"run_ahead takes a 1F1B schedule of one stage and a depth from 1, not {schedule}, {depth}")
    pretend_stages(schedule, stage.stage_index + depth * (stage.num_stages - 1 - stage.stage_index) + 1)
