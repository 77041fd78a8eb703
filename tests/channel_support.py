"""What the channel's tests share: memories, the two ends of a wire, and a message over it."""

from __future__ import annotations

import torch

import thinwire as tw
from thinwire import codecs as c
from thinwire import memory as m

DELTAS = [m.Delta(store=s, gate=g, cold=k) for s in ("fp32", "bf16", "int8") for g in (False, True)
          for k in (None, c.Rotated(c.Quantize(4)))]  # fmt: skip
MEMORIES = [m.Plain(), m.Diana(0.3), m.RandDiana(0.4), m.EF21(), m.ErrorFeedback(), m.EControl(0.3), *DELTAS]


def ends(codec: c.Codec, memory: m.Memory) -> tuple[tw.Channel, tw.Channel]:
    """The sender's and the receiver's."""
    return tw.Channel(codec, memory, name="sender"), tw.Channel(codec, memory, name="receiver")


def move(pair: tuple[tw.Channel, tw.Channel], key, x: torch.Tensor) -> torch.Tensor:
    """Send and receive one message, of the size that both ends announce."""
    size = pair[0].nbytes(key, x.shape, x.dtype)
    frame = pair[0].send(key, x)
    assert frame.numel() == size == pair[1].nbytes(key, x.shape, x.dtype) or pair[1].state.read("h", key) is None
    return pair[1].recv(key, frame, x.shape, x.dtype)


def digests(channel: tw.Channel, keys) -> list[int]:
    return [channel.digest(k) for k in keys]
