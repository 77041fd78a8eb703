"""A tied embedding by rows: the pair trains as one process does, in the bytes of the batch's rows."""

from __future__ import annotations

import functools

import pytest
from rank_cases import name_of, run_cases
from rank_launch import launch, on_a_network, passed
from tied_rows_cases import (
    coded_rows_follow_one_process,
    damaged_message_drops_the_step,
    ends_with_unlike_codecs_are_refused,
    evaluation_borrows_rows,
    exact_rows_train_as_one_process,
    mirrors_that_differ_are_found_and_healed,
    resuming_is_bitwise,
    step_with_nan_leaves_no_trace,
)

from thinwire.lab import Network

pytestmark = on_a_network
CASES = [
    functools.partial(exact_rows_train_as_one_process, True),
    functools.partial(exact_rows_train_as_one_process, False),
    coded_rows_follow_one_process,
    functools.partial(step_with_nan_leaves_no_trace, False),
    functools.partial(step_with_nan_leaves_no_trace, True),
    functools.partial(damaged_message_drops_the_step, "down"),
    functools.partial(damaged_message_drops_the_step, "up"),
    mirrors_that_differ_are_found_and_healed,
    functools.partial(resuming_is_bitwise, False),
    functools.partial(resuming_is_bitwise, True),
    evaluation_borrows_rows,
    ends_with_unlike_codecs_are_refused,
]


@pytest.fixture(scope="module", params=[1, 2], ids="D = {}".format)
def ranks(request):
    preload = ("warm", "tied_rows_cases")
    with Network(hosts=2 * request.param, preload=preload) as net:
        return launch(net, run_cases, CASES, timeout=100)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_case(ranks, case):
    passed(ranks, case)
