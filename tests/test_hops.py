"""In how many hops coded values are averaged."""

from __future__ import annotations

import pytest
import torch
from thread_group import run

from thinwire import collectives as c
from thinwire.codecs import Quantize


@pytest.mark.parametrize("size", [2, 3])
def test_hops_are_what_was_said(size):
    """One hop has the bits of a gather, whatever the number of members; two hops code twice, also between two."""

    def work(rank: int) -> list[torch.Tensor]:
        u = torch.randn(300, generator=torch.Generator().manual_seed(rank))
        ways = c.Gather(Quantize(4)), c.Quantized(4, hops=1), c.Quantized(4, hops=2), c.Quantized(4)
        return [way.exchange(u, state={}, seed=1)[0] for way in ways]

    gathered, one, two, usual = run(size, work)[0][0]
    assert torch.equal(one, gathered) and not torch.equal(two, gathered)
    assert torch.equal(usual, one if size == 2 else two)
