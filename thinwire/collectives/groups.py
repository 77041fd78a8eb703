"""What thinwire asks of a process group: size and rank, and groups of one's own. messages.py: how bytes move in it.

Every function takes a torch process group (None: the default one), a `Metered` one, which counts what this member
sends, ALONE: a group of this member only, in which nothing is sent, or `Members` of another kind (members.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from thinwire.collectives.early import Early, PointToPoint
from thinwire.collectives.members import Elastic, Members, TorchMembers
from thinwire.collectives.transit import Transit
from thinwire.errors import UsageError
from thinwire.torch_private.groups import NUMBERS, is_known, is_named_by_count, timeout_of


class Alone:
    """A group of this member only, in which nothing is sent; taken wherever a group is."""


ALONE = Alone()


@dataclass
class Metered:
    """A process group that counts the payload bytes this member sends over it; taken wherever a group is.

    group: the process group itself. sent: bytes so far. transit: keeps checksums of messages, if any. members: of this
    group by their rank, as transit numbers them; None: the same. early: posts receives before their messages are sent,
    where messages have the same sizes every time. flows: over which messages go on CPUs; None: the group's own
    connections.
    """

    group: dist.ProcessGroup | Members | Alone | None
    sent: int = 0
    transit: Transit | None = None
    members: Sequence[int] | None = None
    early: Early | None = None
    flows: PointToPoint | None = None


Group = dist.ProcessGroup | Members | Metered | Alone | None  # None: torch's default group


def count_sent(group: Group, nbytes: int) -> None:
    """This member has sent so many payload bytes over the group: added up where it is a Metered one."""
    if isinstance(group, Metered):
        group.sent += nbytes


def is_alone(group: Group = None) -> bool:
    """Is there no process group at all, or is it ALONE?"""
    inner = without_meter(group)
    if isinstance(inner, Members):
        return False
    return not dist.is_available() or not dist.is_initialized() or inner is ALONE


def without_meter(group: Group) -> dist.ProcessGroup | Members | Alone | None:
    """The group itself, where it is a Metered one that which it counts for."""
    return group.group if isinstance(group, Metered) else group


def unmetered(group: Group) -> dist.ProcessGroup | None:
    """The torch process group behind a group that is not ALONE; None: the default one. UsageError where it is another
    kind of group."""
    inner = without_meter(group)
    assert not isinstance(inner, Alone), "a group of one member has no process group"
    if isinstance(inner, Members):
        raise UsageError(f"{type(inner).__name__}: this needs a process group of torch, whose ranks stay")
    return inner


def members(group: Group) -> Members:
    """What a group that is not ALONE can do."""
    inner = without_meter(group)
    return inner if isinstance(inner, Members) else TorchMembers(unmetered(inner))


def elastic(group: Group) -> Elastic | None:
    """The group where its members come and go, None where they stay."""
    inner = without_meter(group)
    return inner if isinstance(inner, Elastic) else None


def world(group: Group) -> tuple[int, int]:
    """(members, this member's rank in the group); (1, 0) without torch.distributed."""
    if is_alone(group):
        return 1, 0
    return members(group).world()


def has_cpu_backend(group: Group) -> bool:
    """Can the group send tensors on the host?"""
    return "gloo" in members(group).backends


def explicit(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group itself; for None the default one of now, which may be another one later."""
    if group is not None:
        return group
    default = dist.group.WORLD
    assert default is not None, "torch.distributed is not initialised"
    return default


def new_group(
    ranks: Sequence[int], among: dist.ProcessGroup | None = None, options: object = None, backend: str | None = None
) -> dist.ProcessGroup:
    """A new group of these (global) ranks, all of them members of `among`; only they need to call this.

    options: the backend's (torch's pg_options). backend: its name; None: the default group's. The group waits as long
    for a rank as `among` does: torch would give it half an hour, whatever the user said.

    torch names such a group by its ranks and a number that may differ between ranks: they would wait for each other for
    ever. So the members first agree on one, over `among`, that none of them has used.
    """
    timeout = timeout_of(among)
    if len(ranks) == dist.get_world_size() and list(ranks) == sorted(ranks) and not is_named_by_count():
        return dist.new_group(list(ranks), timeout=timeout, backend=backend, pg_options=options)
    lowest = torch.tensor([NUMBERS.lowest()], device="cuda" if dist.get_backend(among) == "nccl" else "cpu")
    dist.all_reduce(lowest, op=dist.ReduceOp.MAX, group=among)
    with NUMBERS.take(int(lowest)):
        return dist.new_group(
            list(ranks), timeout=timeout, backend=backend, pg_options=options, use_local_synchronization=True
        )


def twin(group: Group, backend: str | None = None) -> dist.ProcessGroup:
    """A second group of the same ranks: its order of collectives is not mixed with anybody else's.

    backend: its name; None: the default group's.
    """
    plain = unmetered(group)
    return new_group(dist.get_process_group_ranks(explicit(plain)), plain, backend=backend)


def subgroup(members: Sequence[int], group: dist.ProcessGroup, options: object = None) -> dist.ProcessGroup:
    """A group of some members, by their rank in `group`, while all of `group` make one each.

    options: the backend's (torch's pg_options).
    """
    ranks = dist.get_process_group_ranks(group)
    return new_group([ranks[m] for m in members], group, options)


def destroy(group: dist.ProcessGroup | Members) -> None:
    """Free the threads and connections of a group, unless torch.distributed has been left already. One that is not
    torch's is its maker's to close."""
    if not isinstance(group, Members) and dist.is_initialized() and is_known(group):
        dist.destroy_process_group(group)
