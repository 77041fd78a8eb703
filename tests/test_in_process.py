"""Members in one process: what they exchange, what happens when one fails, or all wait. test_collectives.py compares
them with real ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from in_process_cases import METHODS, trained

from thinwire.collectives.in_process import InProcess, InProcessGroup, MemberStopped
from thinwire.collectives.messages import swap


@pytest.mark.parametrize("name", METHODS)
def test_members_end_with_equal_weights(name):
    found = InProcessGroup(3).run(lambda member: trained(name, member, steps=20))
    assert all(torch.equal(found[0][0], weights) and sent > 0 for weights, sent in found)


def test_operations_of_a_group():
    def work(member: InProcess) -> list:
        size, rank = member.world()
        x = torch.tensor([float(rank), -float(rank)])
        out = [torch.empty(2) for _ in range(size)]
        member.all_gather(out, x)
        total, most = x.clone(), x.clone()
        member.all_reduce(total)
        member.all_reduce(most, dist.ReduceOp.MAX)
        member.broadcast(x, 2)
        outgoing = [torch.full((j,), 10 * rank + j, dtype=torch.uint8) for j in range(size)]
        return [[o.tolist() for o in out], total.tolist(), most.tolist(), x.tolist(),
                [m.tolist() for m in swap(outgoing, [rank] * size, member)]]  # fmt: skip

    for rank, (gathered, total, most, told, swapped) in enumerate(InProcessGroup(3).run(work)):
        assert gathered == [[0, 0], [1, -1], [2, -2]] and total == [3, -3] and most == [2, 0] and told == [2, -2]
        assert swapped == [[10 * j + rank] * rank for j in range(3)]


def test_a_buffer_may_change_after_it_was_sent():
    def work(member: InProcess) -> float:
        x = torch.ones(1)
        if member.rank == 0:
            member.isend(x, 1).wait()
            x.zero_()
        else:
            x.zero_()
            member.irecv(x, 0).wait()
        return float(x)

    assert InProcessGroup(2).run(work) == [0.0, 1.0]


def test_an_error_of_one_member_ends_all():
    def work(member: InProcess) -> None:
        if member.rank == 1:
            raise KeyError("on purpose")
        member.all_reduce(torch.ones(1))

    group = InProcessGroup(3)
    with pytest.raises(KeyError, match="on purpose"):
        group.run(work)
    assert group.run(lambda member: member.rank) == [0, 1, 2]  # and the next run starts anew


def test_members_that_all_wait_are_found_at_once():
    def work(member: InProcess) -> None:
        member.irecv(torch.empty(1), 1 - member.rank).wait()

    with pytest.raises(MemberStopped, match="waits for a message of member"):
        InProcessGroup(2).run(work)


def test_a_member_that_leaves_early_is_found():
    def work(member: InProcess) -> None:
        if member.rank == 0:
            member.all_reduce(torch.ones(1))

    with pytest.raises(MemberStopped, match="the others' part of a collective"):
        InProcessGroup(2).run(work)
