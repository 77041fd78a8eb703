"""Process groups: how many groups this rank knows, and the store it met the others in."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import distributed_c10d

from thinwire.torch_private.versions import require

require("process groups", distributed_c10d, "_world", "_get_default_store")
require("process groups", type(distributed_c10d._world), "pg_names")


def known_groups() -> int:
    """How many groups this rank knows: torch makes the name of a new group of that number."""
    return len(distributed_c10d._world.pg_names)


def default_store() -> dist.Store:
    """The store that the default group's ranks met in."""
    return distributed_c10d._get_default_store()
