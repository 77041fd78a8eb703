"""What every rank of the collective tests runs; importable by the lab's forked ranks."""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import thinwire as tw
from thinwire import collectives as k
from thinwire.codecs import NaturalDither, Quantize, RandK, TopK
from thinwire.collectives.groups import gather
from thinwire.memory import EF21, Diana, ErrorFeedback, Plain, RandDiana

COLLECTIVES = {
    "dense": k.Dense(), "gather 4 bits": k.Gather(Quantize(4)), "gather randk": k.Gather(RandK(0.2)),
    "topk allgather": k.TopkAllgather(0.05), "two hops 4 bits": k.Quantized(4), "two hops topk": k.TwoHop(TopK(0.1)),
    "low rank": k.LowRank(2), "dsa": k.TopkDSA(0.05), "dsa coded": k.TopkDSA(0.05, "int8", "coded"),
    "gtopk": k.GTopk(0.05), "gtopk coded": k.GTopk(0.05, "bf16", "coded"),
    "oktopk": k.OkTopk(0.05, tau=3, tau_prime=2), "oktopk coded": k.OkTopk(0.05, 4, 3, "int8", "coded"),
    "oktopk bf16": k.OkTopk(0.02, 5, 4, "bf16", "int32"),
    "hierarchical": k.Hierarchical(k.Dense(), k.OkTopk(0.1), 1),
}  # fmt: skip
KINDS = ("similar", "unlike", "zero", "equal", "skewed", "sparse", "tiny")


def gradient(kind: str, shape: tuple[int, ...], rank: int, size: int, step: int) -> Tensor:
    g = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(shape, generator=g, dtype=torch.float64)
    flat = x.view(-1)
    n = flat.numel()
    if kind == "similar":
        x += 3 * torch.randn(shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    elif kind == "zero":
        x.zero_()
    elif kind == "equal":
        x.fill_(0.5)
    elif kind == "skewed" and n:  # everybody's mass in one place, another for each
        lo = (rank + 1) % size * n // size
        flat[lo : lo + n // size + 1] *= 1000
    elif kind == "sparse" and n:
        flat[torch.rand(n, generator=g) < 0.99] = 0
    elif kind == "tiny":
        x *= 1e-30
    return x


def invariants(shapes: list[tuple[int, ...]]) -> list[str]:
    """Σ own = P·mean and bitwise equal means, for every collective, kind and shape, and receives posted before sends;
    returns what is wrong."""
    dist.init_process_group("gloo")
    size, rank = dist.get_world_size(), dist.get_rank()
    wrong, posted = [], dist.batch_isend_irecv

    def post(operations: list[dist.P2POp]) -> list[dist.Work]:
        sends = [operation.op is dist.isend for operation in operations]
        if sends != sorted(sends):
            wrong.append("a receive was posted behind a send")
        return posted(operations)

    with mock.patch.object(dist, "batch_isend_irecv", post):
        for name, collective in COLLECTIVES.items():
            for shape in shapes:
                runs = []
                for kind in KINDS:
                    state: dict[str, Tensor] = {}
                    for step in range(2):
                        u = gradient(kind, shape, rank, size, step)
                        mean, own = collective.exchange(u, state=state, step=step, seed=step)
                        runs.append((f"{name}, {kind} {shape}, step {step}", u, mean, own))
                wrong += _wrong(runs, size)
    dist.destroy_process_group()
    return wrong


def _wrong(runs: list[tuple[str, Tensor, Tensor, Tensor]], size: int) -> list[str]:
    """What breaks the invariants in (label, u, mean, own), with few messages for all."""
    out = [
        f"{label}: shape or values" for label, u, mean, _ in runs if mean.shape != u.shape or not mean.isfinite().all()
    ]
    means, owns = (torch.stack([run[i].reshape(-1) for run in runs]) for i in (2, 3))
    totals, scales = owns.clone(), torch.stack([u.abs().sum() for _, u, _, _ in runs])
    dist.all_reduce(totals)
    dist.all_reduce(scales)
    others = gather(means, None)
    for i, (label, u, _, _) in enumerate(runs):
        worst = float((totals[i] - size * means[i]).abs().max()) if u.numel() else 0.0
        if worst > 1e-12 * float(scales[i]) + 1e-300:
            out.append(f"{label}: sum of own differs")
        if any(not torch.equal(means[i], other[i]) for other in others):
            out.append(f"{label}: ranks differ")
    return out


def two_levels() -> list[str]:
    """Two hosts of two: real subgroups, made by their members alone."""
    dist.init_process_group("gloo")
    size, rank = dist.get_world_size(), dist.get_rank()
    runs = []
    for across in (k.Dense(), k.OkTopk(0.1, values="int8", indices="coded")):
        collective, state = k.Hierarchical(k.Quantized(8), across, per_host=2), {}
        for step in range(3):
            u = gradient("similar", (24, 31), rank, size, step)
            mean, own = collective.exchange(u, state=state, step=step, seed=step)
            runs.append((f"{across}, step {step}", u, mean, own))
    wrong = _wrong(runs, size)
    dist.destroy_process_group()
    return wrong


def conservation(steps: int) -> list[str]:
    """Σ residual′ + P·mean = Σ(residual + gradient) on each step of a run with error feedback, in float64."""
    dist.init_process_group("gloo")
    size, rank = dist.get_world_size(), dist.get_rank()
    wrong = []
    for name, collective in COLLECTIVES.items():
        channel = tw.Channel(collective, ErrorFeedback())
        before = torch.zeros(30, 40, dtype=torch.float64)
        for step in range(steps):
            g = gradient("similar", (30, 40), rank, size, step)
            expected = before + g
            mean = channel.reduce("w", g)
            before = channel.state.read("e", "w").clone()
            left = before.clone()
            dist.all_reduce(left)
            dist.all_reduce(expected)
            if float((left + size * mean - expected).norm()) > 1e-9 * float(expected.norm()):
                wrong.append(f"{name}: mass lost at step {step}")
                break
    dist.destroy_process_group()
    return wrong


def group_memories() -> dict[str, list[float]]:
    """Distance of y from the true mean of fixed gradients over 60 steps: shifts must learn them."""
    dist.init_process_group("gloo")
    size, rank = dist.get_world_size(), dist.get_rank()
    g = gradient("unlike", (200,), rank, size, 0)
    mean = g.clone()
    dist.all_reduce(mean)
    mean /= size
    rows = {
        "DCGD": (k.Gather(RandK(0.3)), Plain()), "DIANA": (k.Gather(RandK(0.3)), Diana()),
        "DIANA, dither": (k.Gather(NaturalDither(4)), Diana()), "Rand-DIANA": (k.Gather(RandK(0.3)), RandDiana(0.3)),
        "EF21": (k.Gather(TopK(0.1)), EF21()), "EF21, two hops": (k.TwoHop(Quantize(4)), EF21()),
    }  # fmt: skip
    out = {}
    for name, (collective, memory) in rows.items():
        channel = tw.Channel(collective, memory)
        errors = []
        for _ in range(60):
            channel.begin()
            errors.append(float((channel.reduce("w", g) - mean).norm() / mean.norm()))
            channel.commit()
        out[name] = errors
    dist.destroy_process_group()
    return out
