"""Who takes part in a step, in words; and who is slow."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

RECENT = 5  # steps over which a member must be slow before it is reported


class Roll:
    """The members of the last steps.

    slow: a member whose seconds per sequence are more than so many times the others' median is reported.
    """

    def __init__(self, slow: float) -> None:
        self.slow = slow
        self.names: list[str] = []
        self.lives: dict[str, str] = {}
        self.seconds: dict[str, deque[float]] = {}
        self.reported: set[str] = set()

    def meet(self, present: Sequence[tuple[str, str]]) -> str | None:
        """The members of a new quorum, by rank: a line about who came and went; None where nobody did.

        present: everybody's name, and something that differs between a member and one of that name after it."""
        before, self.lives = self.lives, dict(present)
        self.names = names = [name for name, _ in present]
        came = [name for name, life in present if before.get(name) != life]
        left = [name for name in before if name not in names]
        self.seconds = {name: kept for name, kept in self.seconds.items() if name in names and name not in came}
        self.reported &= set(names)
        if not came and not left:
            return None
        again = [name for name in came if name in before]
        came = [name for name in came if name not in before]
        parts = ((came, "came"), (again, "died and came again"), (left, "left"))
        changes = [f"{', '.join(some)} {what}" for some, what in parts if some and before]
        count = f"{len(names)} member{'s' if len(names) > 1 else ''}: {', '.join(sorted(names))}"
        return "; ".join([*changes, count])

    def time(self, seconds: Sequence[float]) -> list[str]:
        """Every member's seconds per sequence in a step, by rank: lines about those found slow, once each. 0: it had
        none."""
        for name, value in zip(self.names, seconds):
            if value == 0:
                continue
            self.seconds.setdefault(name, deque(maxlen=RECENT)).append(value)
        lines = []
        for name in self.names:
            mine = self.seconds.get(name, ())
            others = [value for other in self.names if other != name for value in self.seconds.get(other, ())]
            if len(mine) < RECENT or not others or name in self.reported:
                continue
            if median(mine) > self.slow * median(others):
                self.reported.add(name)
                lines.append(f"{name} is slow: {median(mine):.3g} s per sequence, the others {median(others):.3g} s")
        return lines
