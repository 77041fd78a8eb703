"""Collectives across real processes on the lab's network: nothing is lost, and all ranks agree to the bit."""

from __future__ import annotations

import pytest
import torch
from collective_cases import (
    CASES,
    COLLECTIVES,
    KINDS,
    SHAPES,
    gradient,
    two_levels_with_subgroups_made_by_their_members,
)
from in_process_cases import members_in_one_process_train_as_ranks_do
from rank_cases import name_of, run_cases
from rank_launch import launch, on_a_network, passed

import thinwire as tw
from thinwire import collectives as k
from thinwire.lab import Network

pytestmark = on_a_network
PRELOAD = ("warm", "collective_cases")


@pytest.fixture(scope="module", params=[2, 3, 5], ids="{} ranks".format)
def ranks(request):
    with Network(hosts=request.param, preload=PRELOAD) as net:
        return launch(net, run_cases, CASES, timeout=240)


@pytest.mark.timeout(280)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_case(ranks, case):
    passed(ranks, case)


@pytest.fixture(scope="module")
def four_ranks():
    cases = [two_levels_with_subgroups_made_by_their_members, members_in_one_process_train_as_ranks_do]
    with Network(hosts=4, preload=PRELOAD) as net:
        return launch(net, run_cases, cases, timeout=150)


@pytest.mark.timeout(190)
def test_two_levels(four_ranks):
    passed(four_ranks, two_levels_with_subgroups_made_by_their_members)


@pytest.mark.timeout(190)
def test_members_in_one_process_train_as_ranks_do(four_ranks):
    passed(four_ranks, members_in_one_process_train_as_ranks_do)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_alone_it_is_the_codec(name):
    """World size 1: own is the mean, without a process group."""
    state: dict[str, torch.Tensor] = {}
    for kind in KINDS:
        for shape in SHAPES:
            u = gradient(kind, shape, 0, 1, 0)
            mean, own = COLLECTIVES[name].exchange(u, state=state)
            assert torch.allclose(mean, own, rtol=1e-12) and mean.shape == u.shape
            state = {}


@pytest.mark.parametrize(("build", "said"), [
    (lambda: k.OkTopk(0), "density"), (lambda: k.OkTopk(0.1, tau=0), "tau"),
    (lambda: k.OkTopk(0.1, values="fp4"), "fp4"),
    (lambda: k.TopkDSA(0.1, indices="zip"), "zip"), (lambda: k.Gather(3), "codec"), (lambda: k.LowRank(0), "rank"),
    (lambda: k.AlternatingLowRank(2, factors=k.OkTopk(0.1)), "factors"),
    (lambda: tw.Channel(3), "collective"), (lambda: k.OkTopk(0.1, scope="layer"), "scope"),
    (lambda: k.OkTopk(0.1, xi_every=-1), "xi_every"), (lambda: k.Hierarchical(k.Dense(), 3), "across"),
    (lambda: k.Hierarchical(k.Dense(), k.LowRank(2)), "matrices"),
    (lambda: k.Hierarchical(k.Dense(), k.Dense(), per_host=0), "per_host"),
])  # fmt: skip
def test_bad_settings(build, said):
    with pytest.raises(ValueError, match=said):
        build()
