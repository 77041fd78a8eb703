"""Collectives: `exchange(u) → (mean, own)` with Σ own = P·mean, for any world size."""

from thinwire.collectives.base import Collective
from thinwire.collectives.dense import Dense, Gather, Quantized, TwoHop
from thinwire.collectives.hierarchical import Hierarchical
from thinwire.collectives.lowrank import LowRank
from thinwire.collectives.oktopk import OkTopk, xi
from thinwire.collectives.rivals import GTopk, TopkAllgather, TopkDSA

__all__ = [
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
