"""Averages of workers that are members of a group in one process, a thread each, as they would be between processes."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.collectives.groups import Metered
from thinwire.collectives.in_process import InProcess, InProcessGroup
from thinwire.collectives.sums import exact_mean
from thinwire.config.wire import Reduction, warmup_steps
from thinwire.data_parallel.gradient_units import Unit, make_units
from thinwire.memory import Plain
from thinwire.memory.channel import Channel


class Workers:
    """The members that average gradients, each with its own channels.

    size: how many. shapes: of the parameters, by name, in the order of the gradient. reduction: how. seed: the run's.
    """

    def __init__(self, size: int, shapes: dict[str, tuple[int, ...]], reduction: Reduction, seed: int) -> None:
        self.group = InProcessGroup(size)
        self.meters = [Metered(member) for member in self.group.members]
        self.units, self.warmup, self.steps = make_units(shapes, reduction), warmup_steps("gradient", reduction), 0
        self.channels = [
            {unit: Channel(reduction.collective.for_shapes(unit.shapes), Plain() if unit.exact else reduction.memory,
                           seed=seed, name=unit.name, measure_every=0) for unit in self.units}
            for _ in range(size)
        ]  # fmt: skip

    def average(self, gradients: Tensor) -> list[Tensor]:
        """Every member's mean of the rows; equal on all members."""

        def work(member: InProcess) -> Tensor:
            parts, place = [], 0
            for unit in self.units:
                x = gradients[member.rank, place : place + unit.numel]
                parts.append(self._mean(member.rank, unit, x))
                place += unit.numel
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        means = self.group.run(work)
        self.steps += 1
        return means

    def _mean(self, rank: int, unit: Unit, x: Tensor) -> Tensor:
        if unit.exact or self.steps < self.warmup:
            return exact_mean(x, self.meters[rank])
        channel = self.channels[rank][unit]
        channel.begin(self.steps)
        mean = channel.reduce(unit.name, x, self.meters[rank])
        channel.commit()
        return mean

    def residual(self, rank: int) -> Tensor | None:
        """Of the compressed part, before the next step."""
        return self.channels[rank][self.units[0]].state.read("e", self.units[0].name)

    def sent(self) -> list[float]:
        """Bytes per member so far."""
        return [meter.sent for meter in self.meters]

    def selected(self) -> list[list[int]]:
        """Per member: entries it selected, entries that passed; of the last step."""
        states = [channels[self.units[0]].collective_state for channels in self.channels]
        return [state[self.units[0].name]["selected"].tolist() for state in states]
