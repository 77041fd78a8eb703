"""The sites of one run, stacked: what LocalSteps does between them, and what a per-step wire does to gradients.

    Δ = anchor − keep·e − θ ;  u = Δ + e ;  (mean, own) = exchange(u) ;  e ← β(u − own)
    anchor ← outer (anchor, mean) ;  θ ← anchor − keep·e + (θ − θ as it was sent)

x[sites, n] holds all sites; `settings` are thinwire's own `Local` and `Reduction`, its units and its schedule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from stacked_exchange import exchange, sent_bytes
from torch import Tensor, nn

import thinwire as tw
from thinwire.collectives import Dense
from thinwire.collectives.base import State
from thinwire.config.local import CARRY, Local
from thinwire.config.wire import Reduction
from thinwire.data_parallel.gradient_units import Unit, make_units
from thinwire.local_steps.schedule import Schedule, split_fragments

Span = tuple[int, int]


class Shaped(Protocol):
    """The sizes of a model."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every parameter's, by name, in the order in which they lie in the flat model."""


class Wire:
    """The units of some parameters and what every site remembers of them.

    reduction: how they are averaged. names: of the parameters; shapes, spans: of all parameters of the model.
    """

    def __init__(self, reduction: Reduction, names: list[str], size: Shaped, sites: int) -> None:
        shapes = size.shapes()
        self.units = make_units({name: shapes[name] for name in names}, reduction)
        self.spans = spans_of([name for unit in self.units for name in unit.parameters], size)
        self.residuals: dict[Unit, Tensor] = {}
        self.turns = 0
        self.change(reduction, sites)

    def change(self, reduction: Reduction, sites: int) -> None:
        """Average so from now on; units and residuals stay."""
        self.reduction = reduction
        self.states: dict[Unit, State] = {unit: {} for unit in self.units}  # the collective's own
        self.collectives = {unit: Dense() if unit.exact else reduction.collective for unit in self.units}
        parts = [(self.collectives[unit], unit.shapes, sites) for unit in self.units]
        self.bytes_of_turns = [sum(sent_bytes(*part, turn) for part in parts) for turn in (0, 1)]

    @property
    def bytes(self) -> int:
        """Of the exchange that was made last."""
        return self.bytes_of_turns[(self.turns - 1) % 2]

    @torch.no_grad()
    def average(self, x: Tensor) -> Tensor:
        """The mean of x[sites, n], n in the order of `spans`; residuals are taken along and left behind."""
        means, start = [], 0
        self.turns += 1
        for unit in self.units:
            part = x[:, start : start + unit.numel]
            start += unit.numel
            e = self.residuals.get(unit)
            u = part if e is None else part + e
            mean, own = exchange(self.collectives[unit], unit.shapes, u, self.states[unit])
            beta = self.reduction.memory.beta
            if beta is not None and not unit.exact:
                left = part - own if e is None else e + (part - own)
                self.residuals[unit] = left if beta == 1 else beta * left
            means.append(mean)
        return torch.cat(means)

    def left(self, like: Tensor) -> Tensor:
        """The residuals, [sites, n]."""
        parts = [self.residuals.get(unit, like.new_zeros(like.shape[0], unit.numel)) for unit in self.units]
        return torch.cat(parts, 1)


def spans_of(names: list[str], size: Shaped) -> list[Span]:
    """Where parameters lie in the flat model, neighbours joined."""
    ends: dict[str, Span] = {}
    start = 0
    for name, shape in size.shapes().items():
        ends[name] = (start, start + math.prod(shape))
        start += math.prod(shape)
    out: list[Span] = []
    for name in names:
        a, b = ends[name]
        if out and out[-1][1] == a:
            out[-1] = (out[-1][0], b)
        else:
            out.append((a, b))
    return out


def take(flat: Tensor, spans: list[Span]) -> Tensor:
    """The values of flat[…, n] at spans, one after the other; a copy."""
    return torch.cat([flat[..., a:b] for a, b in spans], -1)


def put(flat: Tensor, spans: list[Span], values: Tensor) -> None:
    """The inverse of `take`."""
    start = 0
    for a, b in spans:
        flat[..., a:b] = values[..., start : start + b - a]
        start += b - a


@dataclass
class _Fragment:
    wire: Wire
    anchor: nn.Parameter
    outer: torch.optim.Optimizer
    steps: int = 0  # since it was sent
    under_way: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # the mean, and θ as it was


