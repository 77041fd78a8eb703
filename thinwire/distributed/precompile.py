"""Kernels are compiled when they are first called: here they are called before the first step, and before any clock.

What a wire will do is done on a few values with state of its own that is dropped. So whatever codecs, memories and
collectives call is compiled, or loaded where a run in this folder has compiled it before. Nothing is sent, no state is
kept, and no generator of torch's is used. data_parallel/precompile.py calls an exchange, pipeline/precompile.py a
message.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

STEPS = 2  # without what is remembered, and with it
NOTICEABLE = 2.0  # seconds


def precompile(what: str, calls: Sequence[Callable[[], None]], like: Tensor, say: Callable[[str], None]) -> None:
    """Make the calls once, if the device is a CPU (what Triton compiles depends on sizes too).

    what: named in the line that `say` gets where it took more than NOTICEABLE seconds. calls: what will be done in a
    step, on a few values. like: a tensor of the device that will be used.
    """
    if like.device.type != "cpu":
        return
    from thinwire.kernels.cpu.compile import compiled_once  # Numba, which a card does not need

    began = time.perf_counter()
    with torch.no_grad(), compiled_once():
        for call in calls:
            call()
    took = time.perf_counter() - began
    if took > NOTICEABLE:
        say(f"kernels for {what}: {took:.1f} s (compiled once per folder, loaded after that)")


def example_values(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Values from −1 to 1 of that shape."""
    return torch.linspace(-1, 1, math.prod(shape), dtype=dtype).reshape(tuple(shape))
