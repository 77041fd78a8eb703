"""What the ranks' cases report when they fail: the first failure first, its rank and values, and no other case lost."""

from __future__ import annotations

import failing_cases
import pytest
from rank_cases import Found, name_of, run_cases
from rank_launch import launch, on_a_network, passed

from thinwire.lab import Network

pytestmark = [*on_a_network, pytest.mark.timeout(100)]


@pytest.fixture(scope="module")
def ranks() -> list[Found]:
    cases = [*failing_cases.CASES, failing_cases.sum_after_three_broken_cases]
    with Network(hosts=2, preload=("torch", "rank_cases")) as net:
        return launch(net, run_cases, cases, timeout=80)


def test_a_case_that_holds_passes(ranks):
    passed(ranks, failing_cases.sum_over_all_ranks)


@pytest.mark.parametrize(
    ("case", "first"),
    [
        (failing_cases.check_fails_on_rank_1, "rank 1: the rank is 1"),
        (failing_cases.rank_1_raises_while_rank_0_waits, "rank 1: KeyError: 'on purpose' (failing_cases.py:"),
        (failing_cases.rank_0_raises_while_rank_1_waits_in_another_group, "rank 0: KeyError: 'on purpose'"),
        (failing_cases.every_rank_raises, ": KeyError: 'on purpose'"),
        (failing_cases.sum_after_three_broken_cases, ": not run: 3 cases before it broke"),
    ],
    ids=lambda value: name_of(value) if callable(value) else "",
)
def test_the_first_failure_stands_first(ranks, case, first):
    with pytest.raises(pytest.fail.Exception) as shown:
        passed(ranks, case)
    lines = str(shown.value).splitlines()
    assert lines[0] == f"case {name_of(case)}"
    assert first in lines[1]


def test_a_refusal_that_did_not_come_or_says_something_else(ranks):
    with pytest.raises(pytest.fail.Exception) as shown:
        passed(ranks, failing_cases.nothing_is_refused)
    assert "nothing was raised, but expected UsageError with 'allowed is'" in str(shown.value)
    assert "expected an error with 'allowed is', not 'another error'" in str(shown.value)
