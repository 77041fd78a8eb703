"""The models of `thinwire bench scratch`, and what trains them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from thinwire.bench.scratch.model import first_hidden, stages_of
from thinwire.bench.scratch.optimisers import EMBEDDING, TABLE, Muon, Optimisers, relative_rates
from thinwire.bench.scratch.options import YARDSTICK, Scratch
from thinwire.bench.scratch.rows import row_of
from thinwire.bench.scratch.training import bounded_stages

SETUP = Scratch(stages=3, width=32, length=16, vocabulary=256, model=YARDSTICK)


def output(stages: list[nn.Module], ids: torch.Tensor) -> torch.Tensor:
    return nn.Sequential(*stages)(ids)


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (8, 8)])
def test_muon_is_torch_s(shape):
    """Two matrices together against torch's, one after the other, over three steps."""
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape)) for _ in range(2)]
    began = [one.detach().clone() for one in ours]
    theirs = [nn.Parameter(one.clone()) for one in began]
    rate = torch.tensor(0.02)
    muon = Muon(ours, rate)
    other = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.05, momentum=0.95, nesterov=True)
    for _ in range(3):
        for one, same in zip(ours, theirs):
            one.grad = torch.randn(shape)
            same.grad = one.grad.clone()
        muon.step()
        other.step()
    for one, same, old in zip(ours, theirs, began):
        off = (one - same).detach().norm() / (same - old).detach().norm()
        assert float(off) < 0.03, "torch's is in bfloat16"


def test_the_yardstick_s_model_is_causal_and_begins_as_nothing():
    stages = stages_of(SETUP, 0)
    ids = torch.randint(256, (2, 16))
    assert torch.equal(output(stages, ids), torch.zeros(2, 16, 256))
    assert torch.allclose(output(stages[:2], ids), first_hidden(stages)[ids])
    optimiser = Optimisers(SETUP, stages)
    for _ in range(3):
        optimiser.zero_grad()
        nn.functional.cross_entropy(output(stages, ids).flatten(0, 1), ids.flatten()).backward()
        optimiser.set_rate(0.02)
        optimiser.step()
    changed = ids.clone()
    changed[:, 9:] += 1
    changed %= 256
    same, other = output(stages, ids), output(stages, changed)
    assert torch.allclose(same[:, :9], other[:, :9], atol=1e-5) and not torch.allclose(same[:, 9:], other[:, 9:])
    assert float(same.abs().max()) <= 15


def test_every_parameter_is_trained_by_one_optimiser():
    stages = bounded_stages(row_of("bf16 of 0.5"), SETUP, 0)
    rates = relative_rates(stages)
    trained = {id(one) for stage in stages for one in stage.trained()}
    assert {id(one) for one, _ in rates} == trained and len(rates) == len(trained)
    by_shape = {tuple(one.shape): rate for one, rate in rates if rate in (EMBEDDING, TABLE)}
    assert by_shape == {(256, 32): TABLE} or by_shape == {(256, 32): EMBEDDING}
    assert sum(rate == 1.0 for _, rate in rates) == 3 * 6


def test_tables_let_a_model_begin_as_it_would_without_boundaries():
    ids = torch.randint(256, (2, 16))
    plain, bounded = stages_of(SETUP, 0), bounded_stages(row_of("bf16 of 0.25"), SETUP, 0)
    x = y = ids
    for index in range(2):
        x, y = plain[index](x), bounded[index](y, tokens=ids)
        assert y.shape[-1] == 8
    assert torch.allclose(bounded[2]._enter(y, ids), x, atol=1e-5)
