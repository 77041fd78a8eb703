"""Which implementation of a kernel runs: Triton on CUDA, Numba on the CPU, plain torch everywhere else.

Every op in this room has three versions under one name: the plain-torch reference beside the op, Numba in
`cpu/`, Triton in `gpu/`. Ops take `impl=None` (choose) or one of the names below, which tests use to compare.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch
from torch import Tensor

IMPLEMENTATIONS = ("reference", "cpu", "gpu")
FAST_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BY_DEVICE = {"cpu": "cpu", "cuda": "gpu"}


def choose(x: Tensor, impl: str | None = None) -> str:
    """The implementation for `x`: as asked, or the fastest that handles its device and dtype.

    float64 is the theory bench's type, not a training type: it always takes the reference.
    """
    return choose_for(x.device, x.dtype, impl)


def choose_for(device: torch.device, dtype: torch.dtype, impl: str | None = None) -> str:
    """`choose` for tensors of that device and dtype."""
    if impl is not None:
        if impl not in IMPLEMENTATIONS:
            raise ValueError(f"impl must be one of {', '.join(IMPLEMENTATIONS)}, not {impl!r}")
        return impl
    if dtype.is_floating_point and dtype not in FAST_DTYPES:
        return "reference"
    return BY_DEVICE.get(device.type, "reference")


@functools.cache
def load(impl: str, op: str) -> ModuleType:
    """The module `kernels/cpu/<op>.py` or `kernels/gpu/<op>.py`, imported on first use (Triton may be absent)."""
    return importlib.import_module(f"thinwire.kernels.{impl}.{op}")
