"""Section `nccl` of gpu.py: does everything do on a card what it does on the CPU?

    python3 benchmarks/card/gpu_nccl.py [--device cpu] [--only CASE ...]

Four ranks on one card. Codecs, memories, collectives and reductions run twice, on CUDA tensors over NCCL and on CPU
tensors over Gloo, and are compared bit for bit (where the backend itself adds floats, to rounding). Pipelines are
compared with torch's own stage; `thinwire train` with itself on one rank. With --device cpu both sides are the CPU's:
a trial of this script.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gpu_ranks
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from thinwire import codecs as c
from thinwire import collectives as k
from thinwire import memory as m
from thinwire.collectives.messages import gather
from thinwire.data_parallel.reducer import Reducer
from thinwire.data_parallel.tied_embedding import TiedEmbedding
from thinwire.memory.channel import Channel
from thinwire.parallel import compress_ddp
from thinwire.pipeline.overlap import run_ahead

RANKS = 4
CODECS: tuple[c.Codec, ...] = (
    c.Identity(), c.Cast("fp16"), c.Cast("bf16"), c.Cast("fp8"), *(c.Quantize(b) for b in (2, 3, 4, 6, 8)),
    c.Quantize(4, block=64), c.Quantize(4, rounding="stochastic"), c.Quantize(3, scale="mse"), c.ScaledSign(),
    c.Natural(), c.Dither(4), c.Dither(4, "inf"), c.NaturalDither(4), c.Ternary(), c.TopK(0.1), c.TopK(0.5),
    c.RandK(0.1), c.LowRank(4), c.Chain(c.TopK(0.2), c.Quantize(4)), c.Chain(c.RandK(0.3), c.Natural()),
    c.Rotated(c.Quantize(3)), c.Induced(c.TopK(0.3), c.RandK(0.3)),
)  # fmt: skip
ROUNDED = (c.LowRank, c.Dither, c.NaturalDither)  # they add floats in an order that is the device's own
WARM_3 = {"codec": "quantize", "bits": 3, "memory": {"memory": "delta", "cold": {"codec": "quantize", "bits": 8}}}
AQ_3 = {"forward": WARM_3, "backward": {"codec": "quantize", "bits": 3}}
COLLECTIVES = {
    "dense": k.Dense(), "gather 4 bits": k.Gather(c.Quantize(4)), "topk allgather": k.TopkAllgather(0.05),
    "two hops 4 bits": k.Quantized(4), "two hops bf16": k.TwoHop(c.Cast("bf16")), "low rank": k.LowRank(2),
    "dsa": k.TopkDSA(0.05, "int8", "coded"), "gtopk": k.GTopk(0.05), "oktopk": k.OkTopk(0.05, tau=3, tau_prime=2),
    "oktopk coded": k.OkTopk(0.02, 4, 3, "int8", "coded"),
    "hierarchical": k.Hierarchical(k.Dense(), k.OkTopk(0.1), 2),
}  # fmt: skip
BACKEND_ADDS = ("dense", "low rank", "hierarchical")
SCHEDULES = {  # → stages a rank
    "GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "InterleavedZeroBubble": 2, "ZBVZeroBubble": 2, "DualPipeV": 2,
}  # fmt: skip


class Context:
    """One rank: its device, and whether there is a CPU side to compare with."""

    def __init__(self, device: torch.device, twin: bool) -> None:
        self.device, self.twin, self.rank, self.size = device, twin, dist.get_rank(), dist.get_world_size()

    def devices(self) -> list[torch.device]:
        """The card, then the CPU where its results are to be compared."""
        return [self.device, torch.device("cpu")] if self.twin else [self.device]

    def differ(self, what: str, found: list[Any], tolerance: float = 0.0) -> list[str]:
        """What the devices came to, tensor by tensor."""
        if len(found) < 2:
            return []
        for i, (a, b) in enumerate(zip(*found, strict=True)):
            a, b = a.cpu(), b.cpu()
            if a.dtype != b.dtype or a.shape != b.shape:
                return [f"{what}, {i}: {a.dtype} {tuple(a.shape)} against {b.dtype} {tuple(b.shape)}"]
            if not tolerance and not same_bits(a, b):
                far = (a.double() - b.double()).abs().max() if a.numel() else 0
                return [f"{what}, {i}: bits differ, by {float(far):.3g} of {float(b.double().abs().max()):.3g}"]
            if tolerance and not torch.allclose(a.double(), b.double(), rtol=tolerance, atol=tolerance):
                return [f"{what}, {i}: by {float((a.double() - b.double()).abs().max()):.3g}"]
        return []

    def ranks_differ(self, what: str, x: Tensor) -> list[str]:
        everyone = gather(x.contiguous(), None)
        return [f"{what}: rank {r} has other bits" for r, y in enumerate(everyone) if not same_bits(x, y)]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def values(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=g) * torch.exp(torch.randn(shape, generator=g))).to(dtype)


# --- one end and the other


def codecs(at: Context) -> Iterator[str]:
    """Every codec's bytes, and what they decode to; the ranks share the list."""
    for codec in CODECS[at.rank :: at.size]:
        for dtype in (torch.float32, torch.bfloat16):
            for shape in ((6, 256), (5, 33)):
                x, found = values(shape, 1, dtype), []
                for device in at.devices():
                    wire = codec.encode(x.to(device), 7)
                    found.append([wire, codec.decode(wire, shape, dtype, 7)])
                rounded = isinstance(codec, ROUNDED)
                if rounded:  # the message may differ in its last bits: what it stands for may not by more
                    found = [one[1:] for one in found]
                yield from at.differ(f"{codec} {dtype} {shape}", found, 2e-2 if rounded else 0.0)


