"""What oktopk.py compares, as data: how gradients are averaged.

Sparse methods take the whole gradient as one unit, vectors too, as the Ok-Topk paper does; quantised ones leave vectors
exact, as the preset `max` does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from thinwire.codecs import Quantize
from thinwire.collectives import Collective, Dense, Gather, GTopk, LowRank, OkTopk, TopkAllgather
from thinwire.config.presets import PRESETS
from thinwire.config.wire import Reduction, Wire
from thinwire.memory import EF21, Diana, ErrorFeedback, Memory, Plain, RandDiana

WHOLE = 1e6  # MB: everything is one unit
TAU_PRIME = 32  # of the authors' code for VGG and the LSTM
REFRESH = 0.05  # Rand-DIANA's probability


@dataclass(frozen=True)
class Method:
    """name: of the row. collective, memory: of the compressed part. exact_dims, exclude: as of `Reduction`. warm:
    starts with the task's exact steps."""

    name: str
    collective: Callable[[], Collective]
    memory: Callable[[], Memory] = ErrorFeedback
    exact_dims: int = 0
    warm: bool = False
    exclude: tuple[str, ...] = ()

    def reduction(self, warmup: int) -> Reduction:
        """warmup: the task's exact steps, for a method that has them."""
        return Reduction(
            self.collective(), self.memory(), warmup=warmup if self.warm else 0, exact_dims=self.exact_dims,
            exclude=self.exclude, unit_mb=WHOLE,
        )  # fmt: skip


def published(density: float) -> Callable[[], Collective]:
    return lambda: OkTopk(density, tau=64, tau_prime=TAU_PRIME, thresholds="nudged")


def four_bits() -> Collective:
    """The gradient wire of the preset `max`."""
    gradient: Any = Wire.of({"gradient": PRESETS["max"]["gradient"]}).gradient
    return gradient.collective


def low_rank(name: str, rank: int, layers: int = 6) -> Method:
    """Optimus-CC between replicas of the Llama class: the first so many of its six layers at that rank, the rest and
    the embedding exact."""
    later = tuple(f"blocks.{layer}.*" for layer in range(layers, 6))
    return Method(name, lambda: LowRank(rank), exact_dims=1, exclude=("tokens.*", *later))


def stochastic() -> Collective:
    return Gather(Quantize(4, rounding="stochastic"))


METHODS = {
    method.name: method
    for method in (
        Method("dense", Dense, Plain),
        Method("Ok-Topk 1 %", published(0.01)),
        Method("Ok-Topk 2 %", published(0.02)),
        Method("4 bits", four_bits, exact_dims=1),
        Method("gTopk 1 %", lambda: GTopk(0.01)),
        Method("EF21 top 1 %", lambda: TopkAllgather(0.01), EF21),
        Method("DIANA 4 bits", stochastic, Diana, exact_dims=1),
        Method("Rand-DIANA 4 bits", stochastic, lambda: RandDiana(REFRESH), exact_dims=1),
        Method("Ok-Topk 2 % warm", published(0.02), warm=True),
        Method("Ok-Topk 1 % warm", published(0.01), warm=True),
        Method("Ok-Topk 1 % predicted", lambda: OkTopk(0.01, tau_prime=TAU_PRIME)),
        low_rank("rank 4", 4),
        low_rank("rank 16", 16),
        low_rank("rank 64", 64),
        low_rank("rank 16 in 4 of 6 layers", 16, 4),
        low_rank("rank 16 in 2 of 6 layers", 16, 2),
    )
}
CORE = ("dense", "Ok-Topk 1 %", "Ok-Topk 2 %", "4 bits")  # on which claims are made
LOW_RANK = tuple(name for name in METHODS if name.startswith("rank "))
WARM = "Ok-Topk 2 % warm"  # as the authors have it, where the task has exact steps at the start
WARM_1 = "Ok-Topk 1 % warm"
