"""A tied embedding's two copies: fused and separate synchronisation train the same weights, fused sends less."""

from __future__ import annotations

import math

import pytest
import torch
from tied_ranks import RATE, STEPS, VALUES, everything, gradient

from thinwire.lab import Network, check

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(not check()[0].ok, reason="this machine forbids network namespaces (thinwire doctor)"),
]
V = 4 * math.prod(VALUES)  # bytes


@pytest.fixture(scope="module", params=[1, 2, 4], ids="D = {}".format)
def ranks(request):
    with Network(hosts=2 * request.param, preload=("torch", "thinwire.data_parallel.tied_embedding")) as net:
        return list(net.run(everything, timeout=100, echo=False))


def test_fused_and_separate_give_the_same_weights(ranks):
    """Both: w − rate · (mean over replicas of the sum over the two stages), to 1e-6; all copies to the bit."""
    replicas = len(ranks) // 2
    expected = torch.ones(VALUES, dtype=torch.float64)
    for step in range(STEPS):
        expected -= RATE * sum(gradient(step, r).double() for r in range(len(ranks))) / replicas
    for sync in ("fused", "separate"):
        weights = [rank[sync]["weight"] for rank in ranks]
        assert all(torch.equal(w, weights[0]) for w in weights)
        assert torch.allclose(weights[0].double(), expected, rtol=0, atol=1e-6), (sync, replicas)


def test_bytes_fall_as_predicted(ranks):
    """V(3D−2)/D → V(2D−1)/D a rank and step: by the group's counter, and by what really left the hosts."""
    replicas = len(ranks) // 2
    predicted = {"separate": V * (3 * replicas - 2) / replicas, "fused": V * (2 * replicas - 1) / replicas}
    for sync, each in predicted.items():
        assert all(rank[sync]["sent"] == pytest.approx(STEPS * each, rel=1e-4) for rank in ranks)
        crossed = sum(rank[sync]["crossed"] for rank in ranks) / len(ranks)
        assert crossed == pytest.approx(STEPS * each, rel=0.06), (sync, replicas, crossed / (STEPS * each))


def test_a_copy_that_differs_is_healed_and_counted(ranks):
    for rank in ranks:
        assert rank["healed"] == [(True, 0, 1.0, 2.0), (False, 1, 1.0, 2.0), (True, 1, 1.0, 2.0)]
