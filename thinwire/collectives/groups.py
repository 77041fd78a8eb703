"""Process groups of one's own, made by their members alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


def new_group(ranks: Sequence[int], among: Any = None, options: Any = None) -> Any:
    """A new group of these (global) ranks, all of them members of `among`; only they need to call this. `options`: the
    backend's.

    torch names such a group by its ranks and by how many groups a rank knows already: where ranks know different
    numbers, they would wait for each other for ever. So the members first agree on that number, over `among`, and
    those behind make groups of themselves alone until they have caught up.
    """
    if len(ranks) == dist.get_world_size() and list(ranks) == sorted(ranks):
        return dist.new_group(list(ranks), pg_options=options)
    known = len(c10d._world.pg_names)
    most = torch.tensor([known], device="cuda" if dist.get_backend(among) == "nccl" else "cpu")
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=among)
    for _ in range(int(most) - known):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    return dist.new_group(list(ranks), pg_options=options, use_local_synchronization=True)


def twin(group: Any) -> Any:
    """A second group of the same ranks: its order of collectives is not mixed with anybody else's."""
    return new_group(dist.get_process_group_ranks(group or dist.group.WORLD), group)
