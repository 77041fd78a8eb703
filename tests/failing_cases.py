"""Cases that fail on purpose, on one of two ranks: what comes back is tested in test_rank_cases.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
from rank_cases import check, refused

from thinwire.collectives.groups import new_group
from thinwire.errors import UsageError


def _sum(group: dist.ProcessGroup | None = None) -> float:
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    return float(total)


def sum_over_all_ranks() -> None:
    check(_sum() == 2, "the sum is not 2")


def check_fails_on_rank_1() -> None:
    check(dist.get_rank() != 1, f"the rank is {dist.get_rank()}")
    sum_over_all_ranks()


def rank_1_raises_while_rank_0_waits() -> None:
    if dist.get_rank() == 1:
        raise KeyError("on purpose")
    _sum()


def rank_0_raises_while_rank_1_waits_in_another_group() -> None:
    pair = new_group([0, 1], None)
    if dist.get_rank() == 0:
        raise KeyError("on purpose")
    _sum(pair)


def nothing_is_refused() -> None:
    with refused("allowed is"):
        pass
    with refused("allowed is"):
        raise UsageError("another error")


def every_rank_raises() -> None:
    raise KeyError("on purpose")


CASES = [
    sum_over_all_ranks, check_fails_on_rank_1, rank_1_raises_while_rank_0_waits,
    rank_0_raises_while_rank_1_waits_in_another_group, nothing_is_refused, every_rank_raises,
]  # fmt: skip


def sum_after_three_broken_cases() -> None:
    sum_over_all_ranks()
