"""Receives that are posted before their messages are sent.

Gloo sends a message only after the receiver's word that it waits for it has come: a message costs two latencies, and
one where that word came before. An exchange whose messages have the same sizes every time can post the next time's
receives as soon as this time's have arrived. Messages carry tags, one per message of the exchange, since they no longer
match by order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class Receives:
    """What every member will send: its buffer, and what to wait for; members that send nothing have no work."""

    buffers: list[Tensor]
    works: dict[int, list[dist.Work]] = field(default_factory=dict)


class PointToPoint(Protocol):
    """Messages between two members of a group, over one or more connections (flows.py)."""

    def isend(self, x: Tensor, peer: int, tag: int = 0) -> list[dist.Work]:
        """Send x to a member."""

    def irecv(self, x: Tensor, peer: int, tag: int = 0) -> list[dist.Work]:
        """Receive x from a member."""


class Early:
    """The receives of one exchange that is made again and again, with messages of the same sizes.

    flows: between the members of a group of Gloo. first_tag: its messages have the tags from there on; no other
    exchange on the group has them. tags: how many messages to every member the exchange has at most.
    """

    def __init__(self, flows: PointToPoint, first_tag: int, tags: int = 16) -> None:
        self.flows = flows
        self.first_tag = first_tag
        self.tags = tags
        self.next = 0  # which message of the exchange comes next
        self.posted: dict[int, Receives] = {}
        self.broken: RuntimeError | None = None  # why the next exchange could not be awaited

    def begin(self) -> None:
        """The exchange begins anew."""
        self.next = 0

    def tag(self) -> int:
        """Of the next message."""
        if self.next == self.tags:
            raise RuntimeError(f"an exchange of more than {self.tags} messages to every member")
        self.next += 1
        return self.first_tag + self.next - 1

    def post(self, tag: int, sizes: list[int], rank: int) -> Receives:
        """Post the receives of the message with that tag; sizes: in bytes, by member. rank: this member's own."""
        receives = Receives([torch.empty(n, dtype=torch.uint8) for n in sizes])
        for source, buffer in enumerate(receives.buffers):
            if source != rank and buffer.numel():
                receives.works[source] = self.flows.irecv(buffer, source, tag)
        return receives

    def take(self, tag: int, sizes: list[int], rank: int) -> Receives:
        """The receives of a message that is being sent now: those posted before, or new ones."""
        if self.broken is not None:
            raise self.broken
        receives = self.posted.pop(tag, None) or self.post(tag, sizes, rank)
        if [buffer.numel() for buffer in receives.buffers] != sizes:
            raise RuntimeError("an exchange whose messages have the same sizes every time has other ones now")
        return receives

    def post_again(self, tag: int, sizes: list[int], rank: int) -> None:
        """The message has arrived: wait for the next one with that tag.

        A member that has closed its connections after this exchange is an error of the next exchange only: there may
        be none, for then this was the last one, and that member was done with it first."""
        try:
            self.posted[tag] = self.post(tag, sizes, rank)
        except RuntimeError as error:
            self.broken = error
