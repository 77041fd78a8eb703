"""compress_ddp and Reducer on real processes: the mean, what a training loop does around it, mistakes, checkpoints."""

from __future__ import annotations

import ddp_lifetime_cases
import ddp_mean_cases
import ddp_refusal_cases
import ddp_training_cases
import pytest
import torch
from ddp_resume_cases import mean_residual, resume_cases
from rank_cases import name_of, run_cases
from rank_launch import launch, on_a_network, passed

from thinwire.lab import Network

pytestmark = [*on_a_network, pytest.mark.timeout(150)]
PRELOAD = (
    "warm", "ddp_mean_cases", "ddp_training_cases", "ddp_refusal_cases", "ddp_lifetime_cases", "ddp_resume_cases",
)  # fmt: skip
CASES = [*ddp_mean_cases.CASES, *ddp_training_cases.CASES, *ddp_refusal_cases.CASES, *ddp_lifetime_cases.CASES]


@pytest.fixture(scope="module", params=[2, 3], ids="{} ranks".format)
def ranks(request):
    with Network(hosts=request.param, preload=PRELOAD) as net:
        return launch(net, run_cases, CASES, timeout=120)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_case(ranks, case):
    passed(ranks, case)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_resumed_runs_have_the_same_bits(size, tmp_path):
    cases = resume_cases(str(tmp_path))
    with Network(hosts=size, preload=PRELOAD) as net:
        ranks = launch(net, run_cases, cases, timeout=120)
    for case in cases:
        passed(ranks, case)


def test_mean_residual_survives_another_world_size(tmp_path):
    with Network(hosts=4, preload=PRELOAD) as net:
        before = launch(net, mean_residual, str(tmp_path), False, timeout=60)[0]
    assert before.any()
    for size in (2, 3):
        with Network(hosts=size, preload=PRELOAD) as net:
            for after in launch(net, mean_residual, str(tmp_path), True, timeout=60):
                torch.testing.assert_close(after, before, rtol=0, atol=1e-7)
