"""The stacked sites of benchmarks/quality are LocalSteps and Reducer between processes, bit for bit."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_cases import check, check_equal
from torch import Tensor, nn

from thinwire.parallel import LocalSteps, Reducer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks" / "quality"))
from frontier_jobs import dense, low, sparse
from local_real import two_hops
from stacked_llama import Llama
from stacked_model import Size
from stacked_run import clip
from stacked_sites import LocalSites, PerStep, per_step_wire, table_of

SIZE = Size(width=96, layers=2, length=16)  # tiles at the edges are smaller
LLAMA = Llama(width=96, layers=2, heads=3, groups=1, inside=160, vocabulary=256, length=16)  # has vectors, too
Sizes = Size | Llama
STEPS = 10
TABLES: dict[str, tuple[dict[str, Any], int]] = {
    "diloco": ({"preset": "diloco"}, 3),
    "streaming": ({"preset": "streaming-diloco", "fragments": 2}, 4),
    "sparseloco": ({"preset": "sparseloco"}, 3),
    "local-max": ({"preset": "local-max"}, 3),
    "local-signs": ({"preset": "local-signs"}, 3),
    "two hops": (sparse(momentum=0.5), 3),
    "two hops, last round in four bits": (sparse(), 5),  # a round is under way when training ends
    "low rank": (low(rank=4), 2),
    "two bits": (dense(2), 3),
    "two bits, kept, in fragments": (two_hops(4, 0.0, outer=1.4, fragments=2).table, 4),
    "kept": (sparse(hops=False, k=16, decay=0.98, delay=0, momentum=0.5, keep=1.0), 2),
    "kept, ever rarer": ({**sparse(hops=False, k=16, delay=1, keep=1.0), "grow": 2}, 4),
    "half kept in two hops, last round in four bits": (sparse(keep=0.5), 5),
}
OF_LLAMA = ("streaming", "sparseloco", "local-max", "local-signs", "two bits, kept, in fragments")


def _rows(step: int, site: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + site)
    return torch.randint(0, 256, (1, 2, 17), generator=generator)


def _gradient(flat: Tensor, step: int, site: int, size: Sizes = SIZE) -> Tensor:
    """Of one site, flat."""
    weights = {name: w.detach().requires_grad_() for name, w in size.views(flat[None]).items()}
    found = torch.autograd.grad(size.losses(weights, _rows(step, site)).sum(), list(weights.values()))
    return torch.cat([g.flatten(1) for g in found], 1)


def _inner(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


class _Real:
    """This rank's site."""

    def __init__(self, size: Sizes = SIZE) -> None:
        self.shapes = size.shapes()
        self.parameters = {name: nn.Parameter(w) for name, w in self.apart(size.initial(0)).items()}
        self.inner = _inner(list(self.parameters.values()))

    def apart(self, flat: Tensor) -> dict[str, Tensor]:
        parts = flat.split([math.prod(shape) for shape in self.shapes.values()])
        return {name: part.view(shape).clone() for (name, shape), part in zip(self.shapes.items(), parts)}

    def flat(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.parameters.values()])

    def give(self, gradient: Tensor) -> None:
        for p, g in zip(self.parameters.values(), self.apart(gradient[0]).values()):
            p.grad = g

    def gradient(self) -> Tensor:
        return torch.cat([p.grad.reshape(-1) for p in self.parameters.values() if p.grad is not None])[None]


class _Stacked:
    """All sites."""

    def __init__(self, sites: int, size: Sizes = SIZE) -> None:
        self.size = size
        self.parameter = nn.Parameter(size.initial(0).repeat(sites, 1))
        self.inner = _inner([self.parameter])

    def gradients(self, step: int) -> Tensor:
        rows = self.parameter.detach()
        return torch.cat([_gradient(row, step, site, self.size) for site, row in enumerate(rows)])


def stacked_sites_are_local_steps() -> None:
    """Anchors, weights and bytes of every table."""
    runs: list[tuple[str, Sizes]] = [(name, SIZE) for name in TABLES]
    for name, size in runs + [(name, LLAMA) for name in OF_LLAMA]:
        table, every = TABLES[name]
        real = _Real(size)
        local = LocalSteps(real.parameters.items(), real.inner, table_of(table, every))
        for step in range(STEPS):
            gradient = _gradient(real.flat(), step, dist.get_rank(), size)
            clip(gradient)
            real.give(gradient)
            real.inner.step()
            local.step()
        own, flushes = real.flat(), "last round" in name
        local.finish(last="max" if flushes else None)
        anchor, sent = real.flat(), local.summary().sent
        local.close()
        if dist.get_rank():  # all sites are run by the first one; the others have nothing left to do
            continue
        stacked = _Stacked(dist.get_world_size(), size)
        sites = LocalSites(stacked.parameter.data, table_of(table, every), size)
        for step in range(STEPS):
            gradients = stacked.gradients(step)
            clip(gradients)
            stacked.parameter.grad = gradients
            stacked.inner.step()
            sites.step()
        found = {"own": stacked.parameter.detach()[0].clone()}
        more = 0
        if flushes:
            found["anchor"], more = sites.flushed()
        else:
            sites.finish()
            found["anchor"] = sites.at_anchor()
        if name == "low rank":  # BLAS has an order of its own, and a factor's code may round the other way by it
            for what, real_one in {"own": own, "anchor": anchor}.items():
                off, moved = (found[what] - real_one).norm(), (real_one - size.initial(0)).norm()
                check(bool(off < 0.1 * moved), f"{name}, {what}: {off:.4f} apart after moving by {moved:.4f}")
        else:
            tolerance = 1e-5 if name == "diloco" else 0.0  # the backend has an order of its own
            check_equal(name, {"own": own, "anchor": anchor}, found, tolerance)
        counted = sites.bytes + more
        check(counted <= sent <= counted + 4096, f"{name}: {counted} bytes counted, {sent} sent")


def stacked_gradients_are_a_reducer() -> None:
    """The per-step wire of four bits, and the batched pass beside single ones."""
    real, reduction = _Real(), per_step_wire("max")
    reducer = Reducer(real.parameters.items(), reduction.collective)
    sites = dist.get_world_size()
    stacked, wire = _Stacked(sites), PerStep(reduction, SIZE, sites)
    for step in range(4):
        real.give(_gradient(real.flat(), step, dist.get_rank()))
        reducer.finish()
        mean = real.gradient()
        clip(mean)
        real.give(mean)
        real.inner.step()
        gradients = stacked.gradients(step)
        wire.average(gradients)
        clip(gradients)
        stacked.parameter.grad = gradients
        stacked.inner.step()
    check_equal("weights", {"": real.flat()}, {"": stacked.parameter.detach()[0]}, tolerance=0.0)
    sent = reducer.summary().sent
    check(wire.bytes <= sent <= wire.bytes + 4096, f"{wire.bytes} bytes counted, {sent} sent")
    reducer.close()
    weights = {name: w.detach().requires_grad_() for name, w in SIZE.views(stacked.parameter.detach()).items()}
    rows = torch.cat([_rows(9, site) for site in range(sites)])
    batched = torch.autograd.grad(SIZE.losses(weights, rows).sum(), list(weights.values()))
    together = torch.cat([g.flatten(1) for g in batched], 1)
    check_equal("gradients", {"": stacked.gradients(9)}, {"": together}, tolerance=1e-4)


CASES = [stacked_sites_are_local_steps, stacked_gradients_are_a_reducer]
