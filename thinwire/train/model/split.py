"""Which decoder layers are on which pipeline stage: at least one each, so that the most expensive stage is cheapest."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise

from thinwire.errors import UsageError


def split_layers(costs: Sequence[float], stages: int) -> tuple[range, ...]:
    """Split len(costs) − 2 layers into `stages` consecutive ranges that minimise the largest cost of a stage.

    `costs` are of the embedding (on the first stage), of each layer, and of final norm and head (on the last):
    parameter counts, or measured seconds. Among equals the most even split is taken (least sum of squares).
    """
    layers = len(costs) - 2
    if not 1 <= stages <= layers:
        raise UsageError(f"{layers} layers cannot be split into {stages} stages: each needs at least one layer")
    before = [0.0]
    for cost in costs[1:-1]:
        before.append(before[-1] + cost)

    def cost_of(start: int, end: int) -> float:
        ends = (costs[0] if start == 0 else 0) + (costs[-1] if end == layers else 0)
        return before[end] - before[start] + ends

    least, _ = _best_cut(layers, stages, cost_of, max)

    def squared(start: int, end: int) -> float:
        cost = cost_of(start, end)
        return cost * cost if cost <= least else float("inf")

    _, cuts = _best_cut(layers, stages, squared, operator.add)
    return tuple(range(a, b) for a, b in pairwise(cuts))


def _best_cut(
    layers: int, stages: int, cost: Callable[[int, int], float], join: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """The cut whose stages' costs, joined, are least; by dynamic programming over (layers placed, stages used)."""

    @cache
    def best(end: int, count: int) -> tuple[float, int]:
        """Of the first `end` layers on `count` stages: the cost, and where the last of them starts."""
        if count == 1:
            return cost(0, end), 0
        return min((join(best(start, count - 1)[0], cost(start, end)), start) for start in range(count - 1, end))

    cuts = [layers]
    for count in range(stages, 0, -1):
        cuts.append(best(cuts[-1], count)[1])
    return best(layers, stages)[0], cuts[::-1]
