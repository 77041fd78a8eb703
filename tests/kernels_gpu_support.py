"""What the tests of the Triton kernels share: the interpreter where there is no card, inputs, and comparing bits.

The interpreter runs the same source with numpy. What may differ on a card (the compiler's arithmetic, races),
benchmarks/card/gpu.py checks there. There each variant takes a second to compile: `some` picks a few.
"""

from __future__ import annotations

import contextlib
import importlib

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from inputs import DISTRIBUTIONS, tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPS = ("bits", "checksum", "delta", "hadamard", "indices", "quantize", "seal", "select", "sign", "ternary", "tiles")


@contextlib.contextmanager
def interpreter():
    """TRITON_INTERPRET for as long as this file imports or runs kernels; on a card: nothing."""
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            patch.setenv("TRITON_INTERPRET", "1")
        yield


with interpreter():
    pytest.importorskip("triton")
    for op in OPS:
        importlib.import_module(f"thinwire.kernels.gpu.{op}")


@pytest.fixture(autouse=True, scope="module")
def interpreted():
    """The interpreter; and torch fills fresh memory with 255 or NaN, so that a byte not written is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    with interpreter():
        yield
    torch.use_deterministic_algorithms(False)


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MODES = ({}, {"stochastic": True}, {"mse": True}, {"full": True})


def some(every, few):
    """A strategy: every one of these by the interpreter, a few of them on a card."""
    return st.sampled_from(every if DEVICE == "cpu" else few)


sizes = st.one_of(st.sampled_from([0, 1, 7, 8, 127, 128, 129, 4096, 4100]), st.integers(0, 1500))
modes = st.sampled_from(MODES)
floats = st.builds(
    lambda kind, n, dtype, seed: tensor(kind, (n,), dtype, seed),
    st.sampled_from(DISTRIBUTIONS), sizes, some(DTYPES, DTYPES[:2]), st.integers(0, 999),
)  # fmt: skip


def few(examples):
    """The interpreter takes tens of milliseconds a kernel, a card a second for a variant that is new."""
    return settings(max_examples=examples, deadline=None)


def both(function):
    """[function(to, impl)] of the reference on the CPU and of Triton on the card; `to` brings a tensor there.

    Not of the reference on the card: torch divides by a number there by multiplying with its reciprocal.
    """
    return [function(lambda x: x.clone(), "reference"), function(lambda x: x.to(DEVICE, copy=True), "gpu")]


def same(a, b):
    """Bitwise equality, but any NaN equals any other: cards and processors make different ones."""
    as_int = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    a, b = a.cpu(), b.cpu()
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    equal = a.view(as_int[a.element_size()]) == b.view(as_int[b.element_size()])
    return bool((equal | (a.isnan() & b.isnan())).all())


def noise(n, high, seed):
    return torch.randint(0, high, (n,), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


def shifted(x, offset):
    """A copy of x that begins `offset` elements into its storage: messages need not be aligned."""
    return torch.empty(x.numel() + offset, dtype=x.dtype, device=DEVICE)[offset:].copy_(x)


def nearly_tied() -> torch.Tensor:
    """2,048 values for which two candidates of the least-squares scale of 2 bits err by 17,971,496 and one less, in
    units of the grid: too close for a sum in float32."""
    counts = {512: 1, -417: 351, -156: 847, 127: 25, 0: 824}
    values = torch.cat([torch.full((count,), value / 512) for value, count in counts.items()])
    return values[torch.randperm(len(values), generator=torch.Generator().manual_seed(0))]
