"""Averaging named tensors unit by unit through one collective with its memory; no threads, no parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from thinwire.collectives.early import Early
from thinwire.collectives.flows import Flows
from thinwire.collectives.groups import ALONE, Group, Metered, without_meter, world
from thinwire.collectives.members import Members
from thinwire.collectives.messages import maximum
from thinwire.collectives.sums import exact_mean, exact_mean_steps
from thinwire.collectives.transit import Transit
from thinwire.config.wire import Reduction
from thinwire.data_parallel.gradient_units import Shape, Unit, make_units
from thinwire.distributed.later_checks import LaterChecks
from thinwire.distributed.summary import Summary
from thinwire.errors import InvalidExchange, UsageError
from thinwire.memory import Plain
from thinwire.memory.channel import Channel
from thinwire.steps import Steps, finish

TAGS = 8  # messages of one exchange at most
SLOTS = ("e", "h", "m")  # residual, shift, mean shift: per parameter in a checkpoint


class Exchange:
    """The units of a set of tensors, a channel for each. A step opens with its first reduction: from there to commit or
    rollback what is written to state is staged.

    shapes: of the tensors, by name, in declaration order. reduction: how they are averaged, over `group`. seed: of
    stochastic rounding and random choices, equal on all ranks. own_group: nobody else uses the group, now or later, so
    the receives of the next step may be posted when this one's have arrived. streams: flows per message (flows.py).
    units: how the tensors are cut; None: as the reduction says.
    """

    def __init__(
        self, shapes: Mapping[str, Shape], reduction: Reduction, group: Group = None, seed: int = 0,
        own_group: bool = False, streams: int = 1, units: list[Unit] | None = None,
    ) -> None:  # fmt: skip
        self.reduction = reduction
        self.units = make_units(shapes, reduction) if units is None else units
        self.channels = {
            unit: Channel(
                reduction.collective.for_shapes(unit.shapes), Plain() if unit.exact else reduction.memory,
                seed=seed, name=unit.name,
            )
            for unit in self.units
        }  # fmt: skip
        self.group = Metered(ALONE)
        self.unit_groups: dict[tuple[Unit, bool], Metered] = {}  # by unit, and whether it is sent exactly
        self.streams = streams
        self._join(group, own_group, streams)
        self.steps = 0  # ended, also those rolled back, and those of a loaded state
        self.resumed = 0  # of them, those of the loaded state
        self.averaged = 0  # values, in this exchange's own steps since its group last changed
        self.ring_bytes_before = 0  # of earlier groups
        self.is_open = False  # a step, between its first reduction and commit or rollback
        self.later = LaterChecks()  # read by `agree`
        self.residuals_before: dict[Unit, Tensor | None] = {}  # of the open step, before the unit's last reduction

    def _join(self, group: Group, own_group: bool, streams: int) -> None:
        self.size, rank = world(group)  # known also after the group is destroyed
        self.transit = Transit(self.size, rank)
        self.group = Metered(ALONE if self.size == 1 else without_meter(group), self.sent, self.transit)
        own_group = own_group and self.size > 1
        of_torch = not isinstance(self.group.group, Members)  # receives of others are not posted early
        self.flows = Flows(self.group if of_torch or streams > 1 else ALONE, streams)
        self.group.flows = self.flows if streams > 1 else None
        self.flag_group = Metered(self.group.group)  # what is agreed on is no payload: counted apart, not checked
        if own_group:
            self.flag_group.early = self._early(2 * len(self.units))
        self.unit_groups.clear()
        for i, unit in enumerate(self.units) if own_group else ():
            for exact in (True, False) if self.reduction.collective.fixed_sizes else (True,):
                early = self._early(2 * i + exact)
                self.unit_groups[unit, exact] = replace(self.group, early=early)

    def rejoin(self, group: Group, steps: int, shifted: bool, device: torch.device) -> None:
        """Members have come or gone: on all of them, before their next step, whose number is `steps` for all.

        Residuals and shifts stay. What collectives keep of their own, thresholds and regions and bases, starts anew.
        Mean shifts are the mean of the shifts of those that are there now. shifted: some of them have any. device:
        where gradients are.
        """
        self.ring_bytes_before = self.ring_bytes
        self.averaged = 0
        self._join(group, False, self.streams)
        self.go_on_from(steps)
        for unit, channel in self.channels.items():
            channel.collective_state.clear()
            if channel.memory.mirrored and shifted and self.size > 1:
                shift = channel.state.read("h", unit.name)
                shift = torch.zeros(unit.numel, device=device) if shift is None else shift
                channel.state.write("m", unit.name, exact_mean(shift, self.group))

    @property
    def place(self) -> tuple[int, int]:
        """(members, this member's rank)."""
        return self.size, self.transit.rank

    @property
    def sent(self) -> int:
        """Payload bytes that this rank has sent."""
        return self.group.sent + sum(group.sent for group in self.unit_groups.values())

    def summary(self, skips: int) -> Summary:
        """What was sent, next to what a ring in float32 would have sent. skips: steps that were rolled back."""
        return Summary(self.steps - self.resumed, self.sent, self.ring_bytes, skips)

    @property
    def ring_bytes(self) -> int:
        """What a ring in float32 would have sent."""
        return self.ring_bytes_before + 2 * 4 * self.averaged * (self.size - 1) // self.size

    @property
    def compressed(self) -> list[Unit]:
        """The units that are not exact."""
        return [unit for unit in self.units if not unit.exact]

    @property
    def has_shifts(self) -> bool:
        """Does this rank remember a shift of any unit?"""
        return any(channel.state.read("h", unit.name) is not None for unit, channel in self.channels.items())

    def commit(self) -> None:
        """End the step and keep what it wrote."""
        self._end_step(Channel.commit)

    def rollback(self) -> None:
        """End the step and drop what it wrote. Its number stays used."""
        self._end_step(Channel.rollback)

    def go_on_from(self, steps: int) -> None:
        """So many steps have been made, here and by those whose state this one takes."""
        made = self.steps - self.resumed
        self.steps = steps
        self.resumed = steps - made

    def count_step(self) -> None:
        """A step was made without this exchange."""
        self.steps += 1

    def reduce(self, unit: Unit, x: Tensor, exact: bool = False) -> Tensor:
        """x: float32[unit.numel], flat → its mean over the group. `exact`: nothing is left out, and the residual is
        sent with it. InvalidExchange, perhaps on some ranks only, where the mean or the residual leaves its type's
        range or a message was damaged: ranks are still in step, and must agree (`agree`) to roll back."""
        return finish(self.reduce_steps(unit, x, exact))

    def reduce_steps(self, unit: Unit, x: Tensor, exact: bool = False) -> Steps[Tensor]:
        """`reduce`, stopping where it would wait for other ranks: other units can go on meanwhile."""
        if not self.is_open:
            self._begin_step()
        channel = self.channels[unit]
        residual = self.residuals_before[unit] = channel.state.read("e", unit.name)
        group = self.unit_groups.get((unit, exact or unit.exact), self.group)
        if group.early is not None:
            group.early.begin()
        self.averaged += x.numel()
        if not (exact or unit.exact):
            mean = yield from channel.reduce_steps(unit.name, x, group)
            self.later.check_finite(unit.name, mean, channel.state.read("e", unit.name))
            return mean
        if residual is not None:
            x = x + residual.to(x.device)
            channel.state.write("e", unit.name, torch.zeros_like(x))
        mean = yield from exact_mean_steps(x, group)
        if mean.is_cuda:  # elsewhere it has been looked at
            self.later.check_finite(unit.name, mean)
        return mean

    def reduce_all(self, values: Callable[[Unit], Tensor], exact: bool = False) -> dict[Unit, Tensor] | None:
        """Every unit's mean, for the caller to commit. None, on all ranks: the step was rolled back, since some rank's
        `reduce` was an InvalidExchange.

        values: a unit's, flat. exact: as for `reduce`.
        """
        means: dict[Unit, Tensor] = {}
        invalid = False
        for unit in self.units:
            x = values(unit)
            try:
                means[unit] = self.reduce(unit, x, exact)
            except InvalidExchange:
                invalid = True
        if self.units and self.agree(torch.tensor([invalid], dtype=torch.uint8, device=x.device)).any():
            self.rollback()
            return None
        return means

    def agree(self, flags: Tensor) -> Tensor:
        """uint8[…]: the maximum of every flag over the ranks. The first is also set where a message since the last
        agreement did not arrive as it was sent, or a check that was left was not good."""
        flags = self.later.into(flags)
        if self.size == 1:
            return flags
        if self.flag_group.early is not None:
            self.flag_group.early.begin()
        both = maximum(torch.cat((flags, self.transit.table(flags.device))), self.flag_group)
        agreed, tables = both[: flags.numel()], both[flags.numel() :]
        agreed[0] |= ~self.transit.is_intact(tables)
        return agreed

    def leave_group(self) -> None:
        """Nothing more is sent: the group, which another may destroy now, is not held any longer."""
        self.flows.close()
        self.group = Metered(ALONE, self.sent)
        self.flag_group = Metered(ALONE)
        self.unit_groups.clear()

    def count_plain(self, x: Tensor) -> None:
        """x is averaged by the backend's own all-reduce, past the units: it is sent all the same."""
        self.averaged += x.numel()
        self.group.sent += 2 * x.nbytes * (self.size - 1) // self.size

    def finish_step(self) -> None:
        """Once all units of a step are through: what a collective decides over the whole model."""
        units = [unit for unit in self.compressed if unit.name in self.channels[unit].staged_collective]
        if units:
            states = [self.channels[unit].staged_collective[unit.name] for unit in units]
            self.reduction.collective.finish_step(states, [unit.numel for unit in units], self.group)

    def restore_residual(self, unit: Unit, span: slice) -> None:
        """A parameter that no rank used, at `span` of its unit, keeps the residual that it had before the unit's last
        reduction: what was sent of it is not applied anywhere."""
        channel, before = self.channels[unit], self.residuals_before[unit]
        now = channel.state.read("e", unit.name)
        if now is not None:
            kept = now.clone()
            kept[span] = 0 if before is None else before[span]
            channel.state.write("e", unit.name, kept)

    def residual_norm(self) -> float | None:
        """‖e‖ of this rank over all units; None where no residual is kept."""
        found = [self.channels[unit].state.read("e", unit.name) for unit in self.compressed]
        kept = [torch.linalg.vector_norm(e, dtype=torch.float64) for e in found if e is not None]
        return float(torch.stack(kept).norm()) if kept else None

    def _early(self, number: int) -> Early:
        """For one kind of message; every kind has tags of its own. Tag 0 is that of messages without one, on the same
        group: what ranks agree on around a pass."""
        return Early(self.flows, 1 + TAGS * number, TAGS)

    def _begin_step(self) -> None:
        for channel in self.channels.values():
            channel.begin(self.steps)
        self.is_open = True

    def _end_step(self, end: Callable[[Channel], None]) -> None:
        for channel in self.channels.values() if self.is_open else ():
            end(channel)
        self.steps += 1
        self.is_open = False
        self.later.unread.clear()
        self.residuals_before.clear()

    # --- checkpoints: per parameter, so that units may change between runs

    def state_dict(self) -> dict[str, Tensor]:
        """ "e/<parameter>" and so on, "unit/<unit>/<field>" for the collective's own, "step"."""
        out = {"step": torch.tensor(self.steps)}
        for unit, channel in self.channels.items():
            for slot in SLOTS:
                value = channel.state.read(slot, unit.name)
                if value is not None:
                    out |= {f"{slot}/{p}": value[span].view(shape).clone() for p, span, shape in unit.spans()}
            for field, value in channel.collective_state.get(unit.name, {}).items():
                out[f"unit/{unit.name}/{field}"] = value.clone()
        return out

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Parameters that the state does not know start without memory, thresholds of units that changed anew."""
        self.go_on_from(int(state["step"]))
        for unit, channel in self.channels.items():
            channel.forget(unit.name)
            for slot in SLOTS:
                if any(f"{slot}/{p}" in state for p in unit.parameters):
                    channel.state.write(slot, unit.name, _joined(unit, slot, state))
            prefix = f"unit/{unit.name}/"
            fields = {n.removeprefix(prefix): v.clone() for n, v in state.items() if n.startswith(prefix)}
            if fields:
                channel.collective_state[unit.name] = fields


def _joined(unit: Unit, slot: str, state: Mapping[str, Tensor]) -> Tensor:
    like = next(state[f"{slot}/{p}"] for p in unit.parameters if f"{slot}/{p}" in state)
    parts = []
    for parameter, _, shape in unit.spans():
        part = state.get(f"{slot}/{parameter}")
        if part is None:
            part = like.new_zeros(shape)
        elif tuple(part.shape) != shape:
            raise UsageError(f"{parameter}: the state is of shape {tuple(part.shape)}, the parameter of {shape}")
        parts.append(part.reshape(-1))
    return torch.cat(parts)
