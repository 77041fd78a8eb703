"""thinwire: compress everything that crosses the slow network in distributed PyTorch training.

import thinwire as tw
end = tw.Channel(tw.codecs.Quantize(4), tw.memory.Delta())
frame = end.send("sample 7", activation)
"""

from __future__ import annotations

import importlib
from typing import Any

from thinwire.cpu_features import guard_bf16

__version__ = "0.2.0"

_NAMES = {
    "Channel": "thinwire.memory.channel",
    "Codec": "thinwire.codecs",
    "Link": "thinwire.config.wire",
    "Memory": "thinwire.memory",
    "Reduction": "thinwire.config.wire",
    "Wire": "thinwire.config.wire",
    "all_reduce": "thinwire.parallel",
}
_MODULES = {
    "codecs": "thinwire.codecs",
    "collectives": "thinwire.collectives",
    "convex": "thinwire.theory",
    "elastic": "thinwire.elastic",
    "kernels": "thinwire.kernels",
    "lab": "thinwire.lab",
    "memory": "thinwire.memory",
    "optim": "thinwire.data_parallel.frozen_adam",
    "parallel": "thinwire.parallel",
    "planner": "thinwire.planner",
    "wire": "thinwire.config.wire",
}

bf16_guard = guard_bf16()  # what was found, for `thinwire doctor`; before any room imports torch, and uses it

__all__ = ["__version__", *_NAMES, *_MODULES]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """Rooms are imported when first used: `thinwire --help` and the planner need no torch."""
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    raise AttributeError(f"module 'thinwire' has no attribute {name!r}")
