"""thinwire: compress everything that crosses the slow network in distributed PyTorch training.

import thinwire as tw
end = tw.Channel(tw.codecs.Quantize(4), tw.memory.Delta())
frame = end.send("sample 7", activation)
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_LAZY = {
    "Channel": "thinwire.channel", "Codec": "thinwire.codecs", "Memory": "thinwire.memory",
    "Wire": "thinwire.wire", "Link": "thinwire.wire", "Reduction": "thinwire.wire",
    "all_reduce": "thinwire.parallel",
    "codecs": "", "memory": "", "collectives": "", "wire": "", "parallel": "", "kernels": "", "lab": "", "planner": "",
    "convex": "", "optim": "",
}  # fmt: skip

__all__ = ["__version__", *_LAZY]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """Rooms are imported when first used: `thinwire --help` and the planner need no torch."""
    if name not in _LAZY:
        raise AttributeError(f"module 'thinwire' has no attribute {name!r}")
    if not _LAZY[name]:
        return importlib.import_module(f"thinwire.{name}")
    return getattr(importlib.import_module(_LAZY[name]), name)
