"""Receives that are posted before the step's first send, so that both directions of a slow link are used at once.

Gloo sends a message only after the receiver has signalled that it waits, and that signal queues behind everything the
receiver has already sent to the same peer. A receive posted when torch asks for it, usually together with a send to
the same neighbour, thus makes the two directions take turns: 50 kB each way over 5 Mbit/s took 0.16 s, and 0.08 s with
both receives posted first. The announcement lists the samples, so every frame's size is known at step start: from the
second step of a shape on all receives are posted there. Messages carry tags, since they no longer match by order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.flows import Flows
from thinwire.pipeline.lane import REFUSED, Lane
from thinwire.pipeline.message_choice import Message
from thinwire.pipeline.step_plan import StepPlan

LIMIT = 256 << 20  # bytes of buffers posted at once by a stage; what is beyond is received when torch asks


@dataclass
class Receive:
    """A receive under way.

    frame: the buffer it arrives in.
    shape, dtype: of the tensor in the frame.
    tag: of the frame; 0: it matches by order.
    works: what to wait for, where torch does not: it was posted early, or goes over several flows.
    """

    frame: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    tag: int
    works: list[dist.Work] = field(default_factory=list)


@dataclass
class LastReceive:
    """What torch asked to receive for a message in the last step; lists have one entry per tensor."""

    peers: list[tuple[int, Any]]  # (global rank, group)
    shapes: list[tuple[int, ...]]
    likes: list[Tensor]  # empty ones, for dtype and device


def empty_receives(
    lane: Lane, message: Message, shapes: Sequence[tuple[int, ...]], likes: Sequence[Tensor]
) -> list[Receive]:
    """Buffers for the frames of a message, one per tensor.

    lane: where it arrives. message: which. shapes: of its tensors. likes: tensors of their dtypes and device.
    """
    receives = []
    for i, (shape, like) in enumerate(zip(shapes, likes)):
        tag = message.tag(i)
        receives.append(Receive(lane.expect(message, i, shape, like), shape, like.dtype, tag))
    return receives


def start_receive(receive: Receive, peer: int, group: Any, flows: Flows | None) -> list[dist.Work]:
    """Post a receive from the (global) rank `peer`, over the flows or in the group; what to wait for."""
    if flows is not None:
        return flows.irecv(receive.frame, dist.get_group_rank(flows.groups[0], peer), receive.tag)
    work = dist.irecv(receive.frame, peer, group, receive.tag)
    return [] if work is None else [work]


class EarlyReceives:
    """One stage's receives. `known` holds for steps whose micro-batches have `rows`."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, int], LastReceive] = {}
        self.rows: Sequence[int] | None = None
        self.posted: dict[tuple[str, int], list[Receive]] = {}

    def note(
        self, direction: str, microbatch: int, ops: list[dist.P2POp], shapes: list[tuple[int, ...]],
        rows: Sequence[int] | None,
    ) -> None:  # fmt: skip
        """Torch has asked for these; in the next step of the same rows they can be posted before it asks again.

        direction, microbatch: the message. ops: torch's operations. shapes: of the tensors. rows: per micro-batch.
        """
        if rows != self.rows:
            self.known = {}
            self.rows = rows
        if rows is not None and ops and ops[0].tensor.device.type == "cpu":
            peers = [(op.peer, op.group) for op in ops]
            likes = [op.tensor.new_empty(0) for op in ops]
            self.known[direction, microbatch] = LastReceive(peers, shapes, likes)

    def post(self, plan: StepPlan, lanes: Mapping[str, Lane], flows: Flows | None = None) -> None:
        """Post the step's receives as far as `LIMIT` goes, where its rows are those of the step before.

        plan: the step's. lanes: incoming ones by direction. flows: of the pipeline, where it has several.
        """
        if plan.rows is None or plan.rows != self.rows:
            return
        total = 0
        for (direction, microbatch), last in sorted(self.known.items(), key=lambda item: item[0][1]):
            message = plan.incoming[direction][microbatch]
            receives = empty_receives(lanes[direction], message, last.shapes, last.likes)
            total += sum(receive.frame.nbytes for receive in receives)
            if total > LIMIT:
                return
            if any(receive.tag == 0 for receive in receives):
                continue
            for receive, (peer, group) in zip(receives, last.peers):
                receive.works = start_receive(receive, peer, group, flows)
            self.posted[direction, microbatch] = receives

    def take(self, direction: str, microbatch: int, shapes: list[tuple[int, ...]]) -> list[Receive] | None:
        """The receives of a message, where they were posted; `shapes` are those that torch asks for."""
        receives = self.posted.pop((direction, microbatch), None)
        if receives is not None and [receive.shape for receive in receives] != shapes:
            raise RuntimeError(
                f"{direction} of micro-batch {microbatch} has shapes {shapes}, but "
                f"{[receive.shape for receive in receives]} were expected, as in the step before: the shapes of a "
                "stage's outputs may change only with the batch's (step(shape=…))"
            )
        return receives

    def end_step(self, failed: bool) -> None:
        """Drop what is left. What a failed step has posted is never matched, since its tags are of that step; what
        was known need not be true then either."""
        self.posted = {}
        if failed:
            self.known = {}


def is_refusal(frame: Tensor, dtype: torch.dtype) -> bool:
    """Is this a refusal, where a tensor of `dtype` was expected? Integers are sent without a frame: never."""
    if not dtype.is_floating_point or frame.device.type != "cpu" or int(frame[0]) != REFUSED:
        return False
    return bool((frame == REFUSED).all())
