"""Process groups: how many groups this rank knows, the store it met the others in, and a group's time-out."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from thinwire.torch_private.leaving import wait_for_gloo
from thinwire.torch_private.versions import require

require("process groups", distributed_c10d, "_world", "_get_default_store", "_get_default_group", "_hash_ranks_to_str")
require("process groups", type(distributed_c10d._world), "pg_map", "pg_names", "group_count")
require("process groups", dist.ProcessGroup, "_device_types", "_get_backend")
atexit.register(wait_for_gloo)


def known_groups() -> int:
    """How many groups there are on this rank."""
    return len(distributed_c10d._world.pg_map)


class GroupNumbers:
    """Numbers by which torch names groups that only their members make, none of them used twice on this rank.

    torch makes the name of the ranks and a number, and the members meet in the store under that name, where addresses
    stay. So a second group of that name would find the addresses of the first, which may be gone. The number is how
    many groups the rank knows, or since torch 2.15 how many it has made: the first falls when a group is destroyed, and
    both differ between ranks. Since 2.15 groups of all ranks have that number too.
    """

    def __init__(self) -> None:
        self.next = 0

    def lowest(self) -> int:
        """The lowest number that was not used on this rank."""
        return self.next if is_named_by_count() else max(self.next, len(distributed_c10d._world.pg_names))

    @contextmanager
    def take(self, number: int) -> Iterator[None]:
        """Inside, one group of members is named by this number, which is at least `lowest`."""
        known: Any = distributed_c10d._world
        self.next = number + 1
        if not is_named_by_count():
            while len(known.pg_names) < number:
                known.pg_names[_NoGroup()] = f"no group {len(known.pg_names)}"
            yield
            return
        count, known.group_count = known.group_count, APART + number
        try:
            yield
        finally:
            known.group_count = count


APART = 1_000_000  # numbers above are ours, where torch counts the groups that all ranks make
NUMBERS = GroupNumbers()


class _NoGroup:
    """In torch's list of groups, so that it is longer."""

    def shutdown(self) -> None:
        """Called when torch.distributed is left."""

    def abort(self) -> None:
        """Called instead of that after an error."""


def is_named_by_count() -> bool:
    """Does this torch name groups by how many were made, and not by how many are known?"""
    known: Any = distributed_c10d._world
    before = distributed_c10d._hash_ranks_to_str([0])
    known.group_count += 1
    after = distributed_c10d._hash_ranks_to_str([0])
    known.group_count -= 1
    return before != after


def is_known(group: dist.ProcessGroup) -> bool:
    """Is it a group of now, not one that was destroyed?"""
    return group in distributed_c10d._world.pg_map


def timeout_of(group: dist.ProcessGroup | None) -> timedelta:
    """How long a collective of the group waits for its ranks; None: of the default group."""
    explicit = distributed_c10d._get_default_group() if group is None else group
    timeout: timedelta = explicit._get_backend(explicit._device_types[0]).options._timeout
    return timeout


def default_store() -> dist.Store:
    """The store that the default group's ranks met in."""
    return distributed_c10d._get_default_store()
