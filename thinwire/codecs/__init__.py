"""Stateless codecs: tensor → bytes of a known size → tensor. `make` builds one from configuration.

Codecs of the theory bench (codecs/theory.py) are imported when they are first named.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from thinwire.codecs.base import Codec, is_finite
from thinwire.codecs.compose import Centered, Induced, Rotated
from thinwire.codecs.exact import Cast, Identity
from thinwire.codecs.levels import BinMeans, PowerOfTwo, TwoLevels
from thinwire.codecs.lowrank import LowRank
from thinwire.codecs.quantize import Quantize, ScaledSign
from thinwire.codecs.sparse import Chain, RandK, TopK
from thinwire.codecs.tiles import TileTopK
from thinwire.codecs.transform import Transform
from thinwire.registry import Constructors, construct

if TYPE_CHECKING:
    from thinwire.codecs.theory import Dither, Natural, NaturalDither, Ternary

__all__ = [
    "BinMeans", "Cast", "Centered", "Chain", "Codec", "Dither", "Identity", "Induced", "LowRank", "Natural",
    "NaturalDither", "PowerOfTwo", "Quantize", "RandK", "Rotated", "ScaledSign", "Ternary", "TileTopK", "TopK",
    "Transform", "TwoLevels", "is_finite", "make",
]  # fmt: skip

_THEORY = ("Dither", "Natural", "NaturalDither", "Ternary")

CODECS: Constructors[Codec] = Constructors(__name__, (
    "Identity", "Cast", "Quantize", "ScaledSign", "Natural", "Dither", "NaturalDither", "Ternary", "TopK", "RandK",
    "LowRank", "Chain", "Rotated", "Centered", "Induced", "TileTopK", "TwoLevels", "BinMeans", "PowerOfTwo",
    "Transform",
))  # fmt: skip


def make(codec: str, **arguments: Any) -> Codec:
    """The codec of that name (the constructor's, any case) with these arguments of the constructor.

    An argument that is a codec is a table of its own: make("rotated", inner={"codec": "quantize", "bits": 4}).
    """
    built = {k: make(**v) if isinstance(v, dict) else v for k, v in arguments.items()}
    return construct("codec", CODECS, codec, built)


def __getattr__(name: str) -> Any:
    if name in _THEORY:
        return getattr(importlib.import_module("thinwire.codecs.theory"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
