"""Kernels are compiled and loaded when they are first called: here they are called before the first step and any clock.

What a wire will do is done on a few values with state of its own that is dropped. So whatever codecs, memories and
collectives call is compiled, or loaded where a run in this folder has compiled it before. Nothing is sent, no state is
kept, and no generator of torch's is used. On a card it also keeps ranks from waiting for each other for ever, see
kernels/gpu/launch.py. data_parallel/precompile.py calls an exchange, pipeline/precompile.py a message.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

STEPS = 2  # without what is remembered, and with it
NOTICEABLE = 2.0  # seconds


def precompile(what: str, calls: Sequence[Callable[[], None]], like: Tensor, say: Callable[[str], None]) -> None:
    """Make the calls once.

    what: named in the line that `say` gets where it took more than NOTICEABLE seconds. calls: what will be done in a
    step, on a few values. like: a tensor of the device that will be used.
    """
    began = time.perf_counter()
    with torch.no_grad(), _one_compiles(like.device):
        for call in calls:
            call()
    took = time.perf_counter() - began
    if took > NOTICEABLE:
        say(f"kernels for {what}: {took:.1f} s (compiled once per folder, loaded after that)")


@contextmanager
def _one_compiles(device: torch.device) -> Iterator[None]:
    """On a CPU one process compiles, and the others load what it has.

    On a card all is done at the end. With THINWIRE_NEW_KERNELS=error in the environment what is loaded after that is an
    error, for whoever looks for a cause of ranks that wait for each other.
    """
    if device.type == "cuda":
        from thinwire.kernels.gpu import launch

        launch.new_kernels = "expect"
        yield
        torch.cuda.synchronize(device)
        launch.new_kernels = "refuse" if os.environ.get("THINWIRE_NEW_KERNELS") == "error" else "load"
        return
    from thinwire.kernels.cpu.compile import compiled_once  # Numba, which a card does not need

    with compiled_once():
        yield


def example_values(shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Values from −1 to 1 of that shape, on the device of `like`; dtype: None is that of `like`."""
    values = torch.linspace(-1, 1, math.prod(shape), dtype=dtype or like.dtype, device=like.device)
    return values.reshape(tuple(shape))
