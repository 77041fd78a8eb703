"""When each fragment is sent and applied, and which parameters it holds: pure functions of numbers and names."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from thinwire.config.local import Local
from thinwire.data_parallel.gradient_units import Shape
from thinwire.errors import UsageError


@dataclass(frozen=True)
class Schedule:
    """Steps are inner steps, counted from 1; the first `warmup` of them average everything exactly.

    every, fragments, delay, warmup, grow: as `Local` has them.
    """

    every: int
    fragments: int
    delay: int
    warmup: int
    grow: int = 0

    @staticmethod
    def of(settings: Local) -> Schedule:
        """That of local steps with these settings."""
        return Schedule(settings.every, settings.fragments, settings.delay, settings.warmup, settings.grow)

    def is_warmup(self, step: int) -> bool:
        """Are weights averaged exactly after this step?"""
        return step <= self.warmup

    def offset(self, fragment: int) -> int:
        """A fragment is sent after steps that leave this remainder: they are spread over the interval."""
        return fragment * self.every // self.fragments

    def sent(self, step: int) -> list[int]:
        """The fragments that are sent after this step."""
        since = step - self.warmup
        if self.grow:
            return [0] if since > 0 and self._last_round(since) == since else []
        return [f for f in range(self.fragments) if since > 0 and since % self.every == self.offset(f)]

    def applied(self, step: int) -> list[int]:
        """The fragments whose means are applied after this step: `delay` steps after sending, or, where rounds still
        follow each other faster, before the next one."""
        if not self.grow:
            return self.sent(step - self.delay)
        last = self._last_round(step - self.warmup) + self.warmup
        return [0] if last > self.warmup and step - last == min(self.delay, self._interval(last) - 1) else []

    def _interval(self, step: int) -> int:
        """Inner steps from a round after this step to the next one, while they grow."""
        return min(self.every, max(1, (step - self.warmup) // self.grow))

    def _last_round(self, since: int) -> int:
        """The step since the warm-up after which the last round was sent, of growing intervals; 0: none."""
        if since < 1:
            return 0
        last = 1
        while last < self.every * self.grow:
            following = last + self._interval(last + self.warmup)
            if following > since:
                return last
            last = following
        return last + (since - last) // self.every * self.every if since >= last else last


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