def memories(at: Context) -> Iterator[str]:
    """Frames, values and digests of every memory over four steps; rows of samples for those with a cold start."""
    folder = tempfile.mkdtemp()
    q, eight = c.Quantize(4), c.Quantize(8)
    cases: list[tuple[str, c.Codec, Callable[[str], m.Memory]]] = [
        ("plain", q, lambda end: m.Plain()), ("diana", c.Quantize(4, rounding="stochastic"), lambda end: m.Diana()),
        ("rand-diana", q, lambda end: m.RandDiana(0.4)), ("ef21", q, lambda end: m.EF21()),
        ("error feedback", c.TopK(0.1), lambda end: m.ErrorFeedback()), ("econtrol", q, lambda end: m.EControl(0.3)),
        ("low rank, fed back", c.LowRank(2), lambda end: m.ErrorFeedback()),
        ("fixed", q, lambda end: m.FixedShift(torch.ones(8, 256))),
        ("delta bf16", c.Quantize(3), lambda end: m.Delta(cold=eight)), ("delta full", q, lambda end: m.Delta("fp32")),
        ("delta int8", q, lambda end: m.Delta("int8", eight)), ("delta no gate", q, lambda end: m.Delta(gate=False)),
        ("delta rotated", c.Rotated(c.Quantize(3)), lambda end: m.Delta(cold=eight)),
        ("delta file", q, lambda end: m.Delta(path=f"{folder}/{at.rank}-{end}", cold=eight)),
        ("delta host", q, lambda end: m.Delta(cold=eight, host=True)),
    ]  # fmt: skip
    for name, codec, make in cases[at.rank :: at.size]:
        found = [list(_conversation(codec, make, device)) for device in at.devices()]
        yield from at.differ(name, found, 1e-4 if isinstance(codec, c.LowRank) else 0.0)


def _conversation(codec: c.Codec, make: Callable[[str], m.Memory], device: torch.device) -> Iterator[Tensor]:
    ends = [Channel(codec, make(f"{end}-{device.type}"), seed=3, name="both") for end in ("send", "recv")]
    keys: Any = list(range(8)) if ends[0].memory.cold_start else "x"
    for step in range(4):
        x = values((8, 256), 5) + 0.1 * values((8, 256), step)
        for end in ends:
            end.begin()
        if step == 2:  # rows in another order, of which some are new
            keys = [7, 1, 11, 3, 4, 12, 6, 0] if ends[0].memory.cold_start else "x"
        frame = ends[0].send(keys, x.to(device))
        assert frame.numel() == ends[1].nbytes(keys, x.shape, x.dtype)
        if not isinstance(codec, c.LowRank):
            yield frame
        yield ends[1].recv(keys, frame, x.shape, x.dtype)
        for end in ends:
            end.commit()
        if ends[0].memory.cold_start:
            yield torch.tensor([[end.digest(key) for key in keys] for end in ends])


