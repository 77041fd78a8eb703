"""What every rank of the FrozenAdam tests runs: each case returns what is wrong on this rank."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire as tw
from thinwire.codecs import Identity, ScaledSign
from thinwire.collectives import Gather, OkTopk, Quantized, TwoHop
from thinwire.collectives.groups import gather
from thinwire.data_parallel.frozen_adam import FrozenAdam
from thinwire.errors import UsageError

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


def agree(what: str, model: nn.Module) -> list[str]:
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return [f"{what}: rank {r} differs" for r, x in enumerate(gather(flat, None)) if not torch.equal(x, flat)]


def differ(what: str, a: nn.Module, b: nn.Module, tolerance: float = 0.0) -> list[str]:
    pairs = zip(a.named_parameters(), b.parameters())
    return [
        f"{what}: {name} differs by {(p - q).abs().max():.1e}"
        for (name, p), q in pairs
        if not (torch.equal(p, q) if tolerance == 0 else torch.allclose(p, q, rtol=0, atol=tolerance))
    ]


def residuals(optimizer: FrozenAdam) -> dict[str, Tensor]:
    names = {key.partition("/e/")[2]: v for key, v in optimizer.state_dict()["wire"].items() if "/e/" in key}
    return {name: names.get(name, torch.zeros_like(p)).clone() for name, p in optimizer.parameters.items()}


# --- the cases


def warmup_is_adamw() -> list[str]:
    a, b, wrong = Net(torch.float64), Net(torch.float64), []
    ours = FrozenAdam(a.named_parameters(), freeze_after=100, **SETTINGS)
    theirs = torch.optim.AdamW(b.parameters(), **SETTINGS)
    for step in range(8):
        backward(a, step)
        backward_mean(b, step)
        ours.step(), theirs.step()
        wrong += differ(f"step {step}", a, b, 1e-12)
    return wrong + (["frozen in the warm-up"] if ours.frozen else []) + agree("warm-up", a)


def frozen_is_the_formula() -> list[str]:
    """Through an exact collective: the lines of the docstring, written out."""
    a, b, warm, wrong = Net(torch.float64), Net(torch.float64), 5, []
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
        wrong += differ(f"step {t}", a, b, 1e-10)
        wrong += [] if ours.frozen == (t > warm) else [f"step {t}: frozen is {ours.frozen}"]
    return wrong


def ranks_are_bitwise_equal() -> list[str]:
    wrong = []
    for wire in (None, SIGNS, tw.Wire(gradient=tw.Reduction(OkTopk(0.2), exact_dims=0))):
        model = Net()
        optimizer = FrozenAdam(model.named_parameters(), wire=wire, freeze_after=3, **SETTINGS)
        train(model, optimizer, range(9))
        wrong += agree(str(wire), model)
        wrong += [] if any(e.any() for e in residuals(optimizer).values()) else [f"{wire}: nothing was compressed"]
    return wrong


def momentum_mass_is_conserved() -> list[str]:
    """Σ residual' + P·m = Σ (residual + β₁·m + (1−β₁)·g_i), every step: both hops' errors are repaid."""
    model, size, wrong = Net(torch.float64), dist.get_world_size(), []
    optimizer = FrozenAdam(model.named_parameters(), wire=SIGNS, freeze_after=3, **SETTINGS)
    train(model, optimizer, range(4), extra=True)
    for step in range(4, 12):
        before, old = residuals(optimizer), {n: optimizer.state[p]["exp_avg"].clone() for n, p in named(model)}
        backward(model, step, extra=True)
        optimizer.step()
        after = residuals(optimizer)
        for name, p in named(model):
            put = before[name] + 0.9 * old[name] + 0.1 * p.grad
            got = after[name].clone()
            dist.all_reduce(put), dist.all_reduce(got)
            got += size * optimizer.state[p]["exp_avg"]
            if not torch.allclose(put, got, rtol=0, atol=1e-12):
                wrong.append(f"step {step} {name}: {(put - got).abs().max():.1e}")
        wrong += [] if any(e.any() for e in after.values()) else ["nothing was left out, so nothing was tested"]
    return wrong


def named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters())


def resume_is_bitwise() -> list[str]:
    """Stopped in the warm-up, and after it."""
    wrong = []
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
            wrong += differ(f"stopped at {stop}, {freeze_after}", whole, second)
    return wrong


def nonfinite_is_skipped_by_all() -> list[str]:
    wrong, last = [], dist.get_rank() == dist.get_world_size() - 1
    for warm in (2, 50):
        model = Net()
        optimizer = FrozenAdam(model.named_parameters(), wire=SIGNS, freeze_after=warm, **SETTINGS)
        train(model, optimizer, range(5))
        before, state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
        backward(model, 5)
        if last:
            model.first.weight.grad[0, 0] = torch.inf
        optimizer.step()
        wrong += [] if optimizer.skipped and optimizer.skips == 1 else ["not skipped"]
        after = optimizer.state_dict()
        wrong += differ("a skipped step", before, model)
        wrong += [f"{n} changed" for n, v in after["wire"].items() if not torch.equal(v, state["wire"][n])]
        for index, values in after["state"].items():
            wrong += [f"{k} changed" for k, v in values.items() if not torch.equal(v, state["state"][index][k])]
        train(model, optimizer, range(6, 8))
        wrong += ["the next was skipped too"] if optimizer.skipped else agree("later", model)
    return wrong


def unused_and_first_used_late() -> list[str]:
    """A branch without a gradient in the warm-up wakes after it, and its first update is no explosion."""
    model, wrong = Net(), []
    optimizer = FrozenAdam(model.named_parameters(), wire=SIGNS, freeze_after=3, **SETTINGS)
    start = model.extra.weight.detach().clone()
    train(model, optimizer, range(6))
    wrong += [] if torch.equal(start, model.extra.weight) else ["a branch that nobody used has moved"]
    backward(model, 6, extra=dist.get_rank() == 0)
    optimizer.step()
    moved = (model.extra.weight - start).abs().max().item()
    wrong += [] if 0 < moved < 20 * SETTINGS["lr"] else [f"the first step moved it by {moved}"]
    return wrong + agree("awake", model)


def dead_coordinates_do_not_explode() -> list[str]:
    """One column of the input is zero until the variance is frozen."""
    weight = nn.Parameter(torch.zeros(4, 32))
    optimizer = FrozenAdam([("w", weight)], freeze_after=3, wire=SIGNS, lr=0.01, weight_decay=0.0)
    largest = 0.0
    for step in range(8):
        g = torch.Generator().manual_seed(step)
        weight.grad = torch.randn(4, 32, generator=g)
        weight.grad[:, 5] *= step > 3
        before = weight.detach().clone()
        optimizer.step()
        largest = max(largest, (weight - before).abs().max().item())
    return [] if largest < 1.0 else [f"a coordinate moved by {largest} in one step of rate 0.01"]


def auto_freezes_together() -> list[str]:
    model = Net()
    optimizer = FrozenAdam(model.named_parameters(), lr=1e-4, betas=(0.9, 0.9), wire=SIGNS, freeze_after="auto")
    frozen = []
    for step in range(60):
        train(model, optimizer, range(step, step + 1))
        frozen.append(optimizer.frozen)
    at = torch.tensor([frozen.index(True) if True in frozen else -1])
    same = all(torch.equal(at, other) for other in gather(at, None))
    wrong = [] if int(at) >= 10 else [f"frozen at step {int(at)}"]
    return wrong + ([] if same else ["not at the same step everywhere"]) + agree("auto", model)


def scheduler_sets_the_rate() -> list[str]:
    a, b, wrong = Net(torch.float64), Net(torch.float64), []
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
        ours.step(), theirs.step()
        for rate in rates:
            rate.step()
        wrong += differ(f"step {step}", a, b, 1e-12)
    rate = ours.param_groups[1]["lr"]
    return wrong + ([] if abs(rate - 0.002 / 7) < 1e-12 else [f"the rate is {rate}"])


def trains_as_well_as_adamw() -> list[str]:
    """Held-out loss after 300 steps, half of them warm-up: four bits within 5 % of AdamW, one bit within 30 %."""
    ends, allowed, steps = {}, {"four bits": 1.05, "one bit": 1.3}, 300
    for name in ("adamw", *allowed):
        model = Net()
        wires = {"four bits": tw.Wire(gradient=tw.Reduction(Quantized(4), exact_dims=0)), "one bit": SIGNS}
        if name == "adamw":
            optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        else:
            optimizer = FrozenAdam(model.named_parameters(), 0.01, wire=wires[name], freeze_after=150)
        rate = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
        for step in range(steps):
            (backward_mean if name == "adamw" else backward)(model, step)
            optimizer.step()
            rate.step()
        with torch.no_grad():
            ends[name] = sum(loss_of(model, 10_000 + i, 0).item() for i in range(20)) / 20
    return [f"{name}: {ends}" for name, factor in allowed.items() if ends[name] > factor * ends["adamw"]]


def mistakes_are_named() -> list[str]:
    odd, wrong = dist.get_rank() == 1, []
    for build, words in (
        (lambda: FrozenAdam(Net().parameters()), "named parameters"),
        (lambda: FrozenAdam([*Net().named_parameters(), *Net().named_parameters()]), "the same name"),
        (lambda: FrozenAdam(Net().named_parameters(), freeze_after=0), "freeze_after = 0"),
        (lambda: FrozenAdam(Net().named_parameters(), betas=(0.9, 1.0)), "betas"),
        (lambda: FrozenAdam(Net().named_parameters(), lr=-1.0), "lr = -1.0"),
        (lambda: FrozenAdam(Net().named_parameters(), freeze_after=3 + odd), "rank 1"),
    ):
        try:
            build()
            wrong.append(f"{words}: not found")
        except UsageError as error:
            wrong += [] if words in str(error) else [f"{words}: {error}"]
    return wrong


CASES = [
    warmup_is_adamw, frozen_is_the_formula, ranks_are_bitwise_equal, momentum_mass_is_conserved, resume_is_bitwise,
    nonfinite_is_skipped_by_all, unused_and_first_used_late, dead_coordinates_do_not_explode, auto_freezes_together,
    scheduler_sets_the_rate, trains_as_well_as_adamw, mistakes_are_named,
]  # fmt: skip


def run_cases() -> dict[str, list[str]]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    out = {}
    for case in CASES:
        try:
            out[case.__name__] = case()
        except Exception as error:
            out[case.__name__] = [f"{type(error).__name__}: {error}"]
    return out
