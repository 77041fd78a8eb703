"""Replicas in one process: what each computes, one after another, and the mean of their gradients as ranks take it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from thinwire.collectives import Dense
from thinwire.collectives.in_process import InProcess, InProcessGroup
from thinwire.config.wire import Reduction, Wire, warmup_steps
from thinwire.data_parallel.exchange import Exchange
from thinwire.train.config.sections import TrainConfig
from thinwire.train.learning_rate import frozen_adam

Named = Mapping[str, nn.Parameter]
Gradients = dict[str, Tensor]


class Averaged:
    """One stage's gradients, averaged over the replicas as its Reducer does. Weights are equal on all of them, so there
    is one copy.

    named: the stage's parameters, without a tied embedding. wire: its gradient section is used. dp: replicas. seed: the
    run's.
    """

    def __init__(self, named: Named, wire: Wire, dp: int, seed: int) -> None:
        reduction = wire.gradient or Reduction(Dense())
        self.copies: list[Named] = [named]  # whose .grad has what `reduce` found
        self.warmup = warmup_steps("gradient", reduction)
        self.group = InProcessGroup(dp)
        shapes = {name: tuple(p.shape) for name, p in named.items()}
        self.exchanges = [Exchange(shapes, reduction, member, seed) for member in self.group.members]

    def reduce(self, local: Sequence[Gradients]) -> None:
        """Every .grad ← the mean. local: by replica."""
        (named,) = self.copies
        if len(local) == 1:
            put(local[0], named)
            return

        def mean(member: InProcess) -> Gradients:
            exchange, own = self.exchanges[member.rank], local[member.rank]
            found: Gradients = {}
            exact = exchange.steps < self.warmup
            for unit in exchange.units:
                values = torch.cat([own[name].reshape(-1).float() for name in unit.parameters])
                whole = exchange.reduce(unit, values, exact)
                found |= {name: whole[span].view(shape) for name, span, shape in unit.spans()}
            exchange.finish_step()
            return found

        put(self.group.run(mean)[0], named)

    def settle(self, skipped: bool) -> None:
        for exchange in self.exchanges:
            exchange.rollback() if skipped else exchange.commit()

    def update(self, rate: float) -> None:
        """The run's AdamW has these parameters."""

    def sent(self) -> int:
        """Bytes that all replicas have sent."""
        return sum(exchange.sent for exchange in self.exchanges)


class Frozen:
    """One stage under FrozenAdam, which averages momenta and takes local gradients: an optimiser per replica, the first
    with the run's weights, the others with copies that stay equal.

    config: the run's. Others as of `Averaged`; epoch: steps of one.
    """

    def __init__(self, config: TrainConfig, named: Named, wire: Wire, epoch: int) -> None:
        self.group = InProcessGroup(config.mesh.dp)
        others = [{n: nn.Parameter(p.detach().clone()) for n, p in named.items()} for _ in range(config.mesh.dp - 1)]
        self.copies: list[Named] = [named, *others]  # each with its own gradients
        self.adams = self.group.run(
            lambda member: frozen_adam(config, wire, member, self.copies[member.rank], epoch)  # type: ignore[arg-type]
        )

    def reduce(self, local: Sequence[Gradients]) -> None:
        for copy, own in zip(self.copies, local):
            put(own, copy)

    def settle(self, skipped: bool) -> None:
        """Its exchange is a part of `update`."""

    def update(self, rate: float) -> None:
        for adam in self.adams:
            for group in adam.param_groups:
                group["lr"] = rate
        self.group.run(lambda member: self.adams[member.rank].step())

    def sent(self) -> int:
        return sum(adam.exchange.sent for adam in self.adams if adam.exchange is not None)


def put(gradients: Gradients, named: Named) -> None:
    """Into .grad."""
    for name, parameter in named.items():
        parameter.grad = gradients[name].to(parameter.dtype)