# --- a group


def collectives(at: Context) -> Iterator[str]:
    for name, collective in COLLECTIVES.items():
        found = []
        for device in at.devices():
            channel, means = Channel(collective, m.ErrorFeedback(), name=name), []
            for step in range(4):
                channel.begin()
                shape = (120, 100) if name == "low rank" else (12_000,)
                x = values(shape, 100 * step + at.rank) + 2 * values(shape, step)
                means.append(channel.reduce("w", x.to(device)))
                channel.commit()
            found.append(means)
            if device == at.device:
                yield from at.ranks_differ(name, torch.stack(means))
        yield from at.differ(name, found, 1e-4 if name in BACKEND_ADDS else 0.0)


def net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(48, 96), nn.Tanh(), nn.Linear(96, 96), nn.LayerNorm(96), nn.Linear(96, 24))


def reducers(at: Context) -> Iterator[str]:
    """Given gradients through the Reducer: presets, sparse over the whole model, a rolled back step."""
    sparse = tw.Wire(gradient=tw.Reduction(k.OkTopk(0.05, scope="model"), exact_dims=0, unit_mb=0.02))
    for name, wire in (("off", "off"), ("bf16", "bf16"), ("max", "max"), ("oktopk", sparse)):
        found = []
        for device in at.devices():
            model, means = net().to(device), []
            reducer = Reducer(model.named_parameters(), wire)
            for step in range(4):
                for i, p in enumerate(model.parameters()):
                    p.grad = values(tuple(p.shape), 1000 * step + 10 * i + at.rank).to(device)
                    if step == 2 and i == 0 and at.rank == 1:
                        p.grad[0, 0] = torch.nan
                good = reducer.finish()
                if good != (step != 2):
                    yield f"{name} on {device}, step {step}: {'kept' if good else 'rolled back'}"
                means += [p.grad.clone() for p in model.parameters()] if step != 2 else []
            reducer.close()
            found.append(means)
            if device == at.device:
                yield from at.ranks_differ(name, torch.cat([x.reshape(-1) for x in means]))
        # others leave vectors to the backend, and bf16 on a card all, in bf16
        yield from at.differ(name, found, {"oktopk": 0.0, "bf16": 0.05}.get(name, 1e-5))


