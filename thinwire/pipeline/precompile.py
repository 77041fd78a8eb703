"""Compile the kernels of a pipeline's messages before the first step, by sending small ones to oneself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from thinwire.config.wire import Link, Wire
from thinwire.distributed.precompile import STEPS, example_values, precompile
from thinwire.memory import Memory
from thinwire.pipeline.lane import Lane
from thinwire.pipeline.message_choice import Message

SAMPLES = (0, 1)


def precompile_messages(wire: Wire, module: nn.Module, row: Sequence[int], say: Callable[[str], None]) -> None:
    """Compile what the messages of a stage need.

    wire, module: the stage's. row: the shape of one sample's activation. say: takes a line about it.
    """
    like = next((p for p in module.parameters() if p.is_floating_point()), torch.empty(0))
    calls = [partial(try_link, link, row, like) for link in (None, wire.forward, wire.backward)]
    precompile("the pipeline", calls, like, say)


def try_link(link: Link | None, row: Sequence[int], like: Tensor) -> None:
    """Send messages of a `link` (None: exact) of samples never seen, and of samples remembered.

    row: the shape of one sample's activation. like: a tensor of its dtype and device.
    """
    x = example_values((len(SAMPLES), *row), like)
    if link is not None and isinstance(link.memory, Memory):
        link = replace(link, memory=replace(link.memory, path=None, capacity=1.0, fixed=None))
    sender = Lane(link, "precompiled", "send", 0)
    receiver = Lane(link, "precompiled", "recv", 0)
    message = Message(0, SAMPLES, True, tokens=torch.zeros(x.shape[:-1], dtype=torch.long, device=x.device))
    for step in range(STEPS):
        for lane in (sender, receiver):
            lane.begin(step)
            lane.digests(SAMPLES)
        receiver.recv(message, 0, sender.send(message, 0, x), x.shape, x.dtype)
        for lane in (sender, receiver):
            lane.resolve_checks()
            lane.end_step(keep=True)
