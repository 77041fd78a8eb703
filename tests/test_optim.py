"""FrozenAdam on real processes and alone: the formula, conservation, agreement, resume, skipped steps."""

from __future__ import annotations

import pytest
import torch
from optim_cases import CASES, SETTINGS, Net
from rank_cases import name_of, run_cases
from rank_launch import launch, needs_network, passed

from thinwire.data_parallel.frozen_adam import FrozenAdam
from thinwire.lab import Network


@pytest.fixture(scope="module", params=[2, 3], ids="{} ranks".format)
def ranks(request):
    with Network(hosts=request.param, preload=("warm", "optim_cases")) as net:
        return launch(net, run_cases, CASES, timeout=120)


@pytest.mark.lab
@needs_network
@pytest.mark.timeout(150)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_case(ranks, case):
    passed(ranks, case)


def loss_of(model: Net, step: int) -> torch.Tensor:
    return model(torch.randn(8, 6, generator=torch.Generator().manual_seed(step))).square().mean()


def test_alone_it_is_adamw_and_then_adamw_with_its_variance_held():
    """Bitwise: the warm-up against torch, the rest against torch with exp_avg_sq put back after every step."""
    ours, theirs = Net(), Net()
    a = FrozenAdam(ours.named_parameters(), freeze_after=4, floor=0.0, **SETTINGS)
    b = torch.optim.AdamW(theirs.parameters(), foreach=False, **SETTINGS)
    for step in range(4):
        for model, optimizer in ((ours, a), (theirs, b)):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
    for p, q in zip(ours.parameters(), theirs.parameters()):
        assert torch.equal(p, q)
    held = {p: b.state[p]["exp_avg_sq"] / (1 - 0.99**4) for p in theirs.parameters() if p in b.state}
    for step in range(4, 9):
        a.zero_grad(), b.zero_grad()
        loss_of(ours, step).backward(), loss_of(theirs, step).backward()
        a.step()
        for p, v in held.items():  # what AdamW makes of it next is v again, whatever the gradient
            t = float(b.state[p]["step"]) + 1
            b.state[p]["exp_avg_sq"] = (v * (1 - 0.99**t) - 0.01 * p.grad**2) / 0.99
        b.step()
    assert a.frozen
    for p, q in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-5)


def test_a_closure_is_called_with_gradients_on():
    model = Net()
    optimizer = FrozenAdam(model.named_parameters(), lr=0.01, freeze_after=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(10)]
    assert losses[-1] < losses[0] and optimizer.frozen


def test_half_precision_parameters_keep_full_precision_state(tmp_path):
    model = Net(torch.bfloat16)
    optimizer = FrozenAdam(model.named_parameters(), lr=0.01, freeze_after=2)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 6).bfloat16()).square().mean().backward()
        optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    again = FrozenAdam(model.named_parameters(), lr=0.01, freeze_after=2)
    again.load_state_dict(torch.load(tmp_path / "state.pt"))
    p = model.first.weight
    assert again.state[p]["exp_avg"].dtype == torch.float32
    assert torch.equal(again.state[p]["exp_avg"], optimizer.state[p]["exp_avg"]) and again.frozen
