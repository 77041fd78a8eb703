"""Messages that nobody has looked at yet: on a card, to look is to wait for it.

A step's messages are sent and received with their checks computed on the card; the host reads them all at once when the
step ends, and rolls it back where one was not as it should be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.memory.stats import Stats
from thinwire.memory.store import Key


@dataclass(frozen=True)
class DeferredCheck:
    """0-d bools on the message's device: "it is the expected one" (None: one's own), "all of it is finite"."""

    key: Key | Sequence[Key]
    good: Tensor | None
    finite: Tensor


class DeferredChecks:
    def __init__(self) -> None:
        self.open: list[DeferredCheck] = []

    def add(self, key: Key | Sequence[Key], good: Tensor | None, finite: Tensor) -> None:
        self.open.append(DeferredCheck(key, good, finite))

    def resolve(self, stats: Stats) -> list[tuple[list[Key], bool]]:
        """Look. Of every message that was not as it should be, its keys and whether it was not the expected one (else:
        it was, and not finite)."""
        deferred, self.open = self.open, []
        if not deferred:
            return []
        yes = torch.ones_like(deferred[0].finite)
        goods = [yes if check.good is None else check.good for check in deferred]
        flags = torch.stack([*goods, *(check.finite for check in deferred)]).view(2, len(deferred)).T.tolist()
        out = []
        for check, (good, finite) in zip(deferred, flags):
            stats.rejected += not good
            stats.nonfinite += good and not finite
            if not (good and finite):
                out.append(([check.key] if isinstance(check.key, (str, int)) else list(check.key), not good))
        return out
