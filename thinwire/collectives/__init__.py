"""Collectives: `exchange(u) → (mean, own)` with Σ own = P·mean, for any world size.

What Ok-Topk is compared with (collectives/rivals.py) is imported when it is first named.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from thinwire.collectives.alternating import AlternatingLowRank
from thinwire.collectives.base import Collective
from thinwire.collectives.dense import Dense, Gather, Quantized, TwoHop
from thinwire.collectives.hierarchical import Hierarchical
from thinwire.collectives.lowrank import LowRank
from thinwire.collectives.oktopk import OkTopk, xi
from thinwire.registry import Constructors

if TYPE_CHECKING:
    from thinwire.collectives.rivals import GTopk, TopkAllgather, TopkDSA

__all__ = [
    "AlternatingLowRank",
    "Collective",
    "Dense",
    "GTopk",
    "Gather",
    "Hierarchical",
    "LowRank",
    "OkTopk",
    "Quantized",
    "TopkAllgather",
    "TopkDSA",
    "TwoHop",
    "xi",
]

_RIVALS = ("GTopk", "TopkAllgather", "TopkDSA")

COLLECTIVES: Constructors[Collective] = Constructors(
    __name__, [name for name in __all__ if name not in ("Collective", "xi")]
)


def __getattr__(name: str) -> Any:
    if name in _RIVALS:
        return getattr(importlib.import_module("thinwire.collectives.rivals"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
