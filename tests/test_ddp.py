"""compress_ddp and Reducer on real processes: every situation of a training loop, and checkpoints."""

from __future__ import annotations

import pytest
import torch
from ddp_ranks import CASES, WIRES, mean_residual, resume, run_cases

from thinwire.lab import Network, check

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(not check()[0].ok, reason="this machine forbids network namespaces (thinwire doctor)"),
]
PRELOAD = ("torch", "torch.distributed.checkpoint", "thinwire.data_parallel.ddp", "thinwire.data_parallel.checkpoint")


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request):
    with Network(hosts=request.param, preload=PRELOAD) as net:
        yield net.run(run_cases, timeout=120, echo=False)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_situation(ranks, case):
    for rank, found in enumerate(ranks):
        assert found[case] == [], f"rank {rank}"


@pytest.mark.timeout(150)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_resume_is_bitwise(size, tmp_path):
    with Network(hosts=size, preload=PRELOAD) as net:
        for found in net.run(resume, str(tmp_path), timeout=120, echo=False):
            assert found == {name: [] for name in WIRES}


@pytest.mark.timeout(150)
def test_mean_residual_survives_another_world_size(tmp_path):
    with Network(hosts=4, preload=PRELOAD) as net:
        before = net.run(mean_residual, str(tmp_path), False, timeout=60, echo=False)[0]
    assert before.any()
    for size in (2, 3):
        with Network(hosts=size, preload=PRELOAD) as net:
            for after in net.run(mean_residual, str(tmp_path), True, timeout=60, echo=False):
                torch.testing.assert_close(after, before, rtol=0, atol=1e-7)
