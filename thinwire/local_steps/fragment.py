"""A fragment of the model on one site: its weights, the anchor that all sites share, and the outer optimiser."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from thinwire.config.local import CARRY, Local, OuterFactory
from thinwire.data_parallel.gradient_units import Unit


def own_part(parameter: Tensor) -> Tensor:
    """The tensor itself, or this rank's shard of it; both share memory with the parameter."""
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


class Fragment:
    """Some parameters with their anchors.

    After a round a site goes on from its *base*, anchor − keep·e: of what was not sent, the share `keep` stays in its
    weights, and only the rest waits in the residual e.

    number: of the fragment. parameters: by name. units: in which they are exchanged. settings: LocalSteps'; in host
    memory are then anchors, and with them the outer optimiser's state and the exchange. outer: makes the outer
    optimiser of the anchors; None: as the settings say. residual: a unit's e as the last round left it.
    """

    def __init__(
        self, number: int, parameters: Mapping[str, nn.Parameter], units: list[Unit], settings: Local,
        outer: OuterFactory | None, residual: Callable[[Unit], Tensor | None],
    ) -> None:  # fmt: skip
        self.number = number
        self.parameters = dict(parameters)
        self.units = units
        self.home = torch.device("cpu") if settings.host else self.device  # of anchors and means
        self.anchors = {name: _anchor(p, settings.host) for name, p in parameters.items()}
        self.outer: Optimizer = (outer or settings.outer)(list(self.anchors.values()))
        self.keep, self.residual = settings.keep, residual
        self.tokens = 0.0  # that this site has trained on since the fragment was sent

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(iter(self.parameters.values())).device

    def weights(self) -> dict[str, Tensor]:
        """This site's weights by name; writing to them writes to the model."""
        return {name: own_part(p) for name, p in self.parameters.items()}

    @torch.no_grad()
    def outer_gradient(self) -> dict[Unit, Tensor]:
        """Δ = base − θ of every unit, what the site has moved since the last round; flat, where the anchors are."""
        weights, bases = self.weights(), self.bases()
        out = {}
        for unit in self.units:
            parts = [(bases[name] - weights[name].to(self.home)).reshape(-1) for name in unit.parameters]
            out[unit] = torch.cat(parts)
        return out

    @torch.no_grad()
    def bases(self) -> dict[str, Tensor]:
        """anchor − keep·e by name, where the anchors are."""
        out = {name: anchor.detach() for name, anchor in self.anchors.items()}
        for unit in self.units if self.keep else ():
            left = self.residual(unit)
            if left is not None:
                for name, span, shape in unit.spans():
                    out[name] = out[name] - (self.keep * left[span].to(self.home)).view(shape)
        return out

    def step(self, means: Mapping[Unit, Tensor]) -> None:
        """anchor ← outer optimiser (anchor, mean)."""
        for unit, mean in means.items():
            for name, span, shape in unit.spans():
                self.anchors[name].grad = mean[span].view(shape).to(self.anchors[name])
        self.outer.step()
        self.outer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def move(self, means: Mapping[Unit, Tensor]) -> None:
        """anchor ← anchor − mean: the exact average of the sites' weights, past the outer optimiser."""
        for unit, mean in means.items():
            for name, span, shape in unit.spans():
                self.anchors[name].sub_(mean[span].view(shape).to(self.anchors[name]))

    @torch.no_grad()
    def take_anchor(self) -> None:
        """θ ← anchor."""
        for name, weight in self.weights().items():
            weight.copy_(self.anchors[name])

    @torch.no_grad()
    def take_base(self) -> None:
        """θ ← anchor − keep·e."""
        bases = self.bases()
        for name, weight in self.weights().items():
            weight.copy_(bases[name])

    @torch.no_grad()
    def mix(self, sent: Mapping[str, Tensor], mix: str | float) -> None:
        """θ ← base + (θ − θ_sent), or α·θ + (1 − α)·base; sent: the weights as they were when Δ was sent."""
        bases = self.bases()
        for name, weight in self.weights().items():
            base = bases[name].to(self.device)
            if mix == CARRY:
                weight.copy_(base + (weight - sent[name]))
            else:
                assert not isinstance(mix, str)
                weight.copy_(mix * weight + (1 - mix) * base)


@contextmanager
def at_anchors(fragments: list[Fragment]) -> Iterator[None]:
    """Inside, the fragments' weights are their anchors."""
    held = [{name: weight.clone() for name, weight in fragment.weights().items()} for fragment in fragments]
    for fragment in fragments:
        fragment.take_anchor()
    try:
        yield
    finally:
        for fragment, kept in zip(fragments, held):
            for name, weight in fragment.weights().items():
                weight.copy_(kept[name])


def start_anew(fragments: list[Fragment]) -> None:
    """From where a round would leave them, as if they had just been sent."""
    for fragment in fragments:
        fragment.tokens = 0.0
        fragment.take_base()


def _anchor(parameter: nn.Parameter, host: bool) -> nn.Parameter:
    """A copy in float32 at least: outer steps are smaller than bfloat16 can add."""
    weight = own_part(parameter)
    dtype = torch.promote_types(weight.dtype, torch.float32)
    copy = weight.to("cpu" if host else weight.device, dtype, copy=True)
    return nn.Parameter(copy.pin_memory() if host and weight.is_cuda else copy)
