"""Two levels: one collective inside a host, where the network is fast, another across hosts, where it is not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs.base import from_raw, raw_bytes
from thinwire.collectives.base import Collective, State
from thinwire.collectives.dense import Dense
from thinwire.collectives.groups import Metered, is_alone, subgroup, swap, unmetered, whole, world
from thinwire.collectives.lowrank import LowRank
from thinwire.collectives.regions import region_bounds
from thinwire.errors import UsageError
from thinwire.kernels.random import derive


@dataclass(frozen=True)
class Hierarchical(Collective):
    """`per_host` consecutive ranks are a host (as torchrun numbers them); every member carries its slice across.

    1. inside.exchange(u) on every host: its mean; 2. member j takes slice j of it through across.exchange with the
    members j of all other hosts; 3. swap the slices inside the host. n/per_host values a member cross the slow network,
    coded by `across`. The error of step 2, per_host·(own − slice), is charged to the member whose slice it is.
    Subgroups are made at the first exchange, by their members alone. State: "inside/…" and "across/…".
    """

    inside: Collective = field(default_factory=Dense)
    across: Collective = field(default_factory=Dense)
    per_host: int = 1
    groups: dict[Any, tuple[Any, Any]] = field(default_factory=dict, init=False, repr=False, compare=False)

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
        self, u: Tensor, group: Any = None, *, state: State, key: object = "", step: int = 0, seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        near, far = (Metered(g) for g in self._groups(group))
        size, rank = world(near)
        host = world(group)[1] // self.per_host
        with _part(state, "inside/") as part:
            inner = derive(seed, "inside", host)
            mean, own = self.inside.exchange(u, near, state=part, key=key, step=step, seed=inner)
        bounds = region_bounds(u.numel(), size)
        mine = slice(bounds[rank], bounds[rank + 1])
        carried = mean.reshape(-1)[mine]
        with _part(state, "across/") as part:
            outer = derive(seed, "across", rank)
            result, kept = self.across.exchange(carried, far, state=part, key=key, step=step, seed=outer)
        sizes = [(b - a) * u.element_size() for a, b in pairwise(bounds)]
        slices = swap([raw_bytes(result)] * size, sizes, near)
        unmetered(group, near.sent + far.sent)
        own = own.clone().reshape(-1)
        own[mine] += size * (kept - carried)
        return torch.cat([from_raw(wire, u.dtype) for wire in slices]).view(u.shape), own.view(u.shape)

    def finish_step(self, states: list[State], numels: list[int], group: Any = None) -> None:
        near, far = self._groups(group)
        size, rank = world(near)
        slices = [n * (rank + 1) // size - n * rank // size for n in numels]
        for collective, prefix, lengths, members in (
            (self.inside, "inside/", numels, near), (self.across, "across/", slices, far),
        ):  # fmt: skip
            parts = [_cut(state, prefix) for state in states]
            collective.finish_step(parts, lengths, members)
            for state, part in zip(states, parts):
                state.update({prefix + name: value for name, value in part.items()})

    def _groups(self, group: Any) -> tuple[Any, Any]:
        """(this host's members, the members of all hosts with this one's place)."""
        if is_alone(group):
            return unmetered(group), unmetered(group)
        (size, rank), group = world(group), whole(unmetered(group))
        if size % self.per_host:
            raise UsageError(f"per_host {self.per_host}: {size} members do not fill hosts of that size")
        if group not in self.groups:
            host, place = divmod(rank, self.per_host)
            near = subgroup(range(host * self.per_host, (host + 1) * self.per_host), group)
            self.groups[group] = near, subgroup(range(place, size, self.per_host), group)
        return self.groups[group]


def _cut(state: State, prefix: str) -> State:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


@contextmanager
def _part(state: State, prefix: str) -> Iterator[State]:
    """The entries of a state under a prefix, put back afterwards."""
    part = _cut(state, prefix)
    yield part
    state.update({prefix + name: value for name, value in part.items()})