class LocalSites:
    """LocalSteps for all sites at once. θ is changed in place.

    weights: float32[sites, n]. settings: LocalSteps'.
    """

    def __init__(self, weights: Tensor, settings: Local, size: Shaped) -> None:
        self.weights, self.settings, self.size, self.keep = weights, settings, size, settings.keep
        self.schedule = Schedule.of(settings)
        reduction = settings.wire.gradient or Reduction(Dense())
        self.fragments = []
        for names in split_fragments(size.shapes(), settings.fragments):
            wire = Wire(reduction, names, size, weights.shape[0])
            anchor = nn.Parameter(take(weights[0], wire.spans))
            self.fragments.append(_Fragment(wire, anchor, settings.outer([anchor])))
        self.steps = self.bytes = 0
        self.last_bytes = 0  # of the last round

    def step(self) -> None:
        """After every inner step."""
        self.steps += 1
        for fragment in self.fragments:
            fragment.steps += 1
        due = [self.fragments[number] for number in self.schedule.applied(self.steps)]
        late = [fragment for fragment in due if fragment.under_way]
        for fragment in late:
            self._apply(fragment)
        for number in self.schedule.sent(self.steps):
            self._send(self.fragments[number])
        for fragment in due:
            if fragment not in late:
                self._apply(fragment)

    def go_on(self, settings: Local) -> None:
        """From now on with this H and this wire; anchors, residuals and the outer optimiser's state stay."""
        self.schedule = replace(Schedule.of(settings), warmup=self.steps)
        reduction = settings.wire.gradient or Reduction(Dense())
        for fragment in self.fragments:
            fragment.wire.change(reduction, self.weights.shape[0])

    def finish(self) -> None:
        """One last round; all sites then hold the anchor."""
        before = self.bytes
        for last in (False, True):
            for fragment in self.fragments:
                if last and fragment.steps:
                    self._send(fragment)
                self._apply(fragment)
        self.last_bytes = self.bytes - before
        self.weights.data.copy_(self.at_anchor())

    def at_anchor(self) -> Tensor:
        """float32[n]: what all sites share."""
        out = torch.empty_like(self.weights[0])
        for fragment in self.fragments:
            put(out, fragment.wire.spans, fragment.anchor.detach())
        return out

    @torch.no_grad()
    def flushed(self) -> tuple[Tensor, int]:
        """(float32[n], bytes): the anchor that `finish(last="max")` would leave: what is under way is applied, and all
        that sites have not sent yet, residuals too, is sent in four bits per value, past the outer optimiser."""
        for fragment in self.fragments:
            self._apply(fragment)
        anchor, unsent = self.at_anchor(), torch.zeros_like(self.weights)
        for fragment in self.fragments:
            left, spans = fragment.wire.left(self.weights), fragment.wire.spans
            put(unsent, spans, fragment.anchor.detach() - take(self.weights, spans) + (1 - self.keep) * left)
        wire = Wire(per_step_wire("max"), list(self.size.shapes()), self.size, self.weights.shape[0])
        mean = wire.average(take(unsent, wire.spans))
        put(anchor, wire.spans, take(anchor, wire.spans) - mean)
        return anchor, wire.bytes

    @torch.no_grad()
    def _send(self, fragment: _Fragment) -> None:
        sent = take(self.weights, fragment.wire.spans)
        mean = fragment.wire.average(self._base(fragment) - sent)
        fragment.under_way.append((mean, sent))
        fragment.steps = 0
        self.bytes += fragment.wire.bytes

    def _apply(self, fragment: _Fragment) -> None:
        if not fragment.under_way:
            return
        mean, sent = fragment.under_way.pop()
        fragment.anchor.grad = mean
        fragment.outer.step()
        base, spans, mix = self._base(fragment), fragment.wire.spans, self.settings.mix
        now = take(self.weights, spans)
        if (mix == CARRY and self.settings.delay == 0) or mix == 0:
            new = base.expand_as(now)
        else:
            new = base + (now - sent) if mix == CARRY else mix * now + (1 - mix) * base
        put(self.weights.data, spans, new)

    def _base(self, fragment: _Fragment) -> Tensor:
        """anchor − keep·e: where sites go on from after a round."""
        anchor = fragment.anchor.detach()
        return anchor - self.keep * fragment.wire.left(self.weights) if self.keep else anchor


class PerStep:
    """Gradients averaged after every step. gradients: float32[sites, n]; with an exact wire [1, n] will do.

    reduction: of the gradients. sites: how many there are.
    """

    def __init__(self, reduction: Reduction, size: Shaped, sites: int) -> None:
        self.wire = Wire(reduction, list(size.shapes()), size, sites)
        self.bytes = 0

    def average(self, gradients: Tensor) -> None:
        """In place, on all sites."""
        if gradients.shape[0] > 1:
            put(gradients, self.wire.spans, self.wire.average(take(gradients, self.wire.spans)))
        self.bytes += self.wire.bytes


def per_step_wire(preset: str) -> Reduction:
    """The gradient section of a preset; exact where it has none."""
    return tw.Wire.of(preset).gradient or Reduction(Dense())


def table_of(given: Mapping[str, object], every: int) -> Local:
    """A `[local]` table, with this H."""
    return Local.of({**given, "every": every})
