"""The methods that quality.py compares, as data: what is sent instead of the exact gradient."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs import Quantize, ScaledSign
from thinwire.collectives import Collective, Dense, Gather, LowRank, OkTopk, Quantized, TopkAllgather, TwoHop
from thinwire.collectives.base import State
from thinwire.collectives.groups import world
from thinwire.collectives.messages import all_reduce
from thinwire.config.wire import Reduction
from thinwire.memory import EF21, Diana, ErrorFeedback, Memory, Plain, RandDiana

WARM = 0.1  # of the steps, where a method starts exact
UNIT_MB = 0.7  # so that even small models are exchanged in several units
DENSITIES = (0.01, 0.02, 0.05, 0.1)
FROZEN = importlib.util.find_spec("thinwire.data_parallel.frozen_adam") is not None


@dataclass(frozen=True)
class Half(Collective):
    """What torch's fp16_compress_hook sends: all-reduce of the halves, divided first so that sums fit."""

    def exchange(
        self, u: Tensor, group: Any = None, *, state: State, key: object = "", step: int = 0, seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        size, _ = world(group)
        half = u.to(torch.float16).div_(size)
        own = half.to(u.dtype) * size
        return all_reduce(half, group).to(u.dtype), own


@dataclass(frozen=True)
class Method:
    """`collective` with `memory` for the gradient, or for FrozenAdam's momentum; or torch's PowerSGD hook of a rank.

    `warm`: the share of the steps that are exact, at the start. `exclude`: parameters that stay exact.
    """

    name: str
    family: str
    collective: Callable[[], Collective] | None = None
    memory: Callable[[], Memory] = ErrorFeedback
    warm: float = 0.0
    power: int = 0
    frozen: bool = False
    exclude: tuple[str, ...] = ()

    def warmup(self, steps: int) -> int:
        """Exact steps at the start; torch's hook insists on two."""
        return max(2 if self.power else 0, round(self.warm * steps))

    def suits(self, optimiser: str) -> bool:
        return optimiser == "AdamW" or not self.frozen

    def reduction(self, steps: int) -> Reduction:
        assert self.collective is not None
        return Reduction(
            self.collective(), self.memory(), warmup=self.warmup(steps), unit_mb=UNIT_MB, exclude=self.exclude
        )


def _ok_topk(density: float, warm: float, values: str = "fp32") -> Method:
    name = f"OkTopk {100 * density:g} %" + (" int8" if values == "int8" else "") + (" warm" if warm else "")
    family = "OkTopk int8" if values == "int8" else "OkTopk warm" if warm else "OkTopk"
    return Method(
        name, family, lambda: OkTopk(density, values=values, indices="coded", scope="model"), warm=warm
    )  # fmt: skip


def four_bits() -> Collective:
    return Quantized(4)


def one_bit() -> Collective:
    return TwoHop(ScaledSign())


def _frozen() -> list[Method]:
    return [
        Method("FrozenAdam 4 bits", "FrozenAdam", four_bits, warm=WARM, frozen=True),
        Method("FrozenAdam 4 bits 25", "FrozenAdam", four_bits, warm=0.25, frozen=True),
        Method("FrozenAdam 1 bit 25", "FrozenAdam", one_bit, warm=0.25, frozen=True),
    ]


def _all() -> list[Method]:
    return [
        Method("dense", "exact", Dense),
        Method("fp16", "cast", Half, Plain),
        *(_ok_topk(density, warm) for density in DENSITIES for warm in (0.0, WARM)),
        *(_ok_topk(density, WARM, "int8") for density in (0.02, 0.05, 0.1)),
        *(Method(f"LowRank {r}", "LowRank", lambda r=r: LowRank(r)) for r in (1, 2, 4, 8)),
        *(  # of the Llama class: embedding and head exact, as Optimus-CC has them
            Method(f"LowRank {r} of {what}", "LowRank", lambda r=r: LowRank(r), exclude=("embed*", "out*", *more))
            for r in (4, 16)
            for what, more in (("layers", ()), ("half the layers", ("blocks.1.*",)))
        ),
        *(Method(f"LowRank {r} warm", "LowRank warm", lambda r=r: LowRank(r), warm=WARM) for r in (1, 4)),
        *(Method(f"torch PowerSGD {r}", "torch PowerSGD", power=r) for r in (1, 4)),
        *(Method(f"Quantized {b}", "Quantized", lambda b=b: Quantized(b)) for b in (2, 4, 8)),
        *(
            Method(f"Quantized {b} mse", "Quantized mse", lambda b=b: TwoHop(Quantize(b, scale="mse")))
            for b in (2, 3, 4)
        ),
        Method("Sign 1 bit", "Quantized", one_bit),
        Method("EF21 top 5 %", "EF21", lambda: TopkAllgather(0.05), EF21),
        Method("DIANA 4 bits", "DIANA", lambda: Gather(Quantize(4, rounding="stochastic")), Diana),
        Method(
            "Rand-DIANA 4 bits", "DIANA", lambda: Gather(Quantize(4, rounding="stochastic")), lambda: RandDiana(0.05)
        ),
        *(_frozen() if FROZEN else []),
    ]


METHODS = {method.name: method for method in _all()}
