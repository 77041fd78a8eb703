"""The mildest compression that is fast enough: of several rungs for each kind of traffic, from exact to the strongest.

From the fastest rungs every kind is relaxed in turn, one rung at a time, as long as the simulated step stays within
WORTH times the fastest. On a network that is fast enough nothing is compressed, therefore.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

WORTH = 1.05
Levels = Mapping[str, int]  # by kind of traffic, the number of its rung; 0 is exact


def mildest(
    sizes: Mapping[str, list[float]], cost: Callable[[str, int], float], seconds: Callable[[Levels], float]
) -> dict[str, int]:
    """`sizes`: bytes by kind and rung; kinds are relaxed in this order, so the one whose compression costs most quality
    stands first. `cost`: seconds that a kind takes by itself; `seconds`: of the simulated step."""
    options = {kind: rungs_between(found) for kind, found in sizes.items()}
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


def rungs_between(sizes: list[float]) -> list[int]:
    """From mild to strong: exact, what lies in bytes between it and the last one, the last one."""
    last = len(sizes) - 1
    between = {size: level for level, size in enumerate(sizes) if sizes[last] < size < sizes[0]}
    strong = [last] if sizes[last] < sizes[0] else []
    return [0, *(between[size] for size in sorted(between, reverse=True)), *strong]
