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
class Doubt:
    """0-d bools on the message's device: "it is the expected one" (None: one's own), "all of it is finite"."""

    key: Key | Sequence[Key]
    good: Tensor | None
    finite: Tensor


class Doubts:
    def __init__(self) -> None:
        self.open: list[Doubt] = []

    def add(self, key: Key | Sequence[Key], good: Tensor | None, finite: Tensor) -> None:
        self.open.append(Doubt(key, good, finite))

    def settle(self, stats: Stats) -> list[tuple[list[Key], bool]]:
        """Look. Of every message that was not as it should be, its keys and whether it was not the expected one (else:
        it was, and not finite)."""
        doubts, self.open = self.open, []
        if not doubts:
            return []
        yes = torch.ones_like(doubts[0].finite)
        goods = [yes if doubt.good is None else doubt.good for doubt in doubts]
        flags = torch.stack([*goods, *(doubt.finite for doubt in doubts)]).view(2, len(doubts)).T.tolist()
        out = []
        for doubt, (good, finite) in zip(doubts, flags):
            stats.rejected += not good
            stats.nonfinite += good and not finite
            if not (good and finite):
                out.append(([doubt.key] if isinstance(doubt.key, (str, int)) else list(doubt.key), not good))
        return out
