"""Collectives in a group that torch.distributed does not know, by the few things that thinwire asks of one."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from thinwire import collectives as c
from thinwire.collectives.groups import Metered, elastic, is_alone, unmetered, world
from thinwire.collectives.members import DirectMembers
from thinwire.collectives.messages import all_reduce, gather, maximum
from thinwire.distributed.values import broadcast_json, gather_json, tensors_on_first
from thinwire.errors import UsageError

SIZE = 3
LIMIT = 30.0


class Unlisted(DirectMembers):
    """A group of Gloo that was made by hand."""

    backends = "gloo"

    def __init__(self, store: dist.Store, rank: int) -> None:
        self.group = dist.ProcessGroupGloo(store, rank, SIZE, timedelta(seconds=LIMIT))

    def process_group(self) -> dist.ProcessGroup:
        return self.group


def on_members(work) -> list:
    """work(group) on SIZE threads, each a member of one group."""
    store, out = dist.HashStore(), {}

    def member(rank: int) -> None:
        out[rank] = work(Unlisted(store, rank))

    threads = [threading.Thread(target=member, args=(rank,), daemon=True) for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    return [out[rank] for rank in range(SIZE)]


def exchanges(group: Unlisted) -> list:
    """Every primitive once, directly and by the backend's own collectives (many values)."""
    rank = world(group)[1]
    few, many = torch.full((4,), float(rank)), torch.full((300_000,), float(rank))
    x = torch.randn(600, generator=torch.Generator().manual_seed(rank))
    collectives = [c.Quantized(4), c.OkTopk(0.1), c.TopkAllgather(0.1), c.LowRank(2).for_shapes([(20, 30)]), c.Dense()]
    found = [one.exchange(x, Metered(group), state={})[0] for one in collectives]
    assert all(bool(torch.isfinite(mean).all()) for mean in found)
    return [
        *found, gather(few, group)[2], all_reduce(many, group), maximum(few, group),
        broadcast_json({"from": rank}, 1, group), gather_json(rank, group),
        len(tensors_on_first({"x": few}, group)) == (SIZE if rank == 0 else 0),
    ]  # fmt: skip


def test_collectives_need_only_what_members_can_do():
    first, *others = on_members(exchanges)
    assert not dist.is_initialized()
    for found in others:
        for mine, theirs in zip(found, first, strict=True):
            assert torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs
    *_, seconds, total, most, said, ranks, arrived = first
    assert seconds.tolist() == [2.0] * 4 and most.tolist() == [2.0] * 4 and arrived
    assert total.unique().tolist() == [3.0] and said == {"from": 1} and ranks == [0, 1, 2]


def refusal(group: Unlisted) -> str:
    with pytest.raises(UsageError) as refused:
        c.Hierarchical(per_host=1).exchange(torch.ones(8), group, state={})
    assert not is_alone(group) and elastic(group) is None
    with pytest.raises(UsageError):
        unmetered(group)
    return str(refused.value)


def test_what_needs_a_group_of_torch_says_so():
    assert on_members(refusal)[0] == "Unlisted: this needs a process group of torch, whose ranks stay"
