"""What every rank of the DDP tests runs: each case returns what is wrong on this rank."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.distributed_c10d import _world
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from thinwire.collectives import Dense, LowRank, OkTopk, Quantized
from thinwire.collectives.groups import gather, new_group
from thinwire.data_parallel import auto_switch as auto_module
from thinwire.data_parallel.reducer import Reducer
from thinwire.errors import UsageError
from thinwire.parallel import compress_ddp, read_state
from thinwire.train.tune.links import exchanges


class Net(nn.Module):
    """Two branches; which are used is for the case to say."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(7)
        self.first, self.left, self.right = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm, self.last = nn.LayerNorm(16), nn.Linear(16, 3)
        self.to(dtype)
        for p in self.parameters():
            p.data = (torch.randn(p.shape, generator=g, dtype=torch.float64) * 0.3).to(dtype)

    def forward(self, x: Tensor, branches: str = "lr") -> Tensor:
        h = torch.tanh(self.first(x))
        h = h + sum((getattr(self, {"l": "left", "r": "right"}[b])(h) for b in branches), torch.zeros_like(h))
        return self.last(self.norm(h))


def batch(step: int, rank: int | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    rank = dist.get_rank() if rank is None else rank
    g = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 12, generator=g, dtype=torch.float64).to(dtype)


def loss_of(model: nn.Module, x: Tensor, **how: str) -> Tensor:
    return (model(x, **how) ** 2).mean() + model(x, **how).abs().mean()


def wrap(model: nn.Module | None = None, **settings: object) -> DDP:
    return DDP(model or Net(), bucket_cap_mb=0.002, **settings)  # several buckets


SPARSE = tw.Wire(gradient=tw.Reduction(OkTopk(0.1, tau=4, tau_prime=3), exact_dims=0, unit_mb=0.0012))


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    module = model.module if isinstance(model, DDP) else model
    return {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}


