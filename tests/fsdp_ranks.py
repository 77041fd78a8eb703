"""What every rank of the FSDP tests runs, two sites of two shards each, and some on other layouts: a case returns what
is wrong on this rank."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ddp_ranks import differ
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import thinwire as tw
from thinwire.collectives import LowRank, OkTopk, Quantized
from thinwire.collectives.groups import gather
from thinwire.data_parallel import auto_switch as auto_module
from thinwire.errors import UsageError
from thinwire.parallel import compress_fsdp

MESH: list[DeviceMesh] = []  # (replica, shard), made once a process
SPARSE = tw.Wire(gradient=tw.Reduction(OkTopk(0.1, tau=4, tau_prime=3), exact_dims=0, unit_mb=0.0012))
WIRES = {
    "oktopk": SPARSE,
    "low rank": tw.Wire(gradient=LowRank(2)),
    "quantized": tw.Wire(gradient=Quantized(4)),
    "diana": tw.Wire(gradient=(tw.collectives.Gather(tw.codecs.Quantize(4, rounding="stochastic")), tw.memory.Diana())),
}


class Net(nn.Module):
    """Rows that two shards cannot share equally (3 and 1), two branches, a vector whose gradient a case can choose."""

    def __init__(self, **frozen: bool) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(7)
        self.first, self.left, self.right = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm, self.last = nn.LayerNorm(16), nn.Linear(16, 3)
        self.scale, self.extra = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(4))
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=g) * 0.3
        for name in frozen:
            getattr(self, name).requires_grad_(False)

    def forward(self, x: Tensor, branches: str = "lr", extra: Tensor | None = None) -> Tensor:
        h = torch.tanh(self.first(x))
        h = h + sum((getattr(self, {"l": "left", "r": "right"}[b])(h) for b in branches), torch.zeros_like(h))
        shift = (self.extra * (torch.ones(4) if extra is None else extra)).sum()
        return self.last(self.norm(h)) * self.scale, shift


def sharded(dims: str = "shard", reshard: bool = True, policy: MixedPrecisionPolicy | None = None, **frozen: bool):
    """The model under fully_shard: over the site, or, as plain HSDP, over both dimensions."""
    model, mesh = Net(**frozen), MESH[0] if dims == "both" else MESH[0]["shard"]
    how = {"mesh": mesh, "reshard_after_forward": reshard, "mp_policy": policy or MixedPrecisionPolicy()}
    for part in (model.first, model.left, model.right):
        fully_shard(part, **how)
    return fully_shard(model, **how)


def compressed(wire: object = "off", model: nn.Module | None = None, **settings: object):
    model = model or sharded()
    return model, compress_fsdp(model, wire, replicas=MESH[0]["replica"], **settings)


def batch(step: int) -> Tensor:
    return torch.randn(8, 12, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))


def loss_of(model: nn.Module, step: int, **how: object) -> Tensor:
    out, shift = model(batch(step), **how)
    return (out.float() ** 2).mean() + shift * 0.1


def backward(model: nn.Module, step: int, **how: object) -> None:
    model.zero_grad()
    loss_of(model, step, **how).backward()


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {n: None if p.grad is None else p.grad.to_local().clone() for n, p in model.named_parameters()}


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.to_local().detach().clone() for n, p in model.named_parameters()}


def agree(what: str, values: dict[str, Tensor | None]) -> list[str]:
    """Bitwise equal on the replicas of this shard?"""
    flat = torch.cat([v.reshape(-1) for v in values.values() if v is not None])
    found = gather(flat, MESH[0]["replica"].get_group())
    return [f"{what}: replica {r} differs" for r, x in enumerate(found) if not torch.equal(x, flat)]


def train(model: nn.Module, steps: range) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
    for step in steps:
        backward(model, step)
        optimizer.step()
    return model


# --- the cases


def exact_is_plain_hsdp() -> list[str]:
    wrong = []
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for what in ({"reshard": True}, {"reshard": False}, {"policy": bf16}, {"left": False}):
        plain, (ours, handle) = sharded("both", **what), compressed(model=sharded(**what))
        wrong += differ(str(what), weights(train(ours, range(4))), weights(train(plain, range(4))), 1e-6)
        wrong += agree(str(what), weights(ours))
        wrong += [] if handle.reducer.exchange.steps == 4 else [f"{handle.reducer.exchange.steps} steps"]
    return wrong + ([] if differ("", weights(ours), weights(sharded())) else ["nothing was trained"])


def as_the_collective_alone() -> list[str]:
    """The gradients of a site, averaged by tw.all_reduce with the state in our hands: the same bits."""
    wrong, index, shards = [], MESH[0]["shard"].get_local_rank(), MESH[0]["shard"].size()
    for name, wire in WIRES.items():
        alone, (model, handle) = sharded(), compressed(wire, seed=5)
        state: dict[str, Tensor] = {}
        for step in range(5):
            backward(alone, step), backward(model, step)
            site = {n: g for n, g in gradients(alone).items() if g is not None}
            means = tw.all_reduce(site, wire, MESH[0]["replica"].get_group(), state, seed=shards * 5 + index)
            wrong += differ(f"{name}, step {step}", gradients(model), means)
            wrong += agree(f"{name}, step {step}", gradients(model))
        wrong += [] if differ("", means, site) else [f"{name}: replicas have the same gradients, nothing was tested"]
        wrong += [] if handle.sent > 0 and handle.compressing else [f"{name}: nothing was sent"]
    return wrong


def accumulation() -> list[str]:
    """Without sync, and by backwards that each reduce: as plain HSDP, and .grad keeps what it had."""
    wrong = []
    for syncs in ((False, False, True), (True, True, True), (True, False, True)):
        plain, (ours, handle) = sharded("both"), compressed()
        for model in (plain, ours):
            for step, sync in enumerate(syncs):
                model.set_requires_gradient_sync(sync)
                loss_of(model, step).backward()
        wrong += differ(str(syncs), gradients(ours), gradients(plain), 1e-6) + agree(str(syncs), gradients(ours))
        made = handle.reducer.exchange.steps
        wrong += [] if made == sum(syncs) else [f"{syncs}: {made} exchanges"]
    (ours, _), (anew, _) = compressed(SPARSE), compressed(SPARSE)
    total = {n: torch.zeros_like(w) for n, w in weights(anew).items()}
    for step in range(3):
        loss_of(ours, step).backward()
        backward(anew, step)
        total = {n: total[n] + g for n, g in gradients(anew).items()}
    return wrong + agree("compressed", gradients(ours)) + differ("compressed", gradients(ours), total)


class Tied(nn.Module):
    """One matrix at both ends, an odd number of rows, and a middle that backward computes again."""

    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(7)
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.up, self.down = nn.Linear(8, 17), nn.Linear(17, 8)
        self.head.weight = self.embed.weight
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=g) * 0.3

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        return self.head(h + checkpoint(lambda h: self.down(torch.tanh(self.up(h))), h, use_reentrant=False))


def tied_checkpointed_accumulated_clipped() -> list[str]:
    """All of it together, exact, is plain HSDP, its norms too; compressed, replicas stay equal and it still learns."""
    wrong = []

    def build(mesh: DeviceMesh, reshard: bool) -> nn.Module:
        model = Tied()
        for part in (model.up, model.down):
            fully_shard(part, mesh=mesh, reshard_after_forward=reshard)
        return fully_shard(model, mesh=mesh, reshard_after_forward=reshard)

    def run(model: nn.Module) -> tuple[list[float], list[float]]:
        optimizer, norms, losses = torch.optim.SGD(model.parameters(), 0.5, momentum=0.5), [], []
        for step in range(6):
            optimizer.zero_grad()
            for part in range(2):
                model.set_requires_gradient_sync(part == 1)
                g = torch.Generator().manual_seed(10 * step + part + 100 * dist.get_rank())
                tokens = torch.randint(0, 11, (32,), generator=g)
                loss = nn.functional.cross_entropy(model(tokens), (tokens + 1) % 11)
                loss.backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor()))
            losses.append(loss.item())
            optimizer.step()
        return norms, losses

    for reshard in (True, False):
        plain, ours, small = (build(MESH[0][m] if m else MESH[0], reshard) for m in ("", "shard", "shard"))
        compress_fsdp(ours, "off", replicas=MESH[0]["replica"])
        handle = compress_fsdp(small, SPARSE, replicas=MESH[0]["replica"])
        (want, _), (got, _), (_, losses) = run(plain), run(ours), run(small)
        wrong += differ(f"reshard {reshard}", weights(ours), weights(plain), 1e-6)
        wrong += [f"norms {got}, not {want}"] if max(abs(a - b) for a, b in zip(got, want)) > 1e-5 else []
        wrong += agree("compressed", weights(small)) + ([] if losses[-1] < losses[0] else [f"losses {losses}"])
        alone, off = MESH[0]["replica"].size() == 1, differ("one site", weights(small), weights(plain), 1e-6)
        wrong += off if alone else [] if off else ["nothing was compressed"]
        wrong += [] if handle.compressing is not alone else [f"compressing: {handle.compressing}"]
    return wrong


def two_forwards() -> list[str]:
    plain, (ours, _) = sharded("both"), compressed()
    for model in (plain, ours):
        (loss_of(model, 0) + 2 * loss_of(model, 1)).backward()
    return differ("two forwards", gradients(ours), gradients(plain), 1e-6)


def divide_factor() -> list[str]:
    """set_gradient_divide_factor counts all ranks, as under HSDP."""
    plain, (ours, _) = sharded("both"), compressed()
    for model in (plain, ours):
        for part in (model.first, model.left, model.right, model):
            part.set_gradient_divide_factor(3.0)
            part.set_force_sum_reduction_for_comms(True)
        backward(model, 0)
    return differ("divided by 3", gradients(ours), gradients(plain), 1e-6)


def unused() -> list[str]:
    """A branch that only the first site used is averaged; one that nobody used keeps .grad and residual."""
    model, handle = compressed(SPARSE)
    backward(model, 0)
    replica = MESH[0]["replica"].get_local_rank()
    backward(model, 1, branches="lr" if replica == 0 else "l")
    wrong = agree("used by one site", gradients(model))
    wrong += [] if model.right.weight.grad is not None else ["a branch of the first site got no gradient"]
    key = f"rank{replica}of2/e/right.weight"
    kept = handle.state_dict()[handle.shard][key].clone()
    before = gradients(model)["right.weight"]
    loss_of(model, 2, branches="l").backward()
    wrong += [] if torch.equal(gradients(model)["right.weight"], before) else ["an unused .grad changed"]
    now = handle.state_dict()[handle.shard][key]
    return wrong + ([] if torch.equal(now, kept) and kept.any() else ["the residual of an unused branch was spent"])


def exclusions() -> list[str]:
    wire = tw.Wire(gradient=tw.Reduction(OkTopk(0.02), exclude=("left.*",), exact_dims=1))
    exact, (model, _) = sharded("both"), compressed(wire)
    wrong = []
    for step in range(3):
        backward(exact, step), backward(model, step)
        want, got = gradients(exact), gradients(model)
        kept = [n for n in got if n.startswith("left.") or got[n].dim() == 1]
        wrong += differ(f"step {step}", {n: got[n] for n in kept}, {n: want[n] for n in kept}, 1e-6)
        off = differ("", {"first.weight": got["first.weight"]}, want, 1e-6)
        wrong += [] if off else ["first.weight was not compressed"]
    return wrong


def nonfinite() -> list[str]:
    """NaN in one shard of one replica: no rank of the four counts the step."""
    wrong = []
    for option in ("nan", "zero"):
        model, handle = compressed(SPARSE, nonfinite=option)
        for step in range(3):
            backward(model, step)
        before = handle.state_dict()[handle.shard]
        broken = torch.tensor([torch.nan, 1.0, 1.0, 1.0]) if dist.get_rank() == 3 else None
        backward(model, 3, extra=broken)
        flat = torch.cat([g.reshape(-1) for g in gradients(model).values()])
        wrong += [] if (flat.isnan().all() if option == "nan" else not flat.any()) else [f"{option}: {flat[:3]}"]
        wrong += [] if handle.skipped and handle.skips == 1 else [f"{option}: the step was not skipped"]
        after = handle.state_dict()[handle.shard]
        changed = [n for n in before if not n.endswith("/step") and not torch.equal(before[n], after[n])]
        wrong += [f"{option}: the rolled back step changed {changed[:2]}"] if changed else []
        backward(model, 4)
        wrong += ["the next step was skipped too"] if handle.skipped else agree("later", gradients(model))
    return wrong


def bracket_and_scaler() -> list[str]:
    """An exception in the bracket drops what was written; a loss scale changes nothing."""

    class Scaler:
        scale = 1.0

        def get_scale(self) -> float:
            return self.scale

    scaler = Scaler()
    (plain, handle), (scaled, _) = compressed(SPARSE), compressed(SPARSE, scaler=scaler)
    wrong = []
    for step in range(4):
        backward(plain, step)
        scaler.scale = 2.0 ** (step % 3 + 5)
        scaled.zero_grad()
        (loss_of(scaled, step) * scaler.scale).backward()
        wrong += differ(f"step {step}", {n: g / scaler.scale for n, g in gradients(scaled).items()}, gradients(plain))
    before = handle.state_dict()[handle.shard]
    try:
        with handle.step():
            backward(plain, 5)
            raise KeyError("on purpose")
    except KeyError:
        pass
    after = handle.state_dict()[handle.shard]
    wrong += [f"dropped, but changed: {n}" for n in before if "/e/" in n and not torch.equal(before[n], after[n])]
    with handle.step():
        backward(plain, 6)
    after = handle.state_dict()[handle.shard]
    changed = [n for n in before if "/e/" in n and not torch.equal(before[n], after[n])]
    return wrong + ([] if changed else ["kept, but nothing changed"])


def warmup_and_bytes() -> list[str]:
    """Exact at first. What is sent: an all-reduce of this shard then, about an eighth by four bits afterwards."""
    wire = tw.Wire(gradient=tw.Reduction(Quantized(4), warmup=2, exact_dims=0))
    plain, (model, handle) = sharded("both"), compressed(wire)
    wrong, sent = [], []
    for step in range(4):
        backward(plain, step), backward(model, step)
        off = differ(f"step {step}", gradients(model), gradients(plain), 1e-6)
        wrong += off if step < 2 else [] if off else [f"step {step} was not compressed"]
        sent.append(handle.sent - sum(sent))
    dense = 4 * sum(g.numel() for g in gradients(model).values())
    good = sent[:2] == [dense, dense] and sent[2] < 0.25 * dense and sent[2] == sent[3]
    return wrong + ([] if good else [f"sent {sent}, dense {dense}"])


def auto() -> list[str]:
    """A clock on which compression loses on one rank alone: all four turn it off, and debts are repaid."""
    model, handle = compressed(tw.Wire(gradient=SPARSE.gradient, auto=True))
    exact, seconds = sharded("both"), [0.0]

    def clock() -> float:
        compressing = handle.compressing and handle.auto.passes > 0
        seconds[0] += 1.0 if not compressing else 2.0 if dist.get_rank() == 2 else 0.5
        return seconds[0]

    auto_module.time = type("Clock", (), {"perf_counter": staticmethod(clock)})
    for step in range(len(handle.auto.plan) + 2):  # .grad adds up over all of them
        loss_of(model, step).backward(), loss_of(exact, step).backward()
    wrong = differ("debts", gradients(model), gradients(exact), 1e-5)
    return wrong + (["compression stayed on"] if handle.compressing else [])


def refusals() -> list[str]:
    wrong, rank = [], dist.get_rank()

    def refused(what: str, act: object) -> None:
        try:
            act()
            wrong.append(f"{what}: not refused")
        except UsageError as error:
            wrong.extend([] if what in str(error) and "\n" not in str(error) else [f"{what}: {error}"])

    def unequal() -> None:
        model = sharded()
        if rank >= 2:
            model.last.weight.to_local().detach().add_(1)
        compressed(model=model)

    def thawed() -> None:
        model, _ = compressed(model=sharded(left=False))
        model.left.requires_grad_(True)
        backward(model, 0)

    def partial() -> None:
        model = Net()
        fully_shard(model.left, mesh=MESH[0]["shard"])
        compressed(model=model)

    def all_reduce_off() -> None:
        model, _ = compressed()
        model.set_requires_all_reduce(False)
        backward(model, 0)

    def again() -> None:
        model, _ = compressed()
        compressed(model=model)

    refused("not Net", lambda: compressed(model=Net()))
    refused("shard it over a 1-D mesh", lambda: compressed(model=sharded("both")))
    refused("scale is not sharded", partial)
    refused("no other of its site", lambda: compress_fsdp(sharded(), "off", replicas=MESH[0]["shard"]))
    refused("the weights of last.weight", unequal)
    refused("rank 1 differs from rank 0 in seed", lambda: compressed(seed=rank % 2))
    refused("does not know", thawed)
    refused("set_requires_gradient_sync(False)", all_reduce_off)
    refused("compress_fsdp's own (call it once per model)", again)
    return wrong


CASES = [
    exact_is_plain_hsdp, as_the_collective_alone, accumulation, tied_checkpointed_accumulated_clipped, two_forwards,
    divide_factor, unused, exclusions, nonfinite, bracket_and_scaler, warmup_and_bytes, auto, refusals,
]  # fmt: skip


def resume(folder: str) -> list[str]:
    """Six steps at once, or three, a checkpoint, everything new, and three: the same bits."""
    wrong = []
    for name, wire in WIRES.items():
        path = os.path.join(folder, name.replace(" ", "-"))
        (whole, _), (first, handle), (second, other) = (compressed(wire) for _ in range(3))
        _steps(whole, range(6))
        _steps(first, range(3))
        dcp.save({"model": first.state_dict(), "wire": handle.state_dict()}, checkpoint_id=path)
        dcp.load(state := {"model": second.state_dict()}, checkpoint_id=path)
        second.load_state_dict(state["model"])
        other.load_state_dict(other.read_state(path, "wire"))
        _steps(second, range(3, 6))
        wrong += differ(f"{name} resumed", weights(second), weights(whole)) + agree(name, weights(second))
        forgetful, _ = compressed(wire)
        forgetful.load_state_dict(state["model"])
        _steps(forgetful, range(3, 6))
        wrong += [] if differ("", weights(forgetful), weights(whole)) else [f"{name}: the state does not matter"]
    mine = {name.partition("/")[2]: value for name, value in other.state_dict()[other.shard].items()}
    slots = ("e/", "h/", "m/")
    three = {f"rank{r}of3/{n}": v * r if n.startswith(slots) else v for n, v in mine.items() for r in range(3)}
    other.load_state_dict({other.shard: three})
    now = {name.partition("/")[2]: value for name, value in other.state_dict()[other.shard].items()}
    wrong += differ("from three sites", now, mine, 1e-6)
    try:
        other.load_state_dict({"shard0of3": {}})
        wrong.append("the state of another sharding was taken")
    except ValueError as error:
        wrong += [] if "shard0of3" in str(error) else [str(error)]
    return wrong


def _steps(model: nn.Module, steps: range) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in steps:
        backward(model, step)
        optimizer.step()


def run_cases(folder: str) -> dict[str, list[str]]:
    dist.init_process_group("gloo")
    MESH[:] = [init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))]
    return {case.__name__: _found(case, *([folder] if case is resume else [])) for case in [*CASES, resume]}


def run_layouts(*layouts: tuple[int, int]) -> dict[tuple[int, int], list[str]]:
    """What holds on any number of sites and shards; as many replicas as sites, of which one has nobody to send to."""
    dist.init_process_group("gloo")
    out = {}
    for sites, shards in layouts:
        MESH[:] = [init_device_mesh("cpu", (sites, shards), mesh_dim_names=("replica", "shard"))]
        cases = [tied_checkpointed_accumulated_clipped, *([as_the_collective_alone] if sites > 1 else [])]
        out[sites, shards] = [f"{case.__name__}: {wrong}" for case in cases for wrong in _found(case)]
    return out


def _found(case: Callable[..., list[str]], *words: str) -> list[str]:
    try:
        return case(*words)
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]


def run_example(*words: str) -> str:
    """The script as __main__; what it printed."""
    example = Path(__file__).parent.parent / "examples" / "fsdp_compressed.py"
    torch.set_num_threads(1)
    sys.argv = [example.name, *words]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(example), run_name="__main__")
    return printed.getvalue()
