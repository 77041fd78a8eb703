"""Dropout above a boundary: found, warned of, and if asked for, made the same on every visit of a sample.

A new mask on each visit changes the activation far more than training does (|δ|/|a| 0.35 with p = 0.1 against 0.034
without), so a delta against the last visit gains nothing. With masks drawn from (run, sample, layer) instead of the
global generator the same units are dropped for a sample at every visit, and the delta is small again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from thinwire.kernels.random import derive, uniform_rows

Ids = tuple[int, ...] | None
KINDS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def find_dropout(module: nn.Module) -> list[str]:
    """Names of the submodules that drop values while training: dropout layers, and a `dropout` rate above zero."""
    return [name or type(part).__name__ for name, part in module.named_modules() if _rate(part) > 0]


def _rate(part: nn.Module) -> float:
    if isinstance(part, KINDS):
        return part.p
    rate = getattr(part, "dropout", 0.0)  # nn.MultiheadAttention and recurrent layers keep theirs as a number
    return rate if isinstance(rate, float) else 0.0


def seed_dropout(module: nn.Module, seed: int, ids: Callable[[], Ids]) -> None:
    """Replace every nn.Dropout in the module by one whose mask belongs to the sample; other kinds are left alone.

    module: changed in place. seed: the run's. ids: gives the samples of the micro-batch being computed.
    """
    for parent, name, path in list(_dropouts(module)):
        setattr(parent, name, SampleDropout(getattr(parent, name).p, derive(seed, path), ids))


def _dropouts(module: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    for path, parent in module.named_modules():
        for name, child in parent.named_children():
            if type(child) is nn.Dropout:
                yield parent, name, f"{path}.{name}"


class SampleDropout(nn.Module):
    """x · [u ≥ p]/(1 − p) with u from (layer, sample, position): row i of x belongs to the i-th sample.

    p: the rate. seed: the layer's. ids: gives the samples of the micro-batch; None: dropout as torch does it.
    """

    def __init__(self, p: float, seed: int, ids: Callable[[], Ids]) -> None:
        super().__init__()
        self.p = p
        self.seed = seed
        self.ids = ids

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        ids = self.ids()
        if ids is None or x.shape[0] != len(ids):
            return nn.functional.dropout(x, self.p)
        seeds = [derive(self.seed, one) for one in ids]
        noise = uniform_rows(x[0].numel(), seeds, x).view(x.shape)
        if self.p == 1:
            return torch.zeros_like(x)
        return x * ((noise >= self.p).to(x.dtype) / (1 - self.p))

    def extra_repr(self) -> str:
        return f"p={self.p}, by sample"
