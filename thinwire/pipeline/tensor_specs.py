"""Shapes and types of what goes into a stage and comes out of it, and the frame that says that they are wrong.

The first stage sees a batch only when the others already wait for its first message. Where the batch is not as it was
announced, a frame that no codec writes goes in that message's place, of the size that is waited for; whoever gets it
passes it on, and then all ranks hear the complaint together (framed.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

Spec = tuple[tuple[int, ...], torch.dtype]  # of one tensor
REFUSED = 255  # all bytes of such a frame; a real one begins with its version


def outputs_of(module: nn.Module, inputs: Sequence[Spec], device: torch.device) -> list[Spec]:
    """What leaves a stage for these that enter: its module on zeros, without touching state or generators."""
    zeros = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in inputs]
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    devices = [device] if torch.device(device).type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        out = torch.func.functional_call(module, buffers, tuple(zeros))
    return [(tuple(o.shape), o.dtype) for o in (out if isinstance(out, (tuple, list)) else (out,))]


def in_words(declared: Tensor | tuple[Tensor, ...] | None) -> tuple[str, ...] | None:
    """Static example tensors, in words."""
    if declared is None:
        return None
    tensors = (declared,) if isinstance(declared, Tensor) else declared
    return tuple(f"{tuple(t.shape)} {t.dtype}" for t in tensors)


def is_refusal(message: Tensor, dtype: torch.dtype) -> bool:
    """Whether what came for a tensor of this type is such a frame; whole numbers go as they are: they are none."""
    if not dtype.is_floating_point or message.device.type != "cpu" or int(message[0]) != REFUSED:
        return False
    return bool((message == REFUSED).all())
