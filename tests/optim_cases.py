"""Cases of the FrozenAdam tests: the formula, conservation, agreement, resume, skipped steps, mistakes."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from rank_cases import check, check_equal, check_ranks_agree, refused
from torch import Tensor, nn

import thinwire as tw
from thinwire.codecs import Identity, ScaledSign
from thinwire.collectives import Gather, OkTopk, Quantized, TwoHop
from thinwire.data_parallel.frozen_adam import FrozenAdam

EXACT = tw.Wire(gradient=tw.Reduction(Gather(Identity()), exact_dims=0))
SIGNS = tw.Wire(gradient=tw.Reduction(TwoHop(ScaledSign(block=32)), exact_dims=0, unit_mb=0.001))
SETTINGS = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1}


class Net(nn.Module):
    """A small regression; `extra` is used only where a case says so."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first, self.last, self.extra = nn.Linear(6, 24), nn.Linear(24, 2), nn.Linear(6, 2)
        g = torch.Generator().manual_seed(3)
        for p in self.parameters():
            p.data = (0.4 * torch.randn(p.shape, generator=g, dtype=torch.float64)).to(dtype)

    def forward(self, x: Tensor, extra: bool = False) -> Tensor:
        y = self.last(torch.tanh(self.first(x)))
        return y + self.extra(x) if extra else y


def loss_of(model: nn.Module, step: int, rank: int | None = None, **how: bool) -> Tensor:
    """Mean square error to a fixed function, on this rank's part of the step's batch."""
    rank = dist.get_rank() if rank is None else rank
    g = torch.Generator().manual_seed(997 * step + rank)
    dtype = next(model.parameters()).dtype
    x = torch.randn(16, 6, generator=g, dtype=torch.float64).to(dtype)
    target = torch.stack([x[:, 0] * x[:, 1], torch.sin(2 * x[:, 2])], dim=1)
    return ((model(x, **how) - target) ** 2).mean()


def backward(model: nn.Module, step: int, **how: bool) -> None:
    model.zero_grad()
    loss_of(model, step, **how).backward()


def backward_mean(model: nn.Module, step: int, **how: bool) -> None:
    """The mean gradient over all ranks, computed here alone."""
    model.zero_grad()
    size = dist.get_world_size()
    sum(loss_of(model, step, rank, **how) / size for rank in range(size)).backward()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, **how: bool) -> None:
    for step in steps:
        backward(model, step, **how)
        optimizer.step()


def check_weights(what: str, a: nn.Module, b: nn.Module, tolerance: float = 0.0) -> None:
    check_equal(what, dict(a.named_parameters()), dict(b.named_parameters()), tolerance, relative=0.0)


def residuals(optimizer: FrozenAdam) -> dict[str, Tensor]:
    names = {key.partition("/e/")[2]: v for key, v in optimizer.state_dict()["wire"].items() if "/e/" in key}
    return {name: names.get(name, torch.zeros_like(p)).clone() for name, p in optimizer.parameters.items()}


def warmup_is_adamw() -> None:
    a, b = Net(torch.float64), Net(torch.float64)
    ours = FrozenAdam(a.named_parameters(), freeze_after=100, **SETTINGS)
    theirs = torch.optim.AdamW(b.parameters(), **SETTINGS)
    for step in range(8):
        backward(a, step)
        backward_mean(b, step)
        ours.step()
        theirs.step()
        check_weights(f"step {step}", a, b, 1e-12)
    check(not ours.frozen, "frozen in the warm-up")
    check_ranks_agree("warm-up", a)


def after_freezing_it_is_the_formula() -> None:
    """Through an exact collective: the lines of the docstring, written out."""
    a, b, warm = Net(torch.float64), Net(torch.float64), 5
    ours = FrozenAdam(a.named_parameters(), freeze_after=warm, wire=EXACT, floor=1e-6, **SETTINGS)
    state = {name: [torch.zeros_like(p), torch.zeros_like(p)] for name, p in b.named_parameters()}
    lr, (beta1, beta2), decay = SETTINGS["lr"], SETTINGS["betas"], SETTINGS["weight_decay"]
    for t in range(1, 12):
        backward(a, t)
        backward_mean(b, t)
        ours.step()
        for name, p in b.named_parameters():
            if p.grad is None:
                continue
            m, v = state[name]
            m = beta1 * m + (1 - beta1) * p.grad
            v = beta2 * v + (1 - beta2) * p.grad**2 if t <= warm else v
            state[name] = [m, v]
            seen = v / (1 - beta2 ** min(t, warm))
            seen = seen.clamp(min=1e-6 * seen.mean()) if t > warm else seen
            p.data -= lr * (m / (1 - beta1**t) / (seen.sqrt() + 1e-8) + decay * p.data)
        check_weights(f"step {t}", a, b, 1e-10)
        check(ours.frozen == (t > warm), f"step {t}: frozen is {ours.frozen}")


