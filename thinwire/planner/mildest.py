"""The mildest compression that is fast enough, of several levels per kind of traffic, from exact to the strongest.

From the fastest levels every kind is relaxed in turn, one level at a time, as long as the simulated step stays within
WORTH times the fastest. So on a network that is fast enough nothing is compressed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

WORTH = 1.05
Levels = Mapping[str, int]  # by kind of traffic, the number of its level; 0 is exact


def mildest(
    sizes: Mapping[str, list[float]], cost: Callable[[str, int], float], seconds: Callable[[Levels], float]
) -> dict[str, int]:
    """The level of each kind of traffic.

    sizes: bytes by kind and level; kinds are relaxed in this order, so the one whose compression costs most quality
    comes first.
    cost(kind, level): seconds that all messages of a kind take one after another.
    seconds(levels): of the simulated step.
    """
    options = {kind: levels_between(found) for kind, found in sizes.items()}
    fastest = {kind: min(levels, key=partial(cost, kind)) for kind, levels in options.items()}
    chosen = min(dict.fromkeys(sizes, 0), fastest, key=seconds).copy()
    limit, relaxing = WORTH * seconds(chosen), True
    while relaxing:
        relaxing = False
        for kind, levels in options.items():
            milder = reversed(levels[: levels.index(chosen[kind])])
            found = next((level for level in milder if seconds({**chosen, kind: level}) <= limit), None)
            if found is not None:
                chosen[kind], relaxing = found, True
    return chosen


def levels_between(sizes: list[float]) -> list[int]:
    """The levels to try, from mild to strong: 0, those whose bytes are between those of 0 and of the last, the last.

    sizes: bytes by level."""
    last = len(sizes) - 1
    between = {size: level for level, size in enumerate(sizes) if sizes[last] < size < sizes[0]}
    strong = [last] if sizes[last] < sizes[0] else []
    return [0, *(between[size] for size in sorted(between, reverse=True)), *strong]
