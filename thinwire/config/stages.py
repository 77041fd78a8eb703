"""`stages` of [wire.gradient]: which (virtual) pipeline stages' gradients are compressed (Optimus-CC's selection).

It is one of three: a share of the stages, the earliest first, since they end their backward last (0.75: three of four);
a list of stage numbers; or "slack": the stages whose uncompressed exchange the simulated step would wait for.
"""

from __future__ import annotations

import math
from typing import Any

from thinwire.errors import UsageError

SLACK = "slack"
Stages = float | tuple[int, ...] | str


def check_stages(given: Any) -> Stages:
    """The rule as it is stored: a float, a tuple of stages, or "slack"; UsageError where `given` is none of these."""
    if given == SLACK:
        return SLACK
    if isinstance(given, (list, tuple)) and all(type(s) is int and s >= 0 for s in given):
        return tuple(given)
    if type(given) in (int, float) and 0 <= given <= 1:
        return float(given)
    raise UsageError(
        f"stages = {given!r}: allowed are a share from 0 to 1, a list of stages, such as [0, 1], and slack"
    )


def chosen_stages(rule: Stages, count: int) -> frozenset[int]:
    """The stages that a rule selects of `count`; a rule by slack is evaluated by the planner instead."""
    if isinstance(rule, tuple):
        beyond = [s for s in rule if s >= count]
        if beyond:
            raise UsageError(f"[wire.gradient] stages = {list(rule)}: the last of {count} stages is {count - 1}")
        return frozenset(rule)
    assert not isinstance(rule, str), "a rule by slack is evaluated by the planner"
    return frozenset(range(math.ceil(rule * count - 1e-9)))
