"""Checks of messages that are read at the end of a step: on a card, to read one at once is to wait for it.

A step's messages are sent and received with their checks computed on the card; the host reads them all together when
the step ends, and rolls it back where one failed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.memory.stats import Stats
from thinwire.memory.store import Key, MessageKey


@dataclass(frozen=True)
class DeferredCheck:
    """The checks of one message, 0-d bools on its device.

    key: the message's. good: it is the one that was expected (None: this end sent it). finite: all its values are.
    """

    key: MessageKey
    good: Tensor | None
    finite: Tensor


class DeferredChecks:
    """The checks of a step's messages that have not been read yet (`open`)."""

    def __init__(self) -> None:
        self.open: list[DeferredCheck] = []

    def add(self, key: MessageKey, good: Tensor | None, finite: Tensor) -> None:
        """Leave a message's checks for later; the arguments are DeferredCheck's."""
        self.open.append(DeferredCheck(key, good, finite))

    def resolve(self, stats: Stats) -> list[tuple[list[Key], bool]]:
        """Read them, and count in `stats`. Of every message that failed: its keys, and whether it was not the expected
        one (else it was, and not finite)."""
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


def fetch(several: Iterable[DeferredChecks]) -> None:
    """Bring all open checks to the host at once, so that to resolve each of them waits for no card."""
    several = list(several)
    found = [check for checks in several for check in checks.open]
    if not found:
        return
    flags = torch.stack([check.finite if one is None else one for check in found for one in (check.good, check.finite)])
    pairs = iter(flags.cpu().view(-1, 2))
    for checks in several:
        read = zip(checks.open, pairs)
        checks.open = [DeferredCheck(c.key, None if c.good is None else good, finite) for c, (good, finite) in read]
