"""Local steps: how often sites average, what they do with the mean, and the published methods by name.

Local.of("sparseloco")      Local.of({"preset": "diloco", "every": 100, "wire": "max"})      # as `[local]` gives it
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import Tensor
from torch.optim import SGD, Optimizer

from thinwire.config.presets import LOCAL_PRESETS, PRESETS
from thinwire.config.wire import Wire, WireLike
from thinwire.errors import UsageError

CARRY = "carry"  # as `mix`: what was learnt since sending is kept whole
OuterFactory = Callable[[Iterable[Tensor]], Optimizer]


@dataclass(frozen=True)
class Local:
    """`[local]`: local steps between sites.

    wire: how the outer gradient is averaged: its gradient section.
    every: inner steps between two averagings of a fragment. fragments: parts of the model, each averaged at its own
    offset. delay: inner steps between sending a fragment and applying its mean, less than `every`.
    outer_lr, momentum, nesterov: of the outer optimiser, SGD on the anchors.
    mix: what a site keeps of its own weights when a mean is applied: "carry", or a share from 0 to under 1.
    keep: the share, from 0 to 1, of the residual that stays in a site's weights, θ ← anchor − keep·e. With 0 what was
    not sent waits, and the site learns it again; with 1 the site goes on from it.
    warmup: the first inner steps, after each of which weights are averaged exactly.
    grow: rounds become rarer: after inner step t the next one is t/grow steps later, at least 1 and at most `every`; 0:
    always `every`. For one fragment.
    host: anchors, the outer optimiser's state and residuals are kept in host memory, and exchanged from there.
    """

    wire: Wire = field(default_factory=Wire)
    every: int = 30
    fragments: int = 1
    delay: int = 0
    outer_lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    mix: str | float = CARRY
    keep: float = 0.0
    warmup: int = 0
    grow: int = 0
    host: bool = False

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("fragments", 1), ("delay", 0), ("warmup", 0), ("grow", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UsageError(f"[local] {name} = {value!r}: must be an integer, {least} or more")
        if self.delay >= self.every:
            raise UsageError(f"[local] delay = {self.delay}: must be less than every = {self.every}")
        if self.fragments > self.every:
            raise UsageError(f"[local] fragments = {self.fragments}: at most one per inner step, every = {self.every}")
        if self.grow and self.fragments > 1:
            raise UsageError(f"[local] grow = {self.grow}: for one fragment, not {self.fragments}")
        share = isinstance(self.mix, (int, float)) and not isinstance(self.mix, bool) and 0 <= self.mix < 1
        if self.mix != CARRY and not share:
            raise UsageError(f'[local] mix = {self.mix!r}: must be "carry", or a share from 0 to under 1')
        if not isinstance(self.keep, (int, float)) or isinstance(self.keep, bool) or not 0 <= self.keep <= 1:
            raise UsageError(f"[local] keep = {self.keep!r}: must lie in [0, 1]")
        if self.keep and (self.wire.gradient is None or self.wire.gradient.memory.beta is None):
            raise UsageError(
                f"[local] keep = {self.keep!r}: the wire leaves no residual to keep (memory = error_feedback)"
            )
        number = isinstance(self.outer_lr, (int, float)) and not isinstance(self.outer_lr, bool)
        if not number or not 0 < self.outer_lr < math.inf:
            raise UsageError(f"[local] outer_lr = {self.outer_lr!r}: must be positive, and finite")
        if not isinstance(self.momentum, (int, float)) or not 0 <= self.momentum < 1:
            raise UsageError(f"[local] momentum = {self.momentum!r}: must lie in [0, 1)")
        for name in ("nesterov", "host"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"[local] {name} = {getattr(self, name)!r}: must be true or false")

    def outer(self, anchors: Iterable[Tensor]) -> Optimizer:
        """The outer optimiser of these anchors."""
        nesterov = self.nesterov and self.momentum > 0
        return SGD(anchors, lr=self.outer_lr, momentum=self.momentum, nesterov=nesterov)

    def but(self, **settings: int | str | float | None) -> Local:
        """The same with other settings; those that are None stay."""
        changed: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
        return replace(self, **changed)

    @staticmethod
    def read(table: Mapping[str, Any]) -> Local:
        """Local steps from `[local]` of a run.toml: keys over a `preset`. UsageError where one is not allowed."""
        return _read(table)

    @staticmethod
    def of(given: Local | WireLike) -> Local:
        """Local steps from themselves, from a preset's name, from a `[local]` table, or from what `Wire.of` takes."""
        if isinstance(given, Local):
            return given
        if isinstance(given, str) and given in LOCAL_PRESETS:
            return _read({"preset": given})
        if isinstance(given, Mapping) and (given.get("preset") in LOCAL_PRESETS or KEYS & set(given)):
            return _read(given)
        if isinstance(given, str) and given not in (*PRESETS, "auto"):
            raise UsageError(f"{given!r}: no preset of local steps ({', '.join(LOCAL_PRESETS)}), nor of [wire]")
        return Local(wire=Wire.of(given))


KEYS = {field.name for field in fields(Local)}


def _read(table: Mapping[str, Any]) -> Local:
    """`[local]`: keys over a `preset`."""
    rest = dict(table)
    name = rest.pop("preset", None)
    if name is not None and name not in LOCAL_PRESETS:
        raise UsageError(f"[local] preset = {name!r}: allowed are {', '.join(LOCAL_PRESETS)}")
    rest = {**LOCAL_PRESETS.get(name or "", {}), **rest}
    for key in rest:
        if key not in KEYS:
            raise UsageError(f"[local] {key}: no such key; allowed are preset, {', '.join(sorted(KEYS))}")
    return Local(**{**rest, "wire": Wire.of(rest.get("wire", "off"))})
