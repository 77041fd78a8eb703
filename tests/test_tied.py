"""A tied embedding's two copies: fused and separate synchronisation train the same weights, fused sends less."""

from __future__ import annotations

import functools

import pytest
from rank_cases import name_of, run_cases
from rank_launch import launch, on_a_network, passed
from tied_cases import (
    copy_that_differs_is_healed_and_counted,
    on_a_card_all_exchanges_have_one_thread_and_one_order,
    sync_trains_on_the_summed_gradients_in_the_predicted_bytes,
)

from thinwire.lab import Network

pytestmark = on_a_network
CASES = [
    functools.partial(sync_trains_on_the_summed_gradients_in_the_predicted_bytes, "fused"),
    functools.partial(sync_trains_on_the_summed_gradients_in_the_predicted_bytes, "separate"),
    copy_that_differs_is_healed_and_counted,
    on_a_card_all_exchanges_have_one_thread_and_one_order,
]


@pytest.fixture(scope="module", params=[1, 2, 4], ids="D = {}".format)
def ranks(request):
    preload = ("warm", "tied_cases")
    with Network(hosts=2 * request.param, preload=preload) as net:
        return launch(net, run_cases, CASES, timeout=100)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_case(ranks, case):
    passed(ranks, case)
