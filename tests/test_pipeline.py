"""Compressed pipeline stages on real processes: bitwise neutral with Identity, mirrored, healed, resumable."""

from __future__ import annotations

import pipeline_ranks as ranks
import pytest

from thinwire.lab import Network, check

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(not check()[0].ok, reason="this machine forbids network namespaces (thinwire doctor)"),
]
PRELOAD = ("torch", "torch.distributed.pipelining", "thinwire.parallel.pipeline")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("size", [2, 4])
def test_identity_changes_nothing(size):
    with Network(hosts=size, preload=PRELOAD) as net:
        for wrong in net.run(ranks.identity, timeout=90, echo=False):
            assert wrong == []
