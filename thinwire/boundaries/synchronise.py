"""Both ends of every learned boundary stay one: gradients are added, one owner steps, all take its bits.

    1. over replicas   the mean of each end's gradient
    2. receiver → sender   its gradient, which is added to the sender's
    3. the sender steps and retracts; the first replica's result is taken by all senders
    4. sender → receiver   the new basis and anchors

A polar factor has other bits on another device, so only one rank's is ever used. Steps 2 and 4 are one message each,
posted at all boundaries at once: they take two latencies, however many stages there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.boundaries.links import BoundaryLinks, PlacedStage
from thinwire.boundaries.projected import BoundedStage, Projected, Subspace
from thinwire.boundaries.stiefel import EntryAdam, StiefelAdam
from thinwire.codecs import frame as framing
from thinwire.collectives.groups import Group, unmetered, world
from thinwire.distributed.config_check import check_agreement
from thinwire.errors import UsageError


class Boundaries:
    """All learned boundaries that a rank has an end of. Every rank of the pipeline makes one, together.

        stage = tw.parallel.CompressedStage(projected.around(module, rank, size, width), rank, size, device, wire=…)
        pipe, boundaries = tw.parallel.Pipeline([stage]), tw.parallel.Boundaries([stage])
        with pipe.step(): schedule.step(…)
        boundaries.step(lr, skipped=pipe.skipped)      # beside optimizer.step(), on all ranks

    stages: this rank's CompressedStages, around `Projected.around`'s modules.
    replicas: the ranks that hold the same stages, over which gradients are averaged; None: there are none.
    """

    def __init__(self, stages: Sequence[PlacedStage], replicas: Group = None) -> None:
        modules = {stage.stage_index: stage.submod for stage in stages}
        bounded = {index: module for index, module in modules.items() if isinstance(module, BoundedStage)}
        if not stages or len(bounded) < len(stages):
            raise UsageError("Boundaries takes this rank's CompressedStages, whose modules Projected.around made")
        self.pipeline = stages[0].group
        self.replicas = replicas
        self.senders = {index: module.out for index, module in sorted(bounded.items()) if module.out is not None}
        self.receivers = {index - 1: m.into for index, m in sorted(bounded.items()) if m.into is not None}
        self.config = self._agreed()
        self.links = BoundaryLinks(self.pipeline, bounded)
        self.rules = {index: _rules(end) for index, end in self.senders.items()}
        self.steps = 0
        self._hand_out()

    @property
    def sent(self) -> int:
        """Bytes of this rank so far, without those of replicas."""
        return self.links.sent

    def step(self, rate: float, skipped: bool = False) -> None:
        """One step of all boundaries; all ranks of all replicas call it together, with equal arguments.

        rate: the learning rate of the model in this step. skipped: the step does not count, and gradients are dropped.
        """
        config = self.config
        if not skipped and config is not None and config.learns and self.steps % config.every == 0:
            self._mean_over_replicas()
            gradients = self._gradients_at_senders()
            for index, gradient in gradients.items():
                self._update(index, gradient, {"basis": rate * config.rate, "tokens": rate, "lift": rate})
            self._hand_out()
        self.steps += not skipped
        for end in (*self.senders.values(), *self.receivers.values()):
            for parameter in end.parameters():
                parameter.grad = None

    def nbytes(self) -> int:
        """Of one end's message at one boundary; a step in which the boundary learns has one in each direction."""
        ends = [*self.senders.values(), *self.receivers.values()]
        return framing.BYTES + sum(parameter.nbytes for parameter in ends[0].parameters()) if ends else 0

    def state_dict(self) -> dict[str, Tensor]:
        """What this rank knows of its boundaries. Ranks that know the same have the same names for it."""
        out = {"steps": torch.tensor(self.steps)}
        for index, end in {**self.receivers, **self.senders}.items():
            out |= {f"boundary{index}/{name}": value.detach() for name, value in end.named_parameters()}
        for index, rules in self.rules.items():
            for name, rule in rules.items():
                out |= {f"boundary{index}/{name}/{field}": value for field, value in rule.tensors().items()}
        return {name: value.clone() for name, value in out.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a `state` of the same boundaries."""
        for ends in (self.receivers, self.senders):
            for index, end in ends.items():
                for name, parameter in end.named_parameters():
                    _take(parameter.data, state, f"boundary{index}/{name}")
        for index, rules in self.rules.items():
            for name, rule in rules.items():
                for field, value in rule.tensors().items():
                    _take(value, state, f"boundary{index}/{name}/{field}")
        self.steps = int(state["steps"])

    def close(self) -> None:
        """Free the group that was made here."""
        self.links.close()

    # --- once

    def _agreed(self) -> Projected | None:
        """What all ends are; None where a pipeline of one rank has none."""
        ends = [*self.senders.values(), *self.receivers.values()]
        shapes = {str([tuple(p.shape) for p in end.parameters()]) for end in ends}
        config = ends[0].config if ends else None
        check_agreement("Boundaries", {"the boundary": repr(config), "its shapes": str(shapes)}, self.pipeline)
        return config

    # --- a step

    def _mean_over_replicas(self) -> None:
        """Step 1, all ends of this rank in one message."""
        count = 1 if self.replicas is None else world(self.replicas)[0]
        if count == 1:
            return
        ends = [*self.senders.values(), *self.receivers.values()]
        whole = torch.cat([_gradient(end) for end in ends])
        dist.all_reduce(whole, group=unmetered(self.replicas))
        whole /= count
        for end, part in zip(ends, whole.split([_size(end) for end in ends])):
            for parameter, gradient in zip(end.parameters(), _split(part, end)):
                parameter.grad = gradient

    def _gradients_at_senders(self) -> dict[int, Tensor]:
        """Step 2: by boundary, both ends' gradients added."""
        own = {index: _gradient(end) for index, end in self.senders.items()}
        other = {index: torch.empty_like(gradient) for index, gradient in own.items()}
        self.links.move(other, {index: _gradient(end) for index, end in self.receivers.items()}, up=True)
        return {index: own[index] + other[index] for index in own}

    def _update(self, index: int, gradient: Tensor, rates: Mapping[str, float]) -> None:
        """Step 3, before the first replica's result is handed out. rates: by parameter."""
        end = self.senders[index]
        with torch.no_grad():
            for (name, parameter), part in zip(end.named_parameters(), _split(gradient, end)):
                if rates[name] > 0:
                    parameter.copy_(self.rules[index][name].step(parameter.detach(), part, rates[name]))

    def _hand_out(self) -> None:
        """The first replica's senders give their values to the other replicas' and to all receivers (3 and 4)."""
        values = {index: _values(end) for index, end in self.senders.items()}
        if self.replicas is not None and world(self.replicas)[0] > 1:
            group = unmetered(self.replicas)
            for value in values.values():
                dist.broadcast(value, group=group, group_src=0)
        arrived = {index: torch.empty_like(_values(end)) for index, end in self.receivers.items()}
        self.links.move(arrived, values, up=False)
        with torch.no_grad():
            for ends, found in ((self.senders, values), (self.receivers, arrived)):
                for index, end in ends.items():
                    for parameter, value in zip(end.parameters(), _split(found[index], end)):
                        parameter.copy_(value)


def _rules(end: Subspace) -> dict[str, StiefelAdam | EntryAdam]:
    return {n: (StiefelAdam if n == "basis" else EntryAdam)(p.detach()) for n, p in end.named_parameters()}


def _size(end: Subspace) -> int:
    return sum(parameter.numel() for parameter in end.parameters())


def _values(end: Subspace) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in end.parameters()])


def _gradient(end: Subspace) -> Tensor:
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in end.parameters()])


def _split(flat: Tensor, end: Subspace) -> list[Tensor]:
    parameters = list(end.parameters())
    parts = flat.split([parameter.numel() for parameter in parameters])
    return [part.view_as(parameter).clone() for part, parameter in zip(parts, parameters)]


def _take(target: Tensor, state: Mapping[str, Tensor], name: str) -> None:
    if name not in state or state[name].shape != target.shape:
        found = "is not there" if name not in state else f"is {tuple(state[name].shape)}"
        raise UsageError(f"the state of boundaries: {name} {found}, here it is {tuple(target.shape)}")
    target.copy_(state[name])
