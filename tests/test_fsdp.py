"""compress_fsdp on real processes beside torch's own HSDP: two sites of two shards, other layouts, its example."""

from __future__ import annotations

import functools

import fsdp_hsdp_cases
import fsdp_state_cases
import pytest
import titan_cases
from fsdp_hsdp_cases import gradients_are_those_of_the_collective_alone, tied_checkpointed_accumulated_clipped_together
from fsdp_state_cases import resumed_run_has_the_same_bits
from fsdp_support import WIRES, make_mesh, run_example
from rank_cases import name_of, run_cases
from rank_launch import launch, on_a_network, passed

from thinwire.lab import Network

pytestmark = [*on_a_network, pytest.mark.timeout(150)]
PRELOAD = (
    "warm", "thinwire.data_parallel.fsdp", "thinwire.data_parallel.checkpoint", "thinwire.parallel.titan",
    "sklearn.datasets",
)  # fmt: skip
CASES = [*fsdp_hsdp_cases.CASES, *fsdp_state_cases.CASES, *titan_cases.CASES]


@pytest.fixture(scope="module")
def sites():
    with Network(hosts=2, preload=PRELOAD) as net:
        yield functools.partial(launch, net, timeout=120, per_host=2)


@pytest.fixture(scope="module")
def ranks(sites):
    return sites(run_cases, CASES, functools.partial(make_mesh, 2, 2))


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_case(ranks, case):
    passed(ranks, case)


def test_resumed_runs_have_the_same_bits(sites, tmp_path):
    cases = [functools.partial(resumed_run_has_the_same_bits, name, str(tmp_path)) for name in WIRES]
    ranks = sites(run_cases, cases, functools.partial(make_mesh, 2, 2))
    for case in cases:
        passed(ranks, case)


@pytest.mark.parametrize(("per_host", "layouts"), [(1, [(3, 1), (1, 3)]), (2, [(3, 2)])])
def test_layout(per_host, layouts):
    """Sites and shards: parameters that shards cannot share equally, some shards empty; one site alone."""
    with Network(hosts=3, preload=PRELOAD) as net:
        for sites, shards in layouts:
            cases = [tied_checkpointed_accumulated_clipped_together]
            if sites > 1:
                cases.append(gradients_are_those_of_the_collective_alone)
            mesh = functools.partial(make_mesh, sites, shards)
            ranks = launch(net, run_cases, cases, mesh, timeout=120, per_host=per_host)
            for case in cases:
                passed(ranks, case)


def test_example(sites):
    printed = sites(run_example, "--steps", "50")[0]
    assert "compressing: True, steps skipped: 0" in printed
    assert float(printed.partition("accuracy ")[2].partition(",")[0]) > 0.7, printed
    plain = sites(run_example, "--steps", "2", "--plain")[0]
    assert "plain HSDP" in plain
