"""What every collective is, and how bytes move between the members of a group.

    exchange(u, group, state=…, key=…, step=…, seed=…) → (mean, own),   Σ_i own_i = P · mean

`own` is what this member's part of the mean was: the memory's residual is what is left of u without it. `state` is a
dict of tensors that the channel owns and checkpoints; a collective replaces entries and never writes into one.
`seed` is the group's; a member's own is derived from it and its rank. World size 1 needs no process group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import thinwire.collectives.groups as groups

State = dict[str, Tensor]

ALONE = object()  # taken wherever a group is: one of this member only, in which nothing is sent
BUCKET = 4  # peers a message is exchanged with before those of the next are waited for


class Collective:
    """One way to average a vector over a group; a subclass says how in `exchange`."""

    def exchange(
        self, u: Tensor, group: Any = None, *, state: State, key: object = "", step: int = 0, seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def mean(self, x: Tensor, group: Any = None) -> Tensor:
        """The exact mean, for what a memory sends in full."""
        return all_reduce(x, group) / world(group)[0]

    def for_shapes(self, shapes: Sequence[tuple[int, ...]]) -> Collective:
        """This collective for the flat concatenation of several tensors; the same, where shapes mean nothing to it."""
        return self

    def settle(self, states: list[State], numels: list[int], group: Any = None) -> None:
        """Once a step, after the last exchange: what the units' states (of `numels` values each) have in common."""


@dataclass
class Metered:
    """A process group that counts the payload this member sends over it; taken wherever a group is."""

    group: Any
    sent: int = 0


def unmetered(group: Any, nbytes: int = 0) -> Any:
    """The process group itself; `nbytes` are counted where somebody counts."""
    if not isinstance(group, Metered):
        return group
    group.sent += nbytes
    return group.group


def is_alone(group: Any = None) -> bool:
    """Is there no process group at all, or is it ALONE?"""
    return not dist.is_available() or not dist.is_initialized() or unmetered(group) is ALONE


def world(group: Any) -> tuple[int, int]:
    """(members, this member's rank in the group); (1, 0) without torch.distributed."""
    if is_alone(group):
        return 1, 0
    group = unmetered(group)
    return dist.get_world_size(group), dist.get_rank(group)


def whole(group: Any) -> Any:
    """The group meant by None is the default one, which may be another tomorrow."""
    return dist.group.WORLD if group is None else group


def subgroup(members: Sequence[int], group: Any, options: Any = None) -> Any:
    """A group of some members, by their rank in `group`, while all of `group` make one each."""
    ranks = dist.get_process_group_ranks(group)
    return groups.new_group([ranks[m] for m in members], group, options)


def gather(x: Tensor, group: Any) -> list[Tensor]:
    """Every member's x, in rank order; all of one shape and dtype."""
    size, _ = world(group)
    if size == 1:
        return [x]
    out = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(out, x.contiguous(), group=unmetered(group, x.nbytes * (size - 1)))
    return out


def arriving(outgoing: list[Tensor], sizes: list[int], group: Any) -> Iterator[tuple[int, Tensor]]:
    """Send outgoing[j] to member j; yield (member, what it sent here), sizes[member] bytes of uint8, own first.

    Step s sends to (r + s) mod P and receives from (r − s) mod P, so that no member is everybody's target at once
    (Ok-Topk's destination rotation). All steps are posted at once, in buckets; a bucket is handed over when it is
    there, while later ones are in flight, always in the same order. Nothing is sent where there is nothing to send.

    A bucket's receives are posted before its sends. Gloo sends nothing until the other end has said that it expects it,
    and that word takes the connection which the other direction's data takes: behind it, two members that are a few
    milliseconds apart would send one after the other instead of both at once.
    """
    size, rank = world(group)
    group = unmetered(group, sum(x.nbytes for x in outgoing) - outgoing[rank].nbytes)
    incoming = [torch.empty(n, dtype=torch.uint8, device=outgoing[rank].device) for n in sizes]
    posted = []
    for first in range(1, size, BUCKET):
        receives, sends, sources = [], [], []
        for s in range(first, min(first + BUCKET, size)):
            to, source = (rank + s) % size, (rank - s) % size
            if outgoing[to].numel():
                sends.append(dist.P2POp(dist.isend, outgoing[to].contiguous(), group=group, group_peer=to))
            if sizes[source]:
                receives.append(dist.P2POp(dist.irecv, incoming[source], group=group, group_peer=source))
            sources.append(source)
        operations = receives + sends
        posted.append((sources, dist.batch_isend_irecv(operations) if operations else []))
    yield rank, outgoing[rank]
    for sources, works in posted:
        for work in works:
            work.wait()
        for source in sources:
            yield source, incoming[source]


def swap(outgoing: list[Tensor], sizes: list[int], group: Any) -> list[Tensor]:
    """`arriving`, all of it, in member order."""
    arrived = dict(arriving(outgoing, sizes, group))
    return [arrived[member] for member in range(len(outgoing))]


def all_reduce(x: Tensor, group: Any) -> Tensor:
    """The sum over the members, in a new tensor."""
    out, size = x.clone(), world(group)[0]
    if size > 1:
        dist.all_reduce(out, group=unmetered(group, 2 * x.nbytes * (size - 1) // size))
    return out
