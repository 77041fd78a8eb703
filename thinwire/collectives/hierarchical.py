"""Two levels: one collective inside a host, where the network is fast, another across hosts, where it is not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.codecs.base import from_raw, raw_bytes
from thinwire.collectives.base import Collective, State
from thinwire.collectives.dense import Dense
from thinwire.collectives.groups import (
    ALONE,
    Group,
    Metered,
    count_sent,
    explicit,
    is_alone,
    subgroup,
    unmetered,
    world,
)
from thinwire.collectives.lowrank import LowRank
from thinwire.collectives.messages import swap
from thinwire.collectives.regions import region_bounds
from thinwire.errors import InvalidExchange, UsageError
from thinwire.kernels.random import derive

Levels = tuple[dist.ProcessGroup, dist.ProcessGroup]  # (a host's members, the members of all hosts with one place)


@dataclass(frozen=True)
class Hierarchical(Collective):
    """`per_host` consecutive ranks are a host (as torchrun numbers them); every member carries its slice across.

    1. inside.exchange(u) on every host: its mean
    2. member j takes slice j of it through across.exchange with the members j of all other hosts
    3. swap the slices inside the host
    n/per_host values per member cross the slow network, coded by `across`. The error of step 2, per_host·(own − slice),
    is charged to the member whose slice it is. Subgroups are made at the first exchange, by their members alone.
    State: "inside/…" and "across/…".

    inside: the collective of a host's members. across: of the members of all hosts with the same place. per_host:
    members per host; the group's size must be a multiple of it.
    """

    inside: Collective = field(default_factory=Dense)
    across: Collective = field(default_factory=Dense)
    per_host: int = 1
    groups: dict[dist.ProcessGroup, Levels] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("inside", "across"):
            if not isinstance(getattr(self, name), Collective):
                raise UsageError(f"{name} must be a collective, not {getattr(self, name)!r}")
        if isinstance(self.across, LowRank):
            raise UsageError("across must work on slices of a vector, which LowRank does not: it needs whole matrices")
        if not isinstance(self.per_host, int) or self.per_host < 1:
            raise UsageError(f"per_host must be a positive integer, not {self.per_host!r}")

    def for_shapes(self, shapes: Sequence[tuple[int, ...]]) -> Hierarchical:
        fitted = replace(self, inside=self.inside.for_shapes(shapes))
        object.__setattr__(fitted, "groups", self.groups)  # one pair of subgroups for all units
        return fitted

    def exchange(
        self, u: Tensor, group: Group = None, *, state: State, key: object = "", step: int = 0, seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        host_group, peer_group = self._groups(group)
        size, rank = world(host_group)
        host = world(group)[1] // self.per_host
        invalid: list[InvalidExchange] = []  # raised at the end: the other members go on
        # 1. the mean of this host
        with _part(state, "inside/") as part, _later(invalid):
            mean = own = torch.zeros_like(u)
            inner = derive(seed, "inside", host)
            mean, own = self.inside.exchange(u, host_group, state=part, key=key, step=step, seed=inner)
        # 2. this member's slice of it, across hosts
        bounds = region_bounds(u.numel(), size)
        mine = slice(bounds[rank], bounds[rank + 1])
        carried = mean.reshape(-1)[mine]
        with _part(state, "across/") as part, _later(invalid):
            result = kept = torch.zeros_like(carried)
            outer = derive(seed, "across", rank)
            result, kept = self.across.exchange(carried, peer_group, state=part, key=key, step=step, seed=outer)
        # 3. all slices, inside the host
        sizes = [(b - a) * u.element_size() for a, b in pairwise(bounds)]
        slices = swap([raw_bytes(result)] * size, sizes, host_group)
        count_sent(group, host_group.sent + peer_group.sent)
        if invalid:
            raise invalid[0]
        own = own.clone().reshape(-1)
        own[mine] += size * (kept - carried)
        return torch.cat([from_raw(wire, u.dtype) for wire in slices]).view(u.shape), own.view(u.shape)

    def finish_step(self, states: list[State], numels: list[int], group: Group = None) -> None:
        host_group, peer_group = self._groups(group)
        size, rank = world(host_group)
        slices = [n * (rank + 1) // size - n * rank // size for n in numels]
        self._finish(self.inside, "inside/", states, numels, host_group)
        self._finish(self.across, "across/", states, slices, peer_group)

    def leave_groups(self, group: Group) -> list[dist.ProcessGroup]:
        if is_alone(group):
            return []
        made = self.groups.pop(explicit(unmetered(group)), ())
        inner = [g for one, level in zip((self.inside, self.across), made) for g in one.leave_groups(level)]
        return [*inner, *made]

    def _finish(
        self, collective: Collective, prefix: str, states: list[State], numels: list[int], group: Metered
    ) -> None:
        parts = [_cut(state, prefix) for state in states]
        collective.finish_step(parts, numels, group)
        for state, part in zip(states, parts):
            state.update({prefix + name: value for name, value in part.items()})

    def _groups(self, group: Group) -> tuple[Metered, Metered]:
        """(this host's members, the members of all hosts with this one's place), counting what is sent from now on."""
        if is_alone(group):
            return Metered(ALONE), Metered(ALONE)
        size, rank = world(group)
        everybody = explicit(unmetered(group))
        if size % self.per_host:
            raise UsageError(f"per_host {self.per_host}: {size} members do not fill hosts of that size")
        if everybody not in self.groups:
            host, place = divmod(rank, self.per_host)
            host_group = subgroup(range(host * self.per_host, (host + 1) * self.per_host), everybody)
            peer_group = subgroup(range(place, size, self.per_host), everybody)
            self.groups[everybody] = host_group, peer_group
        host_group, peer_group = self.groups[everybody]
        transit = group.transit if isinstance(group, Metered) else None
        host, place = divmod(rank, self.per_host)
        return (
            Metered(host_group, 0, transit, range(host * self.per_host, (host + 1) * self.per_host)),
            Metered(peer_group, 0, transit, range(place, size, self.per_host)),
        )


def _cut(state: State, prefix: str) -> State:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


@contextmanager
def _later(invalid: list[InvalidExchange]) -> Iterator[None]:
    """What is raised inside goes into the list."""
    try:
        yield
    except InvalidExchange as error:
        invalid.append(error)


@contextmanager
def _part(state: State, prefix: str) -> Iterator[State]:
    """The entries of a state under a prefix, put back afterwards."""
    part = _cut(state, prefix)
    yield part
    state.update({prefix + name: value for name, value in part.items()})
