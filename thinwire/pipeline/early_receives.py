"""Receives that are posted before the step's first send, so that both directions of a slow link are used at once.

Gloo sends a message only after the receiver has told it that it waits, and that note travels behind everything the
receiver has already queued for the same peer. A receive posted when torch asks for it, usually together with a send to
the same neighbour, thus makes the two directions take turns: 50 kB each way over 5 Mbit/s took 0.16 s, and 0.08 s with
both receives posted first. The announcement says which samples come, so every frame's size is known at step start; from
the second step of a shape on all receives are posted there. Messages carry tags, since they no longer match by order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LIMIT = 256 << 20  # bytes of buffers posted at once by a stage; what is beyond is received when torch asks
WAYS = ("forward", "backward")
TENSORS = 16  # of one message, at most
TAGS = 2**31 - 1


@dataclass
class Arrival:
    """A receive under way: the frame's buffer, what it will be decoded to, and the work to wait for if it is early."""

    frame: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    work: dist.Work | None = None


@dataclass
class Known:
    """What arrived in the last step for a micro-batch, in one direction."""

    peers: list[tuple[int, Any]]  # (global rank, group) a tensor
    shapes: list[tuple[int, ...]]
    likes: list[Tensor]  # empty ones, for dtype and device


def tag(way: str, sender: int, chunk: int, index: int, step: int, stages: int, microbatches: int) -> int:
    """A number that no other message has in this step, or in the many before: what a step that failed has posted cannot
    be taken back, and must not match a later step's message. `step` counts from a number of the pipeline's own, for
    several may share a group. 0: there are too many messages to number, they match by order."""
    messages = stages * 2 * microbatches * TENSORS
    if index >= TENSORS or messages > TAGS >> 10:
        return 0
    place = ((sender * 2 + WAYS.index(way)) * microbatches + chunk) * TENSORS + index
    return 1 + place + messages * (step % ((TAGS - 1) // messages))


class EarlyReceives:
    """One stage's receives. `sizes` are the rows of the micro-batches for which `known` holds."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, int], Known] = {}
        self.sizes: Sequence[int] | None = None
        self.posted: dict[tuple[str, int], list[Arrival]] = {}

    def note(
        self, way: str, chunk: int, ops: list[dist.P2POp], shapes: list[tuple[int, ...]], sizes: Sequence[int] | None
    ) -> None:
        """Torch has asked for these: the next step of the same sizes need not wait for it to ask again."""
        if sizes != self.sizes:
            self.known, self.sizes = {}, sizes
        if sizes is not None and ops and ops[0].tensor.device.type == "cpu":
            likes = [op.tensor.new_empty(0) for op in ops]
            self.known[way, chunk] = Known([(op.peer, op.group) for op in ops], shapes, likes)

    def post(
        self,
        sizes: Sequence[int] | None,
        expect: Callable[[str, int, int, tuple[int, ...], Tensor], Tensor],
        tag_of: Callable[..., int],
    ) -> None:
        """`expect` gives the empty frame of (direction, micro-batch, tensor, shape, like)."""
        if sizes is None or sizes != self.sizes:
            return
        total = 0
        for (way, chunk), known in sorted(self.known.items(), key=lambda item: item[0][1]):
            arrivals = [
                Arrival(expect(way, chunk, i, shape, like), shape, like.dtype)
                for i, (shape, like) in enumerate(zip(known.shapes, known.likes))
            ]
            total += sum(arrival.frame.numel() * arrival.frame.element_size() for arrival in arrivals)
            if total > LIMIT:
                return
            tags = [tag_of(way, chunk, i) for i in range(len(arrivals))]
            if 0 in tags:
                continue
            for arrival, (peer, group), number in zip(arrivals, known.peers, tags):
                arrival.work = dist.irecv(arrival.frame, peer, group, number)
            self.posted[way, chunk] = arrivals

    def take(self, way: str, chunk: int, shapes: list[tuple[int, ...]]) -> list[Arrival] | None:
        """The receives of a micro-batch, where they were posted."""
        arrivals = self.posted.pop((way, chunk), None)
        if arrivals is not None and [a.shape for a in arrivals] != shapes:
            raise RuntimeError(
                f"{way} of micro-batch {chunk} brings {shapes}, but {[a.shape for a in arrivals]} was expected, as in "
                "the step before: what a stage puts out may change its shape only with the batch (step(shape=…))"
            )
        return arrivals

    def drop(self) -> None:
        """The step is over. What a failed one has left is never matched: its tags are of that step."""
        self.posted = {}
