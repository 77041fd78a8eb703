"""Collectives across real processes on the lab's network: nothing is lost, and all ranks agree to the bit."""

from __future__ import annotations

import pytest
import torch
from collective_ranks import COLLECTIVES, KINDS, conservation, gradient, group_memories, invariants, two_levels

import thinwire as tw
from thinwire import collectives as k
from thinwire.lab import Network, check

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(not check()[0].ok, reason="this machine forbids network namespaces (thinwire doctor)"),
]
PRELOAD = ("torch", "thinwire.memory.channel", "thinwire.collectives")
SHAPES = [(24, 30), (5,), (0,)]


@pytest.mark.timeout(280)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_on_real_processes(size):
    """One launch a world size: invariants, conservation, and the group memories."""
    with Network(hosts=size, preload=PRELOAD) as net:
        for wrong in net.run(invariants, SHAPES, timeout=120, echo=False):
            assert wrong == []
        for wrong in net.run(conservation, 12, timeout=120, echo=False):
            assert wrong == []
        errors = net.run(group_memories, timeout=60, echo=False)[0]
    assert errors["DCGD"][-1] > 0.2
    for name in ("DIANA", "DIANA, dither", "Rand-DIANA", "EF21", "EF21, two hops"):
        assert errors[name][-1] < 1e-3 * errors[name][0] + 1e-6, (name, errors[name][-1])


@pytest.mark.timeout(100)
def test_two_levels_on_real_processes():
    with Network(hosts=4, preload=PRELOAD) as net:
        for wrong in net.run(two_levels, timeout=60, echo=False):
            assert wrong == []


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
    (lambda: tw.Channel(3), "collective"), (lambda: k.OkTopk(0.1, scope="layer"), "scope"),
    (lambda: k.OkTopk(0.1, xi_every=-1), "xi_every"), (lambda: k.Hierarchical(k.Dense(), 3), "across"),
    (lambda: k.Hierarchical(k.Dense(), k.LowRank(2)), "matrices"),
    (lambda: k.Hierarchical(k.Dense(), k.Dense(), per_host=0), "per_host"),
])  # fmt: skip
def test_bad_settings(build, said):
    with pytest.raises(ValueError, match=said):
        build()
