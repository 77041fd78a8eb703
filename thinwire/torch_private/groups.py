"""Process groups: how many groups this rank knows, the store it met the others in, and a group's time-out."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from thinwire.torch_private.versions import require

require("process groups", distributed_c10d, "_world", "_get_default_store", "_get_default_group")
require("process groups", type(distributed_c10d._world), "pg_map", "pg_names")
require("process groups", dist.ProcessGroup, "_device_types", "_get_backend")


def known_groups() -> int:
    """How many groups this rank knows: torch makes the name of a new group of that number."""
    return len(distributed_c10d._world.pg_names)


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
