"""Stateless codecs: tensor → bytes of a known size → tensor. `make` builds one from configuration."""

from __future__ import annotations

from typing import Any

from thinwire.codecs.base import Codec, is_finite
from thinwire.codecs.compose import Centered, Induced, Rotated
from thinwire.codecs.exact import Cast, Identity
from thinwire.codecs.lowrank import LowRank
from thinwire.codecs.quantize import Quantize, ScaledSign
from thinwire.codecs.sparse import Chain, RandK, TopK
from thinwire.codecs.theory import Dither, Natural, NaturalDither, Ternary
from thinwire.registry import construct

__all__ = [
    "Cast", "Centered", "Chain", "Codec", "Dither", "Identity", "Induced", "LowRank", "Natural", "NaturalDither",
    "Quantize", "RandK", "Rotated", "ScaledSign", "Ternary", "TopK", "is_finite", "make",
]  # fmt: skip

CODECS: dict[str, type[Codec]] = {
    "identity": Identity,
    "cast": Cast,
    "quantize": Quantize,
    "scaledsign": ScaledSign,
    "natural": Natural,
    "dither": Dither,
    "naturaldither": NaturalDither,
    "ternary": Ternary,
    "topk": TopK,
    "randk": RandK,
    "lowrank": LowRank,
    "chain": Chain,
    "rotated": Rotated,
    "centered": Centered,
    "induced": Induced,
}


def make(codec: str, **arguments: Any) -> Codec:
    """The codec of that name (the constructor's, any case); an argument that is a codec is a table of its own:
    make("rotated", inner={"codec": "quantize", "bits": 4})."""
    built = {k: make(**v) if isinstance(v, dict) else v for k, v in arguments.items()}
    return construct("codec", CODECS, codec, built)
