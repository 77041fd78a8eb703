"""compress_fsdp on real processes, two sites of two shards each, beside torch's own HSDP."""

from __future__ import annotations

import pytest
from fsdp_ranks import CASES, run_cases

from thinwire.lab import Network, check

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(not check()[0].ok, reason="this machine forbids network namespaces (thinwire doctor)"),
    pytest.mark.timeout(150),
]
PRELOAD = ("torch", "torch.distributed.checkpoint", "thinwire.parallel.fsdp", "thinwire.parallel.checkpoint")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with Network(hosts=2, preload=PRELOAD) as net:
        yield net.run(run_cases, str(tmp_path_factory.mktemp("fsdp")), per_host=2, timeout=120, echo=False)


@pytest.mark.parametrize("case", [*(case.__name__ for case in CASES), "resume"])
def test_situation(ranks, case):
    for rank, found in enumerate(ranks):
        assert found[case] == [], f"rank {rank}"
