"""Training whose members come and go, on torchft (`pip install 'thinwire[elastic]'`).

    quorum = tw.elastic.Quorum({"model": model, "optimizer": optimizer}, lighthouse="http://10.0.0.1:29510")
    reducer = tw.parallel.Reducer(model.named_parameters(), "max", quorum)
    while quorum.steps < 1000:
        quorum.begin()                  # who is there; a newcomer takes the others' state
        loss(model, batch()).backward()
        reducer.finish()
        if quorum.commit():             # False: this step does not count, on no member
            optimizer.step()
        optimizer.zero_grad()

`Lighthouse` is where members meet, `Shards` the state of a rank of an FSDP site. docs/elastic.md says what a death, a
newcomer and a NaN mean for residuals.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "Quorum": "thinwire.elastic.quorum",
    "Lighthouse": "thinwire.elastic.lighthouse",
    "Shards": "thinwire.elastic.shards",
}

__all__ = list(_HOME)


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'thinwire.elastic' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
