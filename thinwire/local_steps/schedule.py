"""When each fragment is sent and applied, and which parameters it holds: pure functions of numbers and names."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from thinwire.data_parallel.gradient_units import Shape
from thinwire.errors import UsageError


@dataclass(frozen=True)
class Schedule:
    """Steps are inner steps, counted from 1; the first `warmup` of them average everything exactly.

    every, fragments, delay, warmup: as `Local` has them.
    """

    every: int
    fragments: int
    delay: int
    warmup: int

    def is_warmup(self, step: int) -> bool:
        """Are weights averaged exactly after this step?"""
        return step <= self.warmup

    def offset(self, fragment: int) -> int:
        """A fragment is sent after steps that leave this remainder: they are spread over the interval."""
        return fragment * self.every // self.fragments

    def sent(self, step: int) -> list[int]:
        """The fragments that are sent after this step."""
        since = step - self.warmup
        return [f for f in range(self.fragments) if since > 0 and since % self.every == self.offset(f)]

    def applied(self, step: int) -> list[int]:
        """The fragments whose means are applied after this step."""
        return self.sent(step - self.delay)


def split_fragments(shapes: Mapping[str, Shape], fragments: int) -> list[list[str]]:
    """Names of the parameters in each fragment, in declaration order.

    Layers, by the first whole number in a name, are dealt out in turn, as Streaming DiLoCo's strided fragments are.
    What belongs to no layer goes to the smallest fragment. UsageError where a fragment would be empty.
    """
    layers: dict[str, list[str]] = {}
    for name in shapes:
        number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
        layers.setdefault(f"layer {number[1]}" if number else name, []).append(name)
    held: list[set[str]] = [set() for _ in range(fragments)]
    sizes = [0] * fragments
    numbered = sorted((key for key in layers if key.startswith("layer ")), key=lambda key: int(key.split()[1]))
    others = sorted(
        (key for key in layers if not key.startswith("layer ")), key=lambda key: -_size(shapes, layers[key])
    )
    for turn, key in enumerate([*numbered, *others]):
        place = turn % fragments if turn < len(numbered) else sizes.index(min(sizes))
        held[place].update(layers[key])
        sizes[place] += _size(shapes, layers[key])
    if not all(held):
        raise UsageError(
            f"fragments = {fragments}: the model has {len(layers)} layers and single parameters to deal out"
        )
    return [[name for name in shapes if name in some] for some in held]


def _size(shapes: Mapping[str, Shape], names: list[str]) -> int:
    return sum(math.prod(shapes[name]) for name in names)
