"""What thinwire asks of a process group: size and rank, the primitives that move bytes, and groups of one's own.

Every function takes a torch process group (None: the default one), a `Metered` one, which counts what this member
sends, or ALONE: a group of this member only, in which nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.transit import Transit, checksum_of
from thinwire.torch_private.groups import is_known, known_groups, timeout_of

BUCKET = 4  # peers a message is exchanged with before those of the next are waited for


class Alone:
    """A group of this member only, in which nothing is sent; taken wherever a group is."""


ALONE = Alone()


@dataclass
class Metered:
    """A process group that counts the payload bytes this member sends over it; taken wherever a group is.

    group: the process group itself. sent: bytes so far. transit: keeps checksums of messages, if any. members: of this
    group by their rank, as transit numbers them; None: the same.
    """

    group: dist.ProcessGroup | Alone | None
    sent: int = 0
    transit: Transit | None = None
    members: Sequence[int] | None = None

    def note(self, source: int, to: int, total: Tensor) -> None:
        """A message with that checksum went from rank `source` to rank `to`."""
        if self.transit is not None:
            members = self.members or range(self.transit.size)
            self.transit.add(members[source], members[to], total)


Group = dist.ProcessGroup | Metered | Alone | None  # None: torch's default group


def count_sent(group: Group, nbytes: int) -> None:
    """This member has sent so many payload bytes over the group: added up where it is a Metered one."""
    if isinstance(group, Metered):
        group.sent += nbytes


def is_alone(group: Group = None) -> bool:
    """Is there no process group at all, or is it ALONE?"""
    inner = group.group if isinstance(group, Metered) else group
    return not dist.is_available() or not dist.is_initialized() or inner is ALONE


def unmetered(group: Group) -> dist.ProcessGroup | None:
    """The torch process group behind a group that is not ALONE; None: the default one."""
    inner = group.group if isinstance(group, Metered) else group
    assert not isinstance(inner, Alone), "a group of one member has no process group"
    return inner


def world(group: Group) -> tuple[int, int]:
    """(members, this member's rank in the group); (1, 0) without torch.distributed."""
    if is_alone(group):
        return 1, 0
    process_group = unmetered(group)
    return dist.get_world_size(process_group), dist.get_rank(process_group)


def explicit(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group itself; for None the default one of now, which may be another one later."""
    if group is not None:
        return group
    default = dist.group.WORLD
    assert default is not None, "torch.distributed is not initialised"
    return default


def new_group(
    ranks: Sequence[int], among: dist.ProcessGroup | None = None, options: object = None
) -> dist.ProcessGroup:
    """A new group of these (global) ranks, all of them members of `among`; only they need to call this.

    options: the backend's (torch's pg_options). It waits as long for a rank as `among` does: torch would give it half
    an hour, whatever the user said.

    torch names such a group by its ranks and by how many groups a rank knows already: where ranks know different
    numbers, they would wait for each other for ever. So the members first agree on that number, over `among`, and
    those behind make groups of themselves alone until they have caught up.
    """
    timeout = timeout_of(among)
    if len(ranks) == dist.get_world_size() and list(ranks) == sorted(ranks):
        return dist.new_group(list(ranks), timeout=timeout, pg_options=options)
    known = known_groups()
    most = torch.tensor([known], device="cuda" if dist.get_backend(among) == "nccl" else "cpu")
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=among)
    for _ in range(int(most) - known):
        dist.new_group([dist.get_rank()], backend="gloo", timeout=timeout, use_local_synchronization=True)
    return dist.new_group(list(ranks), timeout=timeout, pg_options=options, use_local_synchronization=True)


def twin(group: Group) -> dist.ProcessGroup:
    """A second group of the same ranks: its order of collectives is not mixed with anybody else's."""
    plain = unmetered(group)
    return new_group(dist.get_process_group_ranks(explicit(plain)), plain)


def subgroup(members: Sequence[int], group: dist.ProcessGroup, options: object = None) -> dist.ProcessGroup:
    """A group of some members, by their rank in `group`, while all of `group` make one each.

    options: the backend's (torch's pg_options).
    """
    ranks = dist.get_process_group_ranks(group)
    return new_group([ranks[m] for m in members], group, options)


def destroy(group: dist.ProcessGroup) -> None:
    """Free the threads and connections of a group, unless torch.distributed has been left already."""
    if dist.is_initialized() and is_known(group):
        dist.destroy_process_group(group)


def gather(x: Tensor, group: Group) -> list[Tensor]:
    """Every member's x, in rank order; all of one shape and dtype."""
    size, _ = world(group)
    if size == 1:
        return [x]
    out = [torch.empty_like(x) for _ in range(size)]
    count_sent(group, x.nbytes * (size - 1))
    dist.all_gather(out, x.contiguous(), group=unmetered(group))
    if is_checked(group):
        _note_all(group, [x] * size, out)
    return out


def is_checked(group: Group) -> TypeGuard[Metered]:
    """Are checksums of messages kept?"""
    return isinstance(group, Metered) and group.transit is not None


def _note_all(group: Metered, outgoing: list[Tensor], incoming: list[Tensor]) -> None:
    """Messages to every member and from every member, in the order of members; empty ones are not sent."""
    size, rank = world(group)
    totals: dict[int, Tensor] = {}  # one message may go to many
    for member in range(size):
        if member != rank and outgoing[member].numel():
            message = outgoing[member]
            totals.setdefault(id(message), checksum_of(message))
            group.note(rank, member, totals[id(message)])
        if member != rank and incoming[member].numel():
            group.note(member, rank, checksum_of(incoming[member]))


def arriving(outgoing: list[Tensor], sizes: list[int], group: Group) -> Iterator[tuple[int, Tensor]]:
    """Send outgoing[j] to member j; yield (member, what it sent here), sizes[member] bytes of uint8, own first.

    Step s sends to (r + s) mod P and receives from (r − s) mod P, so that no member is everybody's target at once
    (Ok-Topk's destination rotation). All steps are posted at once, in buckets; a bucket is handed over when it is
    there, while later ones are in flight, always in the same order. Nothing is sent where there is nothing to send.

    A bucket's receives are posted before its sends. Gloo sends nothing until the other end has said that it expects it,
    and that word takes the connection which the other direction's data takes: behind it, two members that are a few
    milliseconds apart would send one after the other instead of both at once.
    """
    size, rank = world(group)
    count_sent(group, sum(x.nbytes for x in outgoing) - outgoing[rank].nbytes)
    process_group = None if size == 1 else unmetered(group)
    incoming = [torch.empty(n, dtype=torch.uint8, device=outgoing[rank].device) for n in sizes]
    posted = []
    for first in range(1, size, BUCKET):
        receives, sends, sources = [], [], []
        for s in range(first, min(first + BUCKET, size)):
            to, source = (rank + s) % size, (rank - s) % size
            if outgoing[to].numel():
                sends.append(dist.P2POp(dist.isend, outgoing[to].contiguous(), group=process_group, group_peer=to))
            if sizes[source]:
                receives.append(dist.P2POp(dist.irecv, incoming[source], group=process_group, group_peer=source))
            sources.append(source)
        operations = receives + sends
        posted.append((sources, dist.batch_isend_irecv(operations) if operations else []))
    yield rank, outgoing[rank]
    for sources, works in posted:
        for work in works:
            work.wait()
        for source in sources:
            yield source, incoming[source]
    if is_checked(group):
        _note_all(group, outgoing, incoming)


def swap(outgoing: list[Tensor], sizes: list[int], group: Group) -> list[Tensor]:
    """`arriving`, all of it, in member order."""
    arrived = dict(arriving(outgoing, sizes, group))
    return [arrived[member] for member in range(len(outgoing))]


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """The sum over the members, in a new tensor."""
    out, size = x.clone(), world(group)[0]
    if size > 1:
        count_sent(group, 2 * x.nbytes * (size - 1) // size)
        dist.all_reduce(out, group=unmetered(group))
    return out
