"""What every collective is, and how bytes move between the members of a group.

    exchange(u, group, state=…, key=…, step=…, seed=…) → (mean, own),   Σ_i own_i = P · mean

`own` is what this member's part of the mean was: the memory's residual is what is left of u without it. `state` is a
dict of tensors that the channel owns and checkpoints; a collective replaces entries and never writes into one.
`seed` is the group's; a member's own is derived from it and its rank. World size 1 needs no process group.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

State = dict[str, Tensor]


class Collective:
    def exchange(
        self, u: Tensor, group: Any = None, *, state: State, key: object = "", step: int = 0, seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


def world(group: Any) -> tuple[int, int]:
    """(members, this member's rank in the group); (1, 0) without torch.distributed."""
    if not dist.is_available() or not dist.is_initialized():
        return 1, 0
    return dist.get_world_size(group), dist.get_rank(group)


def gather(x: Tensor, group: Any) -> list[Tensor]:
    """Every member's x, in rank order; all of one shape and dtype."""
    size, _ = world(group)
    if size == 1:
        return [x]
    out = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(out, x.contiguous(), group=group)
    return out


def swap(outgoing: list[Tensor], sizes: list[int], group: Any) -> list[Tensor]:
    """Send outgoing[j] to member j and return what each sent here, sizes[j] bytes of uint8; own passes through.

    Step s sends to (r + s) mod P and receives from (r − s) mod P, so that no member is everybody's target at once
    (Ok-Topk's destination rotation). Nothing is sent where there is nothing to send.
    """
    size, rank = world(group)
    incoming = [torch.empty(n, dtype=torch.uint8, device=outgoing[rank].device) for n in sizes]
    incoming[rank] = outgoing[rank]
    operations = []
    for s in range(1, size):
        to, source = (rank + s) % size, (rank - s) % size
        if outgoing[to].numel():
            operations.append(dist.P2POp(dist.isend, outgoing[to].contiguous(), group=group, group_peer=to))
        if sizes[source]:
            operations.append(dist.P2POp(dist.irecv, incoming[source], group=group, group_peer=source))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    return incoming


def all_reduce(x: Tensor, group: Any) -> Tensor:
    """The sum over the members, in a new tensor."""
    out = x.clone()
    if world(group)[0] > 1:
        dist.all_reduce(out, group=group)
    return out