def weights_are_bitwise_equal_on_all_ranks() -> None:
    for wire in (None, SIGNS, tw.Wire(gradient=tw.Reduction(OkTopk(0.2), exact_dims=0))):
        model = Net()
        optimizer = FrozenAdam(model.named_parameters(), wire=wire, freeze_after=3, **SETTINGS)
        train(model, optimizer, range(9))
        check_ranks_agree(str(wire), model)
        check(any(e.any() for e in residuals(optimizer).values()), f"{wire}: nothing was compressed")


def momentum_and_residuals_conserve_the_sum() -> None:
    """Σ residual' + P·m = Σ (residual + β₁·m + (1−β₁)·g_i), every step: both hops' errors are repaid."""
    model, size = Net(torch.float64), dist.get_world_size()
    optimizer = FrozenAdam(model.named_parameters(), wire=SIGNS, freeze_after=3, **SETTINGS)
    train(model, optimizer, range(4), extra=True)
    for step in range(4, 12):
        before = residuals(optimizer)
        old = {n: optimizer.state[p]["exp_avg"].clone() for n, p in model.named_parameters()}
        backward(model, step, extra=True)
        optimizer.step()
        after = residuals(optimizer)
        for name, p in model.named_parameters():
            put = before[name] + 0.9 * old[name] + 0.1 * p.grad
            got = after[name].clone()
            dist.all_reduce(put)
            dist.all_reduce(got)
            got += size * optimizer.state[p]["exp_avg"]
            lost = float((put - got).abs().max())
            check(torch.allclose(put, got, rtol=0, atol=1e-12), f"step {step} {name}: lost {lost:.1e}")
        check(any(e.any() for e in after.values()), f"step {step}: nothing was left out, so nothing was tested")


def resumed_run_has_the_same_bits() -> None:
    """Stopped in the warm-up, and after it."""
    for stop in (2, 7):
        for freeze_after in (4, "auto"):
            whole, first, second = Net(), Net(), Net()
            settings = SETTINGS | {"betas": (0.9, 0.6)} | {"wire": SIGNS, "freeze_after": freeze_after}
            train(whole, FrozenAdam(whole.named_parameters(), **settings), range(12))
            optimizer = FrozenAdam(first.named_parameters(), **settings)
            train(first, optimizer, range(stop))
            second.load_state_dict(first.state_dict())
            again = FrozenAdam(second.named_parameters(), **settings)
            again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            train(second, again, range(stop, 12))
            check_weights(f"stopped at {stop}, {freeze_after}", whole, second)


def nonfinite_gradient_on_one_rank_is_skipped_by_all() -> None:
    last = dist.get_rank() == dist.get_world_size() - 1
    for warm in (2, 50):
        model = Net()
        optimizer = FrozenAdam(model.named_parameters(), wire=SIGNS, freeze_after=warm, **SETTINGS)
        train(model, optimizer, range(5))
        before, state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
        backward(model, 5)
        if last:
            model.first.weight.grad[0, 0] = torch.inf
        optimizer.step()
        check(optimizer.skipped and optimizer.skips == 1, f"freeze_after {warm}: {optimizer.skips} skips, not 1")
        check_weights("weights after a skipped step", before, model)
        after = optimizer.state_dict()
        check_equal("wire after a skipped step", after["wire"], state["wire"])
        for index, values in after["state"].items():
            check_equal("state after a skipped step", values, state["state"][index])
        train(model, optimizer, range(6, 8))
        check(not optimizer.skipped, f"freeze_after {warm}: the next was skipped too")
        check_ranks_agree("later", model)


def branch_first_used_after_the_warmup_does_not_explode() -> None:
    """A branch without a gradient in the warm-up wakes after it, and its first update is no explosion."""
    model = Net()
    optimizer = FrozenAdam(model.named_parameters(), wire=SIGNS, freeze_after=3, **SETTINGS)
    start = model.extra.weight.detach().clone()
    train(model, optimizer, range(6))
    check(torch.equal(start, model.extra.weight), "a branch that nobody used has moved")
    backward(model, 6, extra=dist.get_rank() == 0)
    optimizer.step()
    moved = (model.extra.weight - start).abs().max().item()
    check(0 < moved < 20 * SETTINGS["lr"], f"the first step moved it by {moved}")
    check_ranks_agree("awake", model)


