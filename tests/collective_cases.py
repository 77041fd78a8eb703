"""Cases of the collective tests: nothing is lost, all ranks agree to the bit, and shifts learn fixed gradients."""

from __future__ import annotations

import functools
from unittest import mock

import torch
import torch.distributed as dist
from rank_cases import check
from torch import Tensor

import thinwire as tw
from thinwire import collectives as k
from thinwire.codecs import NaturalDither, Quantize, RandK, TopK
from thinwire.collectives.messages import gather
from thinwire.memory import EF21, Diana, ErrorFeedback, Memory, Plain, RandDiana

COLLECTIVES = {
    "dense": k.Dense(), "gather 4 bits": k.Gather(Quantize(4)), "gather randk": k.Gather(RandK(0.2)),
    "topk allgather": k.TopkAllgather(0.05), "two hops 4 bits": k.Quantized(4), "two hops topk": k.TwoHop(TopK(0.1)),
    "low rank": k.LowRank(2), "alternating": k.AlternatingLowRank(2),
    "alternating 4 bits": k.AlternatingLowRank(2, factors=k.Quantized(4)),
    "dsa": k.TopkDSA(0.05), "dsa coded": k.TopkDSA(0.05, "int8", "coded"),
    "gtopk": k.GTopk(0.05), "gtopk coded": k.GTopk(0.05, "bf16", "coded"),
    "oktopk": k.OkTopk(0.05, tau=3, tau_prime=2), "oktopk coded": k.OkTopk(0.05, 4, 3, "int8", "coded"),
    "oktopk bf16": k.OkTopk(0.02, 5, 4, "bf16", "int32"),
    "hierarchical": k.Hierarchical(k.Dense(), k.OkTopk(0.1), 1),
}  # fmt: skip
SHAPES = [(24, 30), (5,), (0,)]
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


def means_are_equal_and_owns_sum_to_them(name: str) -> None:
    """Σ own = P·mean and bitwise equal means, for every kind and shape, and receives posted before sends."""
    size, rank, collective = dist.get_world_size(), dist.get_rank(), COLLECTIVES[name]
    post = dist.batch_isend_irecv

    def checked(operations: list[dist.P2POp]) -> list[dist.Work]:
        sends = [operation.op is dist.isend for operation in operations]
        check(sends == sorted(sends), f"a receive was posted behind a send: {sends}")
        return post(operations)

    with mock.patch.object(dist, "batch_isend_irecv", checked):
        for shape in SHAPES:
            runs = []
            for kind in KINDS:
                state: dict[str, Tensor] = {}
                for step in range(2):
                    u = gradient(kind, shape, rank, size, step)
                    mean, own = collective.exchange(u, state=state, step=step, seed=step)
                    runs.append((f"{kind} {shape}, step {step}", u, mean, own))
            check_runs(runs)


def check_runs(runs: list[tuple[str, Tensor, Tensor, Tensor]]) -> None:
    """The invariants of each (label, u, mean, own), with few messages for all."""
    size = dist.get_world_size()
    for label, u, mean, _ in runs:
        check(mean.shape == u.shape, f"{label}: the mean's shape is {tuple(mean.shape)}, not {tuple(u.shape)}")
        check(mean.isfinite().all(), f"{label}: the mean is not finite")
    means = torch.stack([mean.reshape(-1) for _, _, mean, _ in runs])
    totals = torch.stack([own.reshape(-1) for _, _, _, own in runs])
    scales = torch.stack([u.abs().sum() for _, u, _, _ in runs])
    dist.all_reduce(totals)
    dist.all_reduce(scales)
    others = gather(means, None)
    for i, (label, u, _, _) in enumerate(runs):
        worst = float((totals[i] - size * means[i]).abs().max()) if u.numel() else 0.0
        check(worst <= 1e-12 * float(scales[i]) + 1e-300, f"{label}: the sum of own differs by {worst:.1e}")
        differ = [r for r, other in enumerate(others) if not torch.equal(means[i], other[i])]
        check(not differ, f"{label}: ranks {differ} hold other means")


def two_levels_with_subgroups_made_by_their_members() -> None:
    """Two hosts of two."""
    size, rank = dist.get_world_size(), dist.get_rank()
    for across in (k.Dense(), k.OkTopk(0.1, values="int8", indices="coded")):
        collective, state, runs = k.Hierarchical(k.Quantized(8), across, per_host=2), {}, []
        for step in range(3):
            u = gradient("similar", (24, 31), rank, size, step)
            mean, own = collective.exchange(u, state=state, step=step, seed=step)
            runs.append((f"{across}, step {step}", u, mean, own))
        check_runs(runs)


def error_feedback_conserves_the_gradients_sum(name: str, steps: int = 12) -> None:
    """Σ residual′ + P·mean = Σ(residual + gradient) on each step, in float64."""
    size, rank = dist.get_world_size(), dist.get_rank()
    channel = tw.Channel(COLLECTIVES[name], ErrorFeedback())
    before = torch.zeros(30, 40, dtype=torch.float64)
    for step in range(steps):
        g = gradient("similar", (30, 40), rank, size, step)
        expected = before + g
        mean = channel.reduce("w", g)
        before = channel.state.read("e", "w").clone()
        left = before.clone()
        dist.all_reduce(left)
        dist.all_reduce(expected)
        lost = float((left + size * mean - expected).norm())
        check(lost <= 1e-9 * float(expected.norm()), f"step {step}: lost {lost:.1e}")


SHIFTS = {
    "DIANA": (k.Gather(RandK(0.3)), Diana()), "DIANA, dither": (k.Gather(NaturalDither(4)), Diana()),
    "Rand-DIANA": (k.Gather(RandK(0.3)), RandDiana(0.3)), "EF21": (k.Gather(TopK(0.1)), EF21()),
    "EF21, two hops": (k.TwoHop(Quantize(4)), EF21()),
}  # fmt: skip


def shift_learns_fixed_gradients(name: str) -> None:
    errors = _errors(*SHIFTS[name])
    check(errors[-1] < 1e-3 * errors[0] + 1e-6, f"error {errors[0]} fell to {errors[-1]}")


def without_a_shift_the_error_stays() -> None:
    last = _errors(k.Gather(RandK(0.3)), Plain())[-1]
    check(last > 0.2, f"error {last}")


def _errors(collective: k.Collective, memory: Memory) -> list[float]:
    """Distance of y from the true mean of fixed gradients over 60 steps."""
    size, rank = dist.get_world_size(), dist.get_rank()
    g = gradient("unlike", (200,), rank, size, 0)
    mean = g.clone()
    dist.all_reduce(mean)
    mean /= size
    channel, errors = tw.Channel(collective, memory), []
    for _ in range(60):
        channel.begin()
        errors.append(float((channel.reduce("w", g) - mean).norm() / mean.norm()))
        channel.commit()
    return errors


CASES = [
    *(functools.partial(means_are_equal_and_owns_sum_to_them, name) for name in COLLECTIVES),
    *(functools.partial(error_feedback_conserves_the_gradients_sum, name) for name in COLLECTIVES),
    *(functools.partial(shift_learns_fixed_gradients, name) for name in SHIFTS),
    without_a_shift_the_error_stays,
]
