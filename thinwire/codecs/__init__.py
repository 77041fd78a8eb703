"""Stateless codecs: tensor → bytes of a known size → tensor. `make` builds one from configuration."""

from __future__ import annotations

import inspect
from typing import Any

from thinwire.codecs.base import Codec, is_finite
from thinwire.codecs.compose import Induced, Rotated
from thinwire.codecs.exact import Cast, Identity
from thinwire.codecs.lowrank import LowRank
from thinwire.codecs.quantize import Quantize, ScaledSign
from thinwire.codecs.rounding import Dither, Natural, NaturalDither, Ternary
from thinwire.codecs.sparse import Chain, RandK, TopK
from thinwire.errors import UsageError

__all__ = [
    "Cast", "Chain", "Codec", "Dither", "Identity", "Induced", "LowRank", "Natural", "NaturalDither", "Quantize",
    "RandK", "Rotated", "ScaledSign", "Ternary", "TopK", "is_finite", "make",
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
    "induced": Induced,
}


def make(codec: str, **arguments: Any) -> Codec:
    """The codec of that name (the constructor's, any case); an argument that is a codec is a table of its own:
    make("rotated", inner={"codec": "quantize", "bits": 4})."""
    name = str(codec).lower().replace("_", "").replace("-", "")
    if name not in CODECS:
        raise UsageError(f"codec {codec!r} is unknown: one of {', '.join(CODECS)}")
    allowed = inspect.signature(CODECS[name]).parameters
    for key in arguments:
        if key not in allowed:
            raise UsageError(f"{name} has no setting {key!r}: it takes {', '.join(allowed) or 'none'}")
    missing = [k for k, p in allowed.items() if p.default is p.empty and k not in arguments]
    if missing:
        raise UsageError(f"{name} needs {', '.join(missing)}")
    built = {k: make(**v) if isinstance(v, dict) else v for k, v in arguments.items()}
    return CODECS[name](**built)
