"""compress_fsdp on real processes beside torch's own HSDP: two sites of two shards, other layouts, its example."""

from __future__ import annotations

import pytest
from fsdp_ranks import CASES, run_cases, run_example, run_layouts

from thinwire.lab import Network, check

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(not check()[0].ok, reason="this machine forbids network namespaces (thinwire doctor)"),
    pytest.mark.timeout(150),
]
PRELOAD = (
    "torch", "torch.distributed.checkpoint", "thinwire.data_parallel.fsdp", "thinwire.data_parallel.checkpoint",
    "sklearn.datasets",
)  # fmt: skip


@pytest.fixture(scope="module")
def sites():
    with Network(hosts=2, preload=PRELOAD) as net:
        yield lambda *words: net.run(*words, per_host=2, timeout=120, echo=False)


@pytest.fixture(scope="module")
def ranks(sites, tmp_path_factory):
    return sites(run_cases, str(tmp_path_factory.mktemp("fsdp")))


@pytest.mark.parametrize("case", [*(case.__name__ for case in CASES), "resume"])
def test_situation(ranks, case):
    for rank, found in enumerate(ranks):
        assert found[case] == [], f"rank {rank}"


@pytest.mark.parametrize("per_host, layouts", [(1, [(3, 1), (1, 3)]), (2, [(3, 2)])])
def test_layout(per_host, layouts):
    """Parameters that shards cannot share equally, some shards empty; one site alone."""
    with Network(hosts=3, preload=PRELOAD) as net:
        for rank, found in enumerate(net.run(run_layouts, *layouts, per_host=per_host, timeout=120, echo=False)):
            assert found == {layout: [] for layout in layouts}, f"rank {rank}"


def test_example(sites):
    printed = sites(run_example, "--steps", "50")[0]
    assert "compressing: True, steps skipped: 0" in printed
    assert float(printed.partition("accuracy ")[2].partition(",")[0]) > 0.7, printed
    plain = sites(run_example, "--steps", "2", "--plain")[0]
    assert "plain HSDP" in plain