def dense(step: int, accumulate: int = 1, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The mean gradient over all ranks, computed here alone."""
    model, size = Net(dtype), dist.get_world_size()
    for rank in range(size):
        for i in range(accumulate):
            (loss_of(model, batch(step + 50 * i, rank, dtype)) / size).backward()
    return {n: p.grad for n, p in model.named_parameters()}


def differ(what: str, a: dict[str, Tensor | None], b: dict[str, Tensor | None], tolerance: float = 0.0) -> list[str]:
    wrong = []
    for name in a:
        x, y = a[name], b[name]
        if (x is None) != (y is None):
            wrong.append(f"{what}: {name} is None on one side only")
        elif x is not None and not (torch.equal(x, y) if tolerance == 0 else torch.allclose(x, y, atol=tolerance)):
            wrong.append(f"{what}: {name} differs by {(x - y).abs().max():.2e}")
    return wrong


def agree(what: str, model: nn.Module) -> list[str]:
    """Bitwise equal on all ranks?"""
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return [f"{what}: rank {r} differs" for r, x in enumerate(gather(flat, None)) if not torch.equal(x, flat)]


def backward(model: nn.Module, step: int, **how: str) -> None:
    model.zero_grad()
    loss_of(model, batch(step), **how).backward()


# --- the cases


def exact_is_plain_ddp() -> list[str]:
    model, wrong = wrap(), []
    compress_ddp(model, Dense())
    for step in range(3):
        backward(model, step)
        wrong += differ(f"step {step}", gradients(model), dense(step), 1e-5)
    return wrong


def everything_selected_is_dense() -> list[str]:
    model, wrong = wrap(), []
    compress_ddp(model, tw.Wire(gradient=tw.Reduction(OkTopk(1.0), exact_dims=0)))
    for step in range(3):
        backward(model, step)
        wrong += differ(f"step {step}", gradients(model), dense(step), 1e-4)
    return wrong


def buckets_do_not_matter() -> list[str]:
    """Through DDP's buckets, rebuilt after the first step, and by the Reducer alone: the same bits."""
    wrong = []
    for wire in (SPARSE, tw.Wire(gradient=LowRank(2)), tw.Wire(gradient=Quantized(4))):
        model, alone = wrap(), Net()
        compress_ddp(model, wire)
        reducer = Reducer(alone.named_parameters(), wire)
        for step in range(5):
            backward(model, step)
            backward(alone, step)
            reducer.finish()
            wrong += differ(f"{wire.gradient.collective} step {step}", gradients(model), gradients(alone))
        reducer.close()
    return wrong


def order_of_ready_does_not_matter() -> list[str]:
    a, b = Net(), Net()
    one, two = Reducer(a.named_parameters(), SPARSE), Reducer(b.named_parameters(), SPARSE)
    wrong = []
    for step in range(4):
        backward(a, step)
        backward(b, step)
        units = two.units if (dist.get_rank() + step) % 2 else two.units[::-1]
        for unit in units[: 1 + dist.get_rank() % len(units)]:
            two.ready(unit)
        one.finish(), two.finish()
        wrong += differ(f"step {step}", gradients(a), gradients(b))
    one.close(), two.close()
    return wrong if len(two.units) > 2 else ["the test wants several units"]


def conservation() -> list[str]:
    """Σ residual' + P·mean = Σ (residual + gradient), every step."""
    size, wrong = dist.get_world_size(), []
    model = wrap(Net(torch.float64))
    handle, alone = compress_ddp(model, SPARSE), Net(torch.float64)
    before = {n: torch.zeros_like(p) for n, p in alone.named_parameters()}
    for step in range(12):
        model.zero_grad(), alone.zero_grad()
        loss_of(model, batch(step, dtype=torch.float64)).backward()
        loss_of(alone, batch(step, dtype=torch.float64)).backward()
        state = {k.partition("/")[2]: v for k, v in handle.state_dict().items()}
        for (name, p), q in zip(model.module.named_parameters(), alone.parameters()):
            kept = state[f"e/{name}"].clone()
            put, got = before[name] + q.grad, kept + p.grad
            before[name] = kept
            for x in (put, got):
                dist.all_reduce(x)
            if not torch.allclose(put, got, atol=1e-12 * size):
                wrong.append(f"step {step} {name}: {(put - got).abs().max():.1e}")
        if not any(v.any() for k, v in state.items() if k.startswith("e/")):
            wrong.append("nothing was left out, so nothing was tested")
    return wrong


def accumulation() -> list[str]:
    """Three backwards, one exchange, of their sum."""
    model, wrong = wrap(), []
    handle = compress_ddp(model, tw.collectives.Gather(tw.codecs.Identity()))
    for step in range(2):
        model.zero_grad()
        for i in range(3):
            with model.no_sync() if i < 2 else contextlib.nullcontext():
                loss_of(model, batch(step + 50 * i)).backward()
        wrong += differ(f"step {step}", gradients(model), dense(step, accumulate=3), 1e-5)
    made = handle.reducer.exchange.steps
    return wrong + ([] if made == 2 else [f"{made} exchanges in two steps: no_sync was ignored"])


def clipping() -> list[str]:
    model = wrap()
    compress_ddp(model, SPARSE)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        backward(model, step)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    return agree("clipped", model) + ([] if norm > 0.05 else ["nothing was clipped"])


def loss_scale() -> list[str]:
    """A scale that changes every step changes nothing: residuals are kept in the gradient's own unit."""

    class Scaler:
        scale = 1.0

        def get_scale(self) -> float:
            return self.scale

    plain, scaled, scaler = wrap(), wrap(), Scaler()
    compress_ddp(plain, SPARSE), compress_ddp(scaled, SPARSE, scaler=scaler)
    wrong = []
    for step in range(6):
        scaler.scale = 2.0 ** (step % 3 + 5)
        backward(plain, step)
        scaled.zero_grad()
        (loss_of(scaled, batch(step)) * scaler.scale).backward()
        unscaled = {n: g / scaler.scale for n, g in gradients(scaled).items() if g is not None}
        wrong += differ(f"step {step}", unscaled, gradients(plain))
    return wrong


def grad_scaler_and_autocast() -> list[str]:
    model = wrap()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    handle = compress_ddp(model, SPARSE, scaler=scaler)
    optimizer, start = torch.optim.AdamW(model.parameters(), 1e-2), None
    for step in range(8):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, batch(0))
        broken = step == 3 and dist.get_rank() == dist.get_world_size() - 1
        scaler.scale(loss * torch.inf if broken else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        start = start or loss.item()
    wrong = agree("scaled", model)
    wrong += [] if handle.skips == 1 else [f"{handle.skips} steps were skipped, not one"]
    return wrong + ([] if loss.item() < start else [f"loss rose from {start} to {loss.item()}"])


def unused_parameters() -> list[str]:
    """One branch used by one rank only, then by nobody: DDP leaves .grad alone, and the residual waits."""
    wrong = []
    for settings in ({"find_unused_parameters": True},):
        model = wrap(**settings)
        handle = compress_ddp(model, SPARSE)
        backward(model, 0)
        backward(model, 1, branches="lr" if dist.get_rank() == 0 else "l")
        if model.module.right.weight.grad is None:
            wrong.append("a branch used by rank 0 got no gradient")
        kept = [handle.state_dict()[f"rank{dist.get_rank()}of{dist.get_world_size()}/e/right.weight"].clone()]
        model.zero_grad(set_to_none=True)
        loss_of(model, batch(2), branches="l").backward()
        if model.module.right.weight.grad is not None:
            wrong.append("a branch that nobody used got a gradient")
        kept.append(handle.state_dict()[f"rank{dist.get_rank()}of{dist.get_world_size()}/e/right.weight"])
        wrong += [] if torch.equal(*kept) and kept[0].any() else ["the residual of an unused branch was spent"]
    return wrong


def static_graph() -> list[str]:
    a, b, wrong = wrap(static_graph=True), wrap(), []
    compress_ddp(a, SPARSE), compress_ddp(b, SPARSE)
    for step in range(4):
        backward(a, step)
        backward(b, step)
        wrong += differ(f"step {step}", gradients(a), gradients(b))
    return wrong


def frozen() -> list[str]:
    """A frozen layer is none of our business; one frozen in mid-run keeps its residual and wakes with it."""
    net, wrong = Net(), []
    net.left.requires_grad_(False)
    model = wrap(net, find_unused_parameters=True)
    handle = compress_ddp(model, SPARSE)
    prefix = f"rank{dist.get_rank()}of{dist.get_world_size()}/e/"
    backward(model, 0)
    if f"{prefix}left.weight" in handle.state_dict() or net.left.weight.grad is not None:
        wrong.append("a frozen layer has state or a gradient")
    kept = handle.state_dict()[f"{prefix}right.weight"].clone()
    net.right.requires_grad_(False)
    backward(model, 1)
    if not torch.equal(kept, handle.state_dict()[f"{prefix}right.weight"]):
        wrong.append("a layer frozen in mid-run lost its residual")
    net.right.requires_grad_(True)
    backward(model, 2)
    return wrong + ([] if net.right.weight.grad is not None else ["the layer did not wake"])


def unfrozen_and_wrapped_again() -> list[str]:
    """LoRA style: more parameters train later. The new units take over the residuals of the old ones by name."""
    net, wrong = Net(), []
    net.first.requires_grad_(False)
    model = wrap(net)
    handle = compress_ddp(model, SPARSE)
    for step in range(3):
        backward(model, step)
    state = handle.state_dict()
    handle.close()
    net.first.requires_grad_(True)
    model = wrap(net)
    second = compress_ddp(model, SPARSE)
    second.load_state_dict(state)
    prefix = f"rank{dist.get_rank()}of{dist.get_world_size()}/e/"
    for name in ("left.weight", "last.bias"):
        if not torch.equal(state[prefix + name], second.state_dict()[prefix + name]):
            wrong.append(f"{name} lost its residual")
    backward(model, 3)
    return wrong + agree("gradients", _as_module(gradients(model)))


def _as_module(tensors: dict[str, Tensor | None]) -> nn.Module:
    return nn.ParameterList([nn.Parameter(t) for t in tensors.values() if t is not None])


def groups_of_ranks_that_know_unlike_many() -> list[str]:
    rank = dist.get_rank()
    if rank == 0:
        for _ in range(2):
            dist.new_group([0], use_local_synchronization=True)
    pair = new_group([0, 1] if rank < 2 else [rank], dist.group.WORLD)
    total = torch.tensor([rank + 1])
    dist.all_reduce(total, group=pair)
    return [] if int(total) == (3 if rank < 2 else rank + 1) else [f"the pair's sum is {int(total)}"]


def several_models_and_groups() -> list[str]:
    size, rank, wrong = dist.get_world_size(), dist.get_rank(), []
    half = dist.new_group(list(range(size // 2 or 1))), dist.new_group(list(range(size // 2 or 1, size)))
    mine = half[0] if rank < (size // 2 or 1) else half[1]
    a, b, c = wrap(), wrap(), wrap(process_group=mine)
    for model in (a, b, c):
        compress_ddp(model, tw.Wire(gradient=tw.Reduction(OkTopk(1.0), exact_dims=0)))
    for step in range(2):
        loss = loss_of(a, batch(step)) + 2 * loss_of(b, batch(step)) + loss_of(c, batch(step))
        for model in (a, b, c):
            model.zero_grad()
        loss.backward()
        wrong += differ("first", gradients(a), dense(step), 1e-5)
        wrong += differ("second", gradients(b), {n: 2 * g for n, g in dense(step).items()}, 1e-5)
        flat = torch.cat([g.reshape(-1) for g in gradients(c).values() if g is not None])
        wrong += [] if all(torch.equal(flat, x) for x in gather(flat, mine)) else ["the group's ranks differ"]
        everyone = gather(flat, None)
        same = [torch.equal(flat, x) for x in everyone]
        wrong += [] if size < 3 or not all(same) else ["two groups agree, so the group was ignored"]
    return wrong


def exclusions() -> list[str]:
    model, wrong = wrap(), []
    compress_ddp(model, tw.Wire(gradient=tw.Reduction(OkTopk(0.02), exclude=("left.*",), exact_dims=1)))
    for step in range(3):
        backward(model, step)
        got, exact = gradients(model), dense(step)
        kept = {n for n in got if n.startswith("left.") or got[n].dim() == 1}
        wrong += differ(f"step {step}", {n: got[n] for n in kept}, {n: exact[n] for n in kept}, 1e-6)
        if torch.allclose(got["first.weight"], exact["first.weight"], atol=1e-6):
            wrong.append("first.weight was not compressed, so nothing was tested")
    return wrong


def nonfinite() -> list[str]:
    """NaN on one rank: all ranks roll back, gradients are NaN (or zero), and the next step is as if it had not been."""
    last, wrong = dist.get_rank() == dist.get_world_size() - 1, []
    for option in ("nan", "zero"):
        model = wrap()
        handle = compress_ddp(model, SPARSE, nonfinite=option)
        for step in range(3):
            backward(model, step)
        before = handle.state_dict()
        model.zero_grad()
        (loss_of(model, batch(3)) * (torch.nan if last else 1.0)).backward()
        flat = torch.cat([g.reshape(-1) for g in gradients(model).values() if g is not None])
        good = flat.isnan().all() if option == "nan" else not flat.any()
        wrong += [] if good else [f"{option}: gradients are {flat[:3]}"]
        wrong += [] if handle.skipped and handle.skips == 1 else ["the step was not skipped"]
        after = handle.state_dict()
        changed = [n for n in before if not n.endswith("/step") and not torch.equal(before[n], after[n])]
        wrong += [f"{option}: the rolled back step changed {changed[:2]}"] if changed else []
        backward(model, 4)
        wrong += ["the next step was skipped too"] if handle.skipped else agree("later", _as_module(gradients(model)))
    return wrong


def bracket() -> list[str]:
    """An exception inside `step` drops what was written; without one it is kept."""
    model, wrong = wrap(), []
    handle = compress_ddp(model, SPARSE)
    backward(model, 0)
    before = handle.state_dict()
    try:
        with handle.step():
            backward(model, 1)
            raise KeyError("on purpose")
    except KeyError:
        pass
    changed = [n for n, v in handle.state_dict().items() if "/e/" in n and not torch.equal(v, before[n])]
    wrong += [f"dropped, but changed: {changed[:2]}"] if changed else []
    with handle.step():
        backward(model, 2)
    changed = [n for n, v in handle.state_dict().items() if "/e/" in n and not torch.equal(v, before[n])]
    return wrong + ([] if changed else ["kept, but nothing changed"])


def warmup() -> list[str]:
    model, wrong = wrap(), []
    handle = compress_ddp(model, tw.Wire(gradient=tw.Reduction(OkTopk(0.02), warmup=2)))
    for step in range(4):
        backward(model, step)
        off = differ(f"step {step}", gradients(model), dense(step), 1e-5)
        wrong += off if step < 2 else [] if off else [f"step {step} was not compressed"]
    return wrong + ([] if handle.compressing else ["the warm-up does not end"])


def auto() -> list[str]:
    """On a clock on which compression loses (then wins), it is turned off (stays on), and debts are repaid."""
    wrong = []
    for loses in (True, False):
        model = wrap()
        handle = compress_ddp(model, tw.Wire(gradient=SPARSE.gradient, auto=True))
        seconds = [0.0]

        def clock(handle=handle, seconds=seconds, loses=loses) -> float:
            seconds[0] += 2.0 if loses == handle.compressing and handle.auto.passes > 0 else 1.0
            return seconds[0]

        auto_module.time = type("Clock", (), {"perf_counter": staticmethod(clock)})
        total = {n: torch.zeros_like(p) for n, p in model.module.named_parameters()}
        sent = {n: torch.zeros_like(p) for n, p in model.module.named_parameters()}
        steps = len(handle.auto.plan) + 2
        for step in range(steps):
            backward(model, step)
            for n, g in gradients(model).items():
                sent[n] += g
            for n, g in dense(step).items():
                total[n] += g
        wrong += [] if handle.compressing is not loses else [f"loses={loses}, yet compressing={handle.compressing}"]
        if loses:
            wrong += differ("debts", sent, total, 1e-5)
            handle.reducer.step_state.skipped = True  # as after a trial step with NaN
            backward(model, steps)
            wrong += ["an exact step is called skipped"] if handle.skipped else []
    return wrong


def mismatch() -> list[str]:
    """A rank that is configured otherwise is named, with the field, on every rank, at once."""
    odd, wrong = dist.get_rank() == 1, []
    for build, field in (
        (lambda: Reducer(Net().named_parameters(), OkTopk(0.1 if odd else 0.2)), "gradient.collective.density"),
        (lambda: Reducer(Net().named_parameters(), tw.Wire(gradient=tw.Reduction(Dense(), warmup=int(odd)))), "warmup"),
        (lambda: Reducer(list(Net().named_parameters())[odd:], Dense()), "parameter first.weight"),
        (lambda: Reducer(Net().named_parameters(), Dense(), seed=int(odd)), "seed"),
        (lambda: Reducer(Net(torch.float64 if odd else torch.float32).named_parameters(), Dense()), "torch.float64"),
        (lambda: tw.all_reduce({"b" if odd else "a": torch.ones(3)}, SPARSE), "parameter a"),
        (lambda: tw.all_reduce({"a": torch.ones(3 + odd)}, "off"), "parameter a: (4,)"),
        (lambda: tw.all_reduce({"a": torch.ones(3)}, Quantized(4 + odd)), "collective.codec.bits"),
    ):
        try:
            build()
            wrong.append(f"{field}: not found")
        except UsageError as error:
            if "rank 1" not in str(error) or field not in str(error):
                wrong.append(f"{field}: {error}")
    return wrong


def once_a_model() -> list[str]:
    """A second call, or one after another hook, is refused before it has changed anything."""
    model, hooked, wrong = wrap(), wrap(), []
    handle = compress_ddp(model, SPARSE)
    hooked.register_comm_hook(None, default_hooks.fp16_compress_hook)
    groups = len(_world.pg_map)
    for ddp, words in ((model, "is compressed already: call it once"), (hooked, "a communication hook already")):
        try:
            compress_ddp(ddp, "off")
            wrong.append(f"{words}: not refused")
        except UsageError as error:
            wrong += [] if words in str(error) and "\n" not in str(error) else [str(error)]
    backward(model, 0)
    wrong += [] if handle.compressing and handle.sent else ["the first call's handle does not work any more"]
    return wrong + ([] if len(_world.pg_map) == groups else ["the second call made a process group"])


def nothing_or_empty() -> list[str]:
    """No parameter is one clear error; an empty one among others is reduced like any."""
    try:
        Reducer([("frozen", nn.Parameter(torch.ones(2), requires_grad=False))], Dense())
        return ["no parameter was accepted"]
    except UsageError as error:
        wrong = [] if "nothing to reduce" in str(error) else [str(error)]
    for wire in (SPARSE, tw.Wire(gradient=LowRank(2)), tw.Wire(gradient=Quantized(4))):
        empty, full = nn.Parameter(torch.empty(0, 4)), nn.Parameter(torch.zeros(6, 4))
        reducer = Reducer([("empty", empty), ("full", full)], wire)
        empty.grad, full.grad = torch.empty(0, 4), torch.full((6, 4), 1.0 + dist.get_rank())
        wrong += [] if reducer.finish() and tuple(empty.grad.shape) == (0, 4) else ["an empty parameter"]
        reducer.close()
    return wrong


class Odd(nn.Module):
    """A single number, an empty tensor, a transposed one and one in another memory format."""

    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(7)
        self.scale, self.empty = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.empty(0, 4))
        self.turned = nn.Parameter(torch.randn(16, 12, generator=g).t())
        kernel = torch.randn(4, 3, 3, 3, generator=g)
        self.kernel = nn.Parameter(kernel.to(memory_format=torch.channels_last))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.turned).square().mean() * self.scale + self.empty.sum() + self.kernel.pow(3).mean() * x.mean()


def odd_tensors() -> list[str]:
    """Parameters of every form, alone in a unit or beside others, and in the measurement of a network."""
    wrong, size = [], dist.get_world_size()
    for name, collective in (("dense", Dense()), ("sparse", OkTopk(0.2)), ("thin", LowRank(2)), ("4", Quantized(4))):
        for unit_mb in (1e-6, 25.0):
            wire = tw.Wire(gradient=tw.Reduction(collective, exact_dims=0, unit_mb=unit_mb))
            (alone, model), mean = (Odd(), DDP(Odd())), Odd()
            reducer, handle = Reducer(alone.named_parameters(), wire), compress_ddp(model, wire)
            for step in range(3):
                alone.zero_grad(), model.zero_grad(), mean.zero_grad()
                alone(batch(step)).backward(), model(batch(step)).backward()
                reducer.finish()
                wrong += differ(f"{name}, units of {unit_mb} MB", gradients(model), gradients(alone))
                sum(mean(batch(step, rank)) / size for rank in range(size)).backward()
                wrong += differ("mean", gradients(alone), gradients(mean), 1e-5) if name == "dense" else []
            reducer.load_state_dict(reducer.state_dict())
            reducer.close(), handle.close()
    shapes = {name: tuple(p.shape) for name, p in Odd().named_parameters()}
    (sent, _), (fewer, _) = exchanges(shapes, [None, tw.Wire.of("bf16").gradient], None, torch.device("cpu"))
    return wrong + ([] if 0 < fewer < sent else [f"measured: {sent} bytes exact, {fewer} in bf16"])


def refused_gradients() -> list[str]:
    """Complex parameters and sparse gradients are one clear error on every rank, not a wrong mean."""
    wrong = []

    def refused(words: str, act: Callable[[], object]) -> None:
        try:
            act()
            wrong.append(f"{words}: not refused")
        except UsageError as error:
            wrong.extend([] if words in str(error) else [f"{words}: {error}"])

    def reduce_sparse() -> None:
        table = nn.Embedding(10, 4, sparse=True)
        reducer = Reducer(table.named_parameters(), "off")
        table(torch.tensor([1, 2])).sum().backward()
        reducer.finish()

    def ddp_sparse() -> None:
        model = DDP(nn.Embedding(10, 4, sparse=True))
        compress_ddp(model, "off")
        model(torch.tensor([1, 2])).sum().backward()

    turning = nn.ParameterDict({"turn": torch.ones(2, 2, dtype=torch.complex64)})
    refused("turn is of torch.complex64", lambda: compress_ddp(DDP(turning), "off"))
    refused("turn is of torch.complex64", lambda: tw.optim.FrozenAdam(turning.named_parameters()))
    refused("weight has a gradient of torch.sparse_coo", reduce_sparse)
    refused("weight has a gradient of torch.sparse_coo", ddp_sparse)
    return wrong


def changed_shape() -> list[str]:
    net = Net()
    reducer = Reducer(net.named_parameters(), SPARSE)
    net.last = nn.Linear(16, 5)
    reducer.parameters["last.weight"] = net.last.weight
    net.last.weight.grad = torch.zeros_like(net.last.weight)
    try:
        reducer.finish()
    except UsageError as error:
        return [] if "last.weight" in str(error) else [str(error)]
    return ["a changed shape was not found"]


def functional() -> list[str]:
    """tw.all_reduce with its state in our hands equals the Reducer."""
    net, state, wrong = Net(), {}, []
    reducer = Reducer(net.named_parameters(), SPARSE)
    for step in range(4):
        backward(net, step)
        means = tw.all_reduce({n: p.grad.clone() for n, p in net.named_parameters()}, SPARSE, None, state)
        reducer.finish()
        wrong += differ(f"step {step}", gradients(net), means)
    reducer.close()
    try:
        bad = torch.tensor([torch.nan if dist.get_rank() == 0 else 1.0])
        tw.all_reduce({"x": bad}, SPARSE, None, state)
        wrong.append("NaN on rank 0 passed")
    except ValueError as error:
        wrong += [] if "not finite" in str(error) else [str(error)]
    return wrong


CASES = [
    exact_is_plain_ddp, everything_selected_is_dense, buckets_do_not_matter, order_of_ready_does_not_matter,
    conservation, accumulation, clipping, loss_scale, grad_scaler_and_autocast, unused_parameters, static_graph, frozen,
    unfrozen_and_wrapped_again, several_models_and_groups,
    groups_of_ranks_that_know_unlike_many, exclusions, nonfinite, bracket, warmup, auto, mismatch,
    once_a_model, nothing_or_empty, odd_tensors, refused_gradients, changed_shape, functional,
]  # fmt: skip


def run_cases() -> dict[str, list[str]]:
    dist.init_process_group("gloo")
    out = {}
    for case in CASES:
        try:
            out[case.__name__] = case()
        except Exception as error:
            out[case.__name__] = [f"{type(error).__name__}: {error}"]
    return out


WIRES = {
    "oktopk": SPARSE,
    "oktopk coded": tw.Wire(gradient=tw.Reduction(OkTopk(0.1, 4, 3, "int8", "coded"), unit_mb=0.002)),
    "low rank": tw.Wire(gradient=LowRank(2)),
    "quantized": tw.Wire(gradient=Quantized(4)),
    "diana": tw.Wire(gradient=(tw.collectives.Gather(tw.codecs.Quantize(4, rounding="stochastic")), tw.memory.Diana())),
}


def train(model: DDP, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        backward(model, step)
        optimizer.step()


def resume(folder: str) -> dict[str, list[str]]:
    """Six steps at once, or three, a checkpoint, everything new, and three: the same bits."""
    dist.init_process_group("gloo")
    out = {}
    for name, wire in WIRES.items():
        path = os.path.join(folder, name.replace(" ", "-"))
        whole, first, second = wrap(), wrap(), wrap()
        compress_ddp(whole, wire)
        train(whole, torch.optim.SGD(whole.parameters(), 0.1), range(6))
        handle = compress_ddp(first, wire)
        train(first, torch.optim.SGD(first.parameters(), 0.1), range(3))
        dcp.save({"model": first.module.state_dict(), "wire": handle.state_dict()}, checkpoint_id=path)
        dcp.load(model := {"model": second.module.state_dict()}, checkpoint_id=path)
        second.module.load_state_dict(model["model"])
        compress_ddp(second, wire).load_state_dict(read_state(path, "wire"))
        train(second, torch.optim.SGD(second.parameters(), 0.1), range(3, 6))
        pairs = zip(whole.module.named_parameters(), second.module.parameters())
        out[name] = [f"{n} differs after resuming" for (n, p), q in pairs if not torch.equal(p, q)]
        out[name] += agree("resumed", second)
    return out


def mean_residual(folder: str, load: bool) -> Tensor:
    """Mean over ranks of all residuals: after four steps that end in a checkpoint, or as loaded from it."""
    dist.init_process_group("gloo")
    model = wrap()
    handle = compress_ddp(model, SPARSE)
    if load:
        handle.load_state_dict(read_state(folder, "wire"))
    else:
        for step in range(4):
            backward(model, step)
        dcp.save({"wire": handle.state_dict()}, checkpoint_id=folder)
    flat = torch.cat([v.reshape(-1).double() for n, v in sorted(handle.state_dict().items()) if "/e/" in n])
    dist.all_reduce(flat)
    backward(model, 9)  # the loaded state works
    return flat / dist.get_world_size()
