"""A boundary between two stages of one process: every message goes through both ends of its lane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.config.wire import Wire
from thinwire.pipeline.lane import DIRECTIONS, Lane
from thinwire.pipeline.message_choice import Message


class Crossing:
    """One boundary: both ends of both directions. Lanes, their names and seeds are those of a Pipeline.

    wire: of its messages. boundary: its number, that of the stage before it. seed: the run's.
    """

    def __init__(self, wire: Wire, boundary: int, seed: int) -> None:
        after = boundary + 1
        names = {"forward": f"forward {boundary}→{after}", "backward": f"backward {after}→{boundary}"}
        links = {"forward": wire.forward, "backward": wire.backward}
        self.lanes = {way: [Lane(links[way], names[way], end, seed) for end in ("send", "recv")] for way in DIRECTIONS}

    def carry(self, direction: str, message: Message, x: Tensor) -> Tensor:
        """What the other end has of `x`."""
        sender, receiver = self.lanes[direction]
        with torch.no_grad():
            y = receiver.recv(message, 0, sender.send(message, 0, x.detach()), x.shape, x.dtype)
        trial = self.lanes["backward"][0].trial
        if direction == "forward" and trial is not None:
            trial.note_activations(message.microbatch, [y])
        return y

    def all(self) -> list[Lane]:
        """Its four lanes."""
        return [lane for pair in self.lanes.values() for lane in pair]

    def faults(self) -> list[str]:
        """What was wrong with messages of the open step; called once, at its end."""
        for lane in self.all():
            lane.resolve_checks()
        return [fault for lane in self.all() for fault in lane.faults]

    def sent(self, direction: str | None = None) -> int:
        """Bytes of frames so far, of one direction or both."""
        senders = [pair[0] for way, pair in self.lanes.items() if direction in (None, way)]
        return sum(channel.stats.wire_bytes for lane in senders for _, channel in lane.channels())


def cross(x: Tensor, crossing: Crossing, messages: Sequence[Message]) -> Tensor:
    """x as the next stage has it; its gradient comes back over the same boundary.

    messages: what both ends know of the one forward, and of the one backward.
    """
    return _Cross.apply(x, crossing, messages)


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, crossing: Crossing, messages: Sequence[Message]) -> Tensor:
        ctx.crossing, ctx.message = crossing, messages[1]
        return crossing.carry("forward", messages[0], x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        g = ctx.crossing.carry("backward", ctx.message, gradients[0].contiguous())
        return ctx.crossing.lanes["forward"][0].correct(ctx.message.microbatch, [g])[0], None, None