def ddp(at: Context) -> Iterator[str]:
    """compress_ddp: exact as plain DDP; compressed, all ranks the same and the loss falls; NaN is rolled back."""
    plain, exact = (_wrapped(at) for _ in range(2))
    handle = compress_ddp(exact, k.Dense())
    for step in range(3):
        for model in (plain, exact):
            _backward(at, model, step)
        yield from at.differ(f"exact, step {step}", [_gradients(plain), _gradients(exact)], 1e-5)
    handle.close()
    for name, wire in (("max", "max"), ("oktopk", k.OkTopk(0.05)), ("low rank", k.LowRank(4))):
        model = _wrapped(at)
        handle, optimiser, losses = compress_ddp(model, wire), torch.optim.SGD(model.parameters(), lr=0.2), []
        for step in range(8):
            losses.append(_backward(at, model, 0, poison=step == 3 and at.rank == 2))
            if handle.skipped != (step == 3):
                yield f"{name}: step {step} {'was' if handle.skipped else 'was not'} rolled back"
            if not handle.skipped:
                optimiser.step()
        yield from at.ranks_differ(name, torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
        if not losses[-1] < losses[0]:
            yield f"{name}: loss {losses[0]:.4f} → {losses[-1]:.4f}"
        handle.close()


def _wrapped(at: Context) -> DDP:
    return DDP(net().to(at.device), bucket_cap_mb=0.02)


def _backward(at: Context, model: nn.Module, step: int, poison: bool = False) -> float:
    model.zero_grad()
    x = values((16, 48), 50 * step + at.rank).to(at.device)
    loss = (model(x) - x[:, :24].tanh()).square().mean() * (torch.nan if poison else 1.0)
    loss.backward()
    return float(loss.detach())


def _gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def fsdp(at: Context) -> Iterator[str]:
    """compress_fsdp, two sites of two shards: exact as plain HSDP; compressed, replicas the same and the loss falls."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from thinwire.parallel import compress_fsdp

    mesh = init_device_mesh(at.device.type, (2, 2), mesh_dim_names=("replica", "shard"))

    def sharded(over: Any) -> Any:
        model = net().to(at.device)
        for part in model:
            if isinstance(part, nn.Linear):
                fully_shard(part, mesh=over)
        return fully_shard(model, mesh=over)

    def local(model: Any) -> list[Tensor]:
        return [p.grad.to_local().clone() for p in model.parameters()]

    plain, exact = sharded(mesh), sharded(mesh["shard"])
    handle = compress_fsdp(exact, "off", replicas=mesh["replica"])
    for step in range(3):
        for model in (plain, exact):
            _backward(at, model, step)
        yield from at.differ(f"exact, step {step}", [local(plain), local(exact)], 1e-5)
    handle.close()
    for name, wire in (("max", "max"), ("oktopk", k.OkTopk(0.05)), ("low rank", k.LowRank(4))):
        model, losses = sharded(mesh["shard"]), []
        handle, optimiser = (
            compress_fsdp(model, wire, replicas=mesh["replica"]),
            torch.optim.SGD(model.parameters(), lr=0.2),
        )
        for _ in range(8):
            losses.append(_backward(at, model, 0))
            optimiser.step()
        flat = torch.cat([p.to_local().detach().reshape(-1) for p in model.parameters()])
        if not same_bits(*gather(flat, mesh["replica"].get_group())):
            yield f"{name}: replicas differ"
        if not losses[-1] < losses[0] or not handle.sent:
            yield f"{name}: loss {losses[0]:.4f} → {losses[-1]:.4f}, {handle.sent} bytes sent"
        handle.close()


def tied(at: Context) -> Iterator[str]:
    """Two stages × two replicas: rank = 2·replica + stage."""
    replicas = [dist.new_group([stage, stage + 2]) for stage in (0, 1)][at.rank % 2]
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][at.rank // 2]
    for name, table in (
        ("fused", {"embedding": {"sync": "fused"}}),
        ("separate", {"embedding": {"sync": "separate"}}),
        ("fused, 4 bits", "max"),
    ):
        found = []
        for device in at.devices():
            weight, out = nn.Parameter(values((64, 32), 9).to(device)), []
            shared = TiedEmbedding(weight, table, dist.group.WORLD, replicas, pair)
            for step in range(3):
                weight.grad = values((64, 32), 10 * step + at.rank).to(device)
                if not shared.finish() or not shared.check():
                    yield f"{name}: rolled back, or copies differ"
                out.append(weight.grad.clone())
            shared.reducer.close()
            found.append(out)
            if device == at.device:
                yield from at.ranks_differ(name, torch.stack(out))
        yield from at.differ(name, found, 1e-5)
        everyone = sum(values((64, 32), r) for r in range(4)) / 2
        if "bits" not in name and not torch.allclose(found[0][0].cpu(), everyone, atol=1e-5):
            yield f"{name}: not the sum of both stages' means"


# --- the pipeline


class Block(nn.Module):
    def __init__(self, index: int, width: int = 64) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(100 + index)
            self.norm, self.wide = nn.LayerNorm(width), nn.Linear(width, 2 * width)
            self.narrow = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.tanh(self.wide(self.norm(x))))


class Piped:
    """One pipeline of a schedule, with torch's stages where `wire` is None."""

    def __init__(self, at: Context, name: str, microbatches: int, wire: Any, overlap: bool = False) -> None:
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import get_schedule_class

        from thinwire.pipeline.pipeline import Pipeline
        from thinwire.pipeline.stage import CompressedStage

        each = SCHEDULES[name]
        mine = [at.rank, 2 * at.size - 1 - at.rank] if "V" in name else [at.rank + at.size * v for v in range(each)]
        count = at.size * each
        self.stages: list[Any] = [
            PipelineStage(Block(i).to(at.device), i, count, at.device)
            if wire is None
            else CompressedStage(Block(i).to(at.device), i, count, at.device, wire=wire)
            for i in mine
        ]
        self.pipe = None if wire is None else Pipeline(self.stages, overlap=overlap)
        kind: Any = get_schedule_class(name)
        self.schedule = kind(self.stages[0] if each == 1 else self.stages, microbatches, loss_fn=nn.functional.mse_loss)
        self.first, self.last, self.at = 0 in mine, count - 1 in mine, at
        self.optimiser = torch.optim.SGD([p for s in self.stages for p in s.submod.parameters()], lr=0.1)

    def step(self, ids: list[int], x: Tensor, update: bool = True) -> float:
        losses: list[Tensor] = []
        self.optimiser.zero_grad()
        given = (x.to(self.at.device),) if self.first else ()
        target = {"target": (x * 0.5).tanh().to(self.at.device), "losses": losses} if self.last else {}
        if self.pipe is None:
            self.schedule.step(*given, **target)
        else:
            with self.pipe.step(ids=ids if self.first else None):
                self.schedule.step(*given, **target)
        if update and not (self.pipe is not None and self.pipe.skipped):
            self.optimiser.step()
        return sum(float(loss.detach()) for loss in losses)

    def gradients(self) -> list[Tensor]:
        return [p.grad.clone() for s in self.stages for p in s.submod.parameters() if p.grad is not None]

    def mirrors_differ(self, ids: list[int]) -> list[str]:
        mine = {(lane.name, lane.end): lane.digests(ids).tolist() for lane in self.pipe.lanes() if lane.per_sample}
        everyone: list[Any] = [None] * self.at.size
        dist.all_gather_object(everyone, mine)
        ends = {key: value for theirs in everyone for key, value in theirs.items()}
        names = sorted({name for name, _ in ends})
        return [f"mirrors of {n}" for n in names if ends[n, "send"] != ends[n, "recv"] or min(ends[n, "send"]) < 0]


def batch(ids: list[int]) -> Tensor:
    return torch.stack([values((32, 64), 7000 + i) for i in ids])


def identity(at: Context) -> Iterator[str]:
    """Nothing configured: the bits of torch's own stage, under all schedules."""
    for name in SCHEDULES:
        runs = [Piped(at, name, 8, wire) for wire in (None, "off")]
        for step in range(2):
            losses = [run.step(list(range(8)), batch(list(range(8 * step, 8 * step + 8)))) for run in runs]
            if losses[0] != losses[1]:
                yield f"{name}, step {step}: losses {losses}"
            found = [run.gradients() for run in runs]
            for a, b in zip(*found):
                if not same_bits(a, b):
                    yield f"{name}, step {step}: gradients differ"
                    break


def delta(at: Context) -> Iterator[str]:
    """AQ 3/3 with an 8-bit cold start: mirrors equal, nothing healed, the loss falls; NaN and damage are rolled back
    and healed. In a file, too."""
    folder = tempfile.mkdtemp()
    filed = {**WARM_3, "memory": {**WARM_3["memory"], "path": folder}}
    for name, wire in (("delta", AQ_3), ("delta in a file", {**AQ_3, "forward": filed})):
        run, losses = Piped(at, "1F1B", 8, wire), []
        orders = [list(range(16)), [3, 7, 1, 15, 8, 2, 0, 4, 5, 6, 9, 14, 13, 12, 11, 10]]
        for epoch in range(4):
            order = orders[epoch % 2]
            losses.append(sum(run.step(order[i : i + 8], batch(order[i : i + 8])) for i in (0, 8)))
        yield from run.mirrors_differ(list(range(16)))
        stats = run.pipe.stats
        if stats.skips or stats.healed or (at.rank < 3 and not stats.warm):
            yield f"{name}: {stats.skips} skips, {stats.healed} healed, {stats.warm} warm"
        if run.last and not losses[-1] < losses[0]:
            yield f"{name}: loss {losses}"
        yield from _faults(at, run)
        run.pipe.close()


def overlapped(at: Context) -> Iterator[str]:
    """Frames on groups of their own, posted ahead, beside the computation: the bits of torch's stage, equal mirrors."""
    for name in ("GPipe", "1F1B"):
        runs = [Piped(at, name, 8, None), Piped(at, name, 8, "off", overlap=True)]
        if name == "1F1B":
            run_ahead(runs[1].schedule)
        for step in range(3):
            losses = [run.step(list(range(8)), batch(list(range(8 * step, 8 * step + 8)))) for run in runs]
            if losses[0] != losses[1] or not all(same_bits(*pair) for pair in zip(*(r.gradients() for r in runs))):
                yield f"{name}, step {step}: losses {losses}, or gradients, differ"
    run = Piped(at, "1F1B", 8, AQ_3, overlap=True)
    run_ahead(run.schedule)
    for _ in range(3):
        run.step(list(range(8)), batch(list(range(8))))
    yield from run.mirrors_differ(list(range(8)))
    yield from _faults(at, run)


def _faults(at: Context, run: Piped) -> Iterator[str]:
    ids = list(range(8))
    x = batch(ids)
    x[3, 0, 0] = torch.inf
    run.step(ids, x)
    if not run.pipe.skipped:
        yield "an infinite activation was not seen by every rank"
    lane = next((lane for lane in run.pipe.lanes() if lane.end == "send" and lane.name == "forward 1→2"), None)
    if lane is not None:
        original = lane.send

        def send(part: Any, index: int, x: Tensor) -> Tensor:
            frame = original(part, index, x)
            lane.send = original
            frame[40] ^= 4
            return frame

        lane.send = send
    run.step(ids, batch(ids))
    if not run.pipe.skipped:
        yield "a damaged frame was not seen by every rank"
    before = run.pipe.healed
    run.step(ids, batch(ids))
    if run.pipe.skipped or (at.rank in (1, 2) and run.pipe.healed == before):
        yield "the step after a damaged frame was rolled back, or its sample was not healed"
    yield from run.mirrors_differ(ids)


# --- the trainer


def trainer(tell: Callable[[Any], None], device: str, folder: str) -> None:
    """One rank alone (rank 0), 2 × 2 ranks exact and compressed, and a resumed run; then tensor parallelism, wires that
    are chosen by measuring, adapters, and an optimiser whose variance is frozen."""
    from thinwire.train.config.sections import read_config
    from thinwire.train.rank import train_rank

    gpu_ranks.use_reference_without_numba()
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    small = {
        "model": {"hidden": 64, "layers": 4, "heads": 4},
        "data": {"seq_len": 64, "corpus_bytes": 40_000, "held_out": 0.1},
        "optim": {"batch": 8, "steps": 12, "warmup": 2, "lr": 3e-3},
    }  # fmt: skip

    def run(name: str, wire: str, dp: int, pp: int, resume: bool = False, **changed: Any) -> None:
        """`changed`: keys of any section, as mesh={"tp": 2}."""
        nonlocal port
        port += 1
        os.environ["MASTER_PORT"] = str(port)
        table: dict[str, Any] = {**small, "mesh": {"dp": dp, "pp": pp, "microbatches": 2}, "wire": {"preset": wire}}
        table["run"] = {"device": device, "out": f"{folder}/{name}", "eval_every": 0, "checkpoint_every": 6}
        for section, keys in changed.items():
            table[section] = {**table[section], **keys}
        began, problems = time.time(), []
        try:
            if train_rank(read_config(table), resume, alone=dp * pp == 1):
                problems = ["a rank was lost"]
        except BaseException:
            problems = [traceback.format_exc()]
        tell((f"train {name}", problems, time.time() - began))

    if rank == 0:
        run("alone", "off", 1, 1)
    port += rank > 0
    for name, wire in (("exact", "off"), ("compressed", "max")):
        run(name, wire, 2, 2)
    run("mixed", "max", 2, 2, run={"autocast": "bf16"})
    run("sliced", "off", 1, 2, mesh={"tp": 2})
    run("sliced and compressed", "max", 1, 2, mesh={"tp": 2})
    run("chosen", "auto", 2, 2)
    run("adapters", "max", 2, 2, model={"lora": {"r": 4}}, optim={"lr": 2e-2})
    run("frozen", "max", 2, 2, optim={"name": "frozen_adam"})
    run("ahead", "max", 1, 4, mesh={"microbatches": 8, "ahead": 2})
    if rank == 0:  # as if it had been stopped at step 6
        import shutil

        shutil.rmtree(f"{folder}/compressed/checkpoints/step-00000012")
    run("compressed", "max", 2, 2, resume=True)


LEARNING = ("compressed", "mixed", "sliced and compressed", "chosen", "adapters", "frozen", "ahead")


def judge_training(folder: str) -> list[tuple[str, list[str]]]:
    from thinwire.train.metrics import read_events

    def losses(name: str) -> list[float]:
        return [e["loss"] for e in read_events(Path(folder) / name / "metrics.jsonl") if e["kind"] == "step"]

    alone, out = losses("alone"), []
    for name in ("exact", "sliced"):
        found = losses(name)
        off = max(abs(a - b) for a, b in zip(alone, found)) if alone and len(alone) == len(found) else math.inf
        out.append((f"train {name} equals alone", [] if off < 2e-3 else [f"losses differ by {off:.3g}"]))
    for name in LEARNING:
        found = losses(name)
        good = len(found) == 12 and all(map(math.isfinite, found)) and found[-1] < found[0]
        out.append((f"train {name} learns", [] if good else [f"{found}"]))
    return out


# --- all of it

CASES: dict[str, Callable[[Context], Iterator[str]]] = {
    "codecs": codecs, "memories": memories, "collectives": collectives, "reducer": reducers, "ddp": ddp, "fsdp": fsdp,
    "tied": tied,
    "identity": identity, "delta": delta, "overlapped": overlapped,
}  # fmt: skip
ON_NCCL_ALONE = ("collectives", "reducer", "ddp", "fsdp", "tied", "identity", "delta", "overlapped")


def cases(tell: Callable[[Any], None], device: str, backend: str, names: list[str]) -> None:
    at = Context(gpu_ranks.join(device, backend), twin=backend == gpu_ranks.BOTH)
    for name in names:
        began = time.time()
        try:
            problems = list(CASES[name](at))
        except Exception:
            problems = [traceback.format_exc()]
        label = name if at.twin else f"{name}, NCCL alone"
        tell((label, problems, time.time() - began))


def check(device: str = "cuda", only: list[str] | None = None, seconds: float = 150.0) -> list[dict[str, Any]]:
    """All cases; a table as they come. Every launch has `seconds`."""
    wanted = only or [*CASES, "train"]
    table: dict[str, dict[str, Any]] = {}

    def follow(told: Iterator[tuple[int, Any]], expected: list[str]) -> None:
        for rank, what in told:
            if isinstance(what, gpu_ranks.Failure):
                what = (next((n for n in expected if rank not in table.get(n, {}).get("ranks", [])), "?"), [what], 0.0)
            name, problems, took = what
            row = table.setdefault(name, {"case": name, "problems": [], "seconds": 0.0, "ranks": []})
            row["problems"] += [f"rank {rank}: {p}" for p in problems]
            row["seconds"] = max(row["seconds"], took)
            row["ranks"].append(rank)
            if len(row["ranks"]) == RANKS or problems:
                print(f"{'FAIL' if row['problems'] else 'PASS'}  {name}  {row['seconds']:.1f} s", flush=True)
                for problem in row["problems"][:4]:
                    print("      " + problem[-1200:].replace("\n", "\n      "), flush=True)

    both = [n for n in CASES if n in wanted]
    if both:
        follow(gpu_ranks.launch(cases, RANKS, device, gpu_ranks.BOTH, both, seconds=seconds), both)
    alone = [n for n in ON_NCCL_ALONE if n in wanted]
    if alone and device == "cuda":
        follow(gpu_ranks.launch(cases, RANKS, device, "nccl", alone, seconds=seconds), alone)
    if "train" in wanted:
        folder = tempfile.mkdtemp()
        names = [f"train {name}" for name in ("exact", "sliced", *LEARNING)]
        follow(gpu_ranks.launch(trainer, RANKS, device, folder, seconds=seconds), names)
        for name, problems in judge_training(folder):
            table[name] = {"case": name, "problems": problems, "seconds": 0.0, "ranks": []}
            print(f"{'FAIL' if problems else 'PASS'}  {name}  {'; '.join(problems)}", flush=True)
    return list(table.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=(*CASES, "train"))
    parser.add_argument("--seconds", type=float, default=150.0)
    options = parser.parse_args()
    failed = [row["case"] for row in check(options.device, options.only, options.seconds) if row["problems"]]
    print(f"{len(failed)} failed: {', '.join(failed)}" if failed else "all passed")
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