def coordinate_without_variance_does_not_explode() -> None:
    """One column of the input is zero until the variance is frozen."""
    weight = nn.Parameter(torch.zeros(4, 32))
    optimizer = FrozenAdam([("w", weight)], freeze_after=3, wire=SIGNS, lr=0.01, weight_decay=0.0)
    for step in range(8):
        g = torch.Generator().manual_seed(step)
        weight.grad = torch.randn(4, 32, generator=g)
        weight.grad[:, 5] *= step > 3
        before = weight.detach().clone()
        optimizer.step()
        moved = (weight - before).abs().max().item()
        check(moved < 1.0, f"a coordinate moved by {moved} in step {step} of rate 0.01")


def auto_freezes_in_the_same_step_on_all_ranks() -> None:
    model = Net()
    optimizer = FrozenAdam(model.named_parameters(), lr=1e-4, betas=(0.9, 0.9), wire=SIGNS, freeze_after="auto")
    frozen = []
    for step in range(60):
        train(model, optimizer, range(step, step + 1))
        frozen.append(optimizer.frozen)
    at = frozen.index(True) if True in frozen else -1
    check(at >= 10, f"frozen at step {at}")
    check_ranks_agree("the step of freezing", {"at": torch.tensor([at])})
    check_ranks_agree("weights", model)


def scheduler_and_groups_set_the_rate() -> None:
    a, b = Net(torch.float64), Net(torch.float64)
    groups = [{"params": list(a.first.named_parameters("first"))}, {"params": list(a.last.named_parameters("last"))}]
    groups[1]["lr"] = 0.002
    ours = FrozenAdam(groups, freeze_after=100, **SETTINGS)
    theirs = torch.optim.AdamW(
        [{"params": list(b.first.parameters())}, {"params": list(b.last.parameters()), "lr": 0.002}], **SETTINGS
    )
    rates = [torch.optim.lr_scheduler.LambdaLR(o, lambda s: 1 / (1 + s)) for o in (ours, theirs)]
    for step in range(6):
        backward(a, step)
        backward_mean(b, step)
        ours.step()
        theirs.step()
        for rate in rates:
            rate.step()
        check_weights(f"step {step}", a, b, 1e-12)
    rate = ours.param_groups[1]["lr"]
    check(abs(rate - 0.002 / 7) < 1e-12, f"the rate is {rate}")


def trains_as_well_as_adamw() -> None:
    """Held-out loss after 300 steps, half of them warm-up: four bits within 5 % of AdamW, one bit within 30 %."""
    exact = _held_out_loss(None)
    for wire, factor in ((tw.Wire(gradient=tw.Reduction(Quantized(4), exact_dims=0)), 1.05), (SIGNS, 1.3)):
        loss = _held_out_loss(wire)
        check(loss <= factor * exact, f"{wire.gradient.collective}: loss {loss} against AdamW's {exact}")


def _held_out_loss(wire: tw.Wire | None, steps: int = 300) -> float:
    """After training by FrozenAdam, or by AdamW where there is no wire."""
    model = Net()
    if wire is None:
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    else:
        optimizer = FrozenAdam(model.named_parameters(), 0.01, wire=wire, freeze_after=steps // 2)
    rate = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
    for step in range(steps):
        (backward_mean if wire is None else backward)(model, step)
        optimizer.step()
        rate.step()
    with torch.no_grad():
        return sum(loss_of(model, 10_000 + i, 0).item() for i in range(20)) / 20


def mistakes_are_named() -> None:
    odd = dist.get_rank() == 1
    for build, words in (
        (lambda: FrozenAdam(Net().parameters()), "named parameters"),
        (lambda: FrozenAdam([*Net().named_parameters(), *Net().named_parameters()]), "the same name"),
        (lambda: FrozenAdam(Net().named_parameters(), freeze_after=0), "freeze_after = 0"),
        (lambda: FrozenAdam(Net().named_parameters(), betas=(0.9, 1.0)), "betas"),
        (lambda: FrozenAdam(Net().named_parameters(), lr=-1.0), "lr = -1.0"),
        (lambda: FrozenAdam(Net().named_parameters(), freeze_after=3 + odd), "rank 1"),
    ):
        with refused(words):
            build()


CASES = [
    warmup_is_adamw,
    after_freezing_it_is_the_formula,
    weights_are_bitwise_equal_on_all_ranks,
    momentum_and_residuals_conserve_the_sum,
    resumed_run_has_the_same_bits,
    nonfinite_gradient_on_one_rank_is_skipped_by_all,
    branch_first_used_after_the_warmup_does_not_explode,
    coordinate_without_variance_does_not_explode,
    auto_freezes_in_the_same_step_on_all_ranks,
    scheduler_and_groups_set_the_rate,
    trains_as_well_as_adamw,
    mistakes_are_named,
]
