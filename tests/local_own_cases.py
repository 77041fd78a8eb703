"""Our own local steps are their formulas: fifty rounds of each beside straight-line code."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from local_paper_cases import HIDDEN, is_checked, nesterov, rounded, site_of, sparse, two_levels
from local_support import Sites, trained
from rank_cases import check, check_equal
from torch import Tensor

from thinwire.codecs import Codec, Quantize
from thinwire.codecs.lowrank import gaussian
from thinwire.kernels.random import derive


def in_blocks(codec: Codec) -> Callable[[Tensor], Tensor]:
    """What a flat tensor is decoded to."""
    return lambda x: codec.decode(codec.encode(x), x.shape, x.dtype)


def two_hops(sites: list[Tensor], coded: Callable[[Tensor], Tensor], block: int) -> tuple[Tensor, list[Tensor]]:
    """(mean, everybody's part of it) of flat messages: a quarter each goes to its owner and back, in whole blocks."""
    size, n = len(sites), sites[0].numel()
    chunk = math.ceil(n / size / block) * block
    own = [torch.cat([coded(part) for part in x.split(chunk)]) for x in sites]
    mean = torch.zeros(n)
    for owner, start in enumerate(range(0, n, chunk)):
        span = slice(start, start + chunk)
        total = sum((x[span] for x in own[1:]), start=own[0][span])
        mean[span] = coded(total / size)
        own[owner][span] += size * mean[span] - total
    return mean, own


def product(a: Tensor, b: Tensor) -> Tensor:
    """a·b by the routine for batches of matrices, whose rounding is another one: four bits may differ after it."""
    return (a[None, None] @ b[None])[0, 0]


def one_factor_each(
    sites: list[list[Tensor]], last: list[Tensor], turn: int
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """(mean, everybody's part) of the tensors of all sites. Of a matrix, turned in every second round, its product with
    the basis is sent; that is orthonormal columns of what came out of the round before, `last`. Vectors are whole."""
    flip = [x.dim() > 1 and turn % 2 == 1 for x in sites[0]]
    bases = [torch.linalg.qr(q).Q if q.numel() else q for q in last]
    sent = [[(x.T if f else x) @ b if x.dim() > 1 else x for x, f, b in zip(tensors, flip, bases)] for tensors in sites]
    four_bits = in_blocks(Quantize(4, block=256, scale="mse"))
    messages = [torch.cat([x.T.reshape(-1) if x.dim() > 1 else x for x in tensors]) for tensors in sent]
    mean, own = two_hops(messages, four_bits, 256)
    out = []
    for whole in (mean, *own):
        pieces = whole.split([x.numel() for x in sent[0]])
        factors = [p.view(x.shape[::-1]).T if x.dim() > 1 else p for p, x in zip(pieces, sent[0])]
        if whole is mean:
            last[:] = [f if f.dim() > 1 else q for f, q in zip(factors, last)]
        found = [product(f, b.T) if f.dim() > 1 else f for f, b in zip(factors, bases)]
        out.append([x.T if f else x for x, f in zip(found, flip)])
    return out[0], out[1:]


def low_rank_is_its_formula() -> None:
    """Of u = anchor − θ one factor is sent; what is left of it stays in the site: θ = anchor − e."""
    size = dist.get_world_size()
    codec = {"codec": "quantize", "bits": 4, "block": 256, "scale": "mse"}
    wire = {"collective": "alternating_low_rank", "rank": 2, "factors": {"collective": "two_hop", "codec": codec}}
    table = {"wire": {"gradient": {**wire, "exact_dims": 0}}, "keep": 1.0, "outer_lr": 1.0, "momentum": 0.5}
    model, local, steps = site_of(table, 1)
    if not is_checked(local):
        return
    sites = Sites(size, HIDDEN)
    velocity = {name: torch.zeros_like(a) for name, a in sites.anchor.items()}
    names = [name for name, a in sites.anchor.items() if a.dim()]
    first = [gaussian(a.shape[1] * 2, derive("alternating"), "cpu").view(-1, 2) if a.dim() > 1 else a.new_zeros(0)
             for a in (sites.anchor[name] for name in names)]  # fmt: skip
    left = [[torch.zeros_like(sites.anchor[name]) for name in names] for _ in range(size)]
    for step in range(1, steps + 1):
        sites.train(step)
        scale = sites.mean("scale")
        moved = [
            [sites.anchor[n] - e - sites.weights(site)[n] for n, e in zip(names, left[site])] for site in range(size)
        ]
        away = [[x + e for x, e in zip(moved[site], left[site])] for site in range(size)]  # anchor − θ, rounded alike
        mean, own = one_factor_each(away, first, step - 1)
        for name, one in [*zip(names, mean), ("scale", scale)]:
            sites.anchor[name] = nesterov(sites.anchor[name], one, velocity[name], momentum=0.5, lr=1.0)
        for site in range(size):
            left[site] = [e + (x - sent) for x, e, sent in zip(moved[site], left[site], own[site])]
            for name, e in zip(names, left[site]):
                sites.weights(site)[name].copy_(sites.anchor[name] - e)
            sites.weights(site)["scale"].copy_(sites.anchor["scale"])
    check_equal("weights", trained(model), sites.weights(0), tolerance=1e-4)
    check(local.summary().ratio > 20, f"one step per round: {local.summary()}")


def ours_is_its_formula() -> None:
    """Of u = anchor − θ + e/2 the largest are sent, e is what is left, times 0.95; half of e stays in the site:
    θ = anchor − e/2. The anchor moves by three means."""
    size = dist.get_world_size()
    model, local, steps = site_of("local-max", 1, delay=0)
    if not is_checked(local):
        return
    sites = Sites(size, HIDDEN)
    left = [{name: torch.zeros_like(a) for name, a in sites.anchor.items()} for _ in range(size)]
    for step in range(1, steps + 1):
        sites.train(step)
        for name, anchor in sites.anchor.items():
            u = [anchor - sites.weights(site)[name] + left[site][name] / 2 for site in range(size)]
            sent = [sparse(x, two_levels) if x.dim() else x for x in u]
            sites.anchor[name] = anchor - 3 * sum(sent[1:], start=sent[0]) / size
            for site in range(size):
                left[site][name] = 0.95 * (u[site] - sent[site])
                sites.weights(site)[name].copy_(sites.anchor[name] - left[site][name] / 2)
    check_equal("weights", trained(model), sites.weights(0), tolerance=1e-4)
    check(local.summary().ratio > 20, f"one step per round: {local.summary()}")


def signs(x: Tensor) -> Tensor:
    """Every value's sign times the mean magnitude of its 512, which is summed in steps of 2^-20 of the largest."""
    out = []
    for part in x.split(512):
        top, grid = part.abs().max(), 2.0**20
        total = (part.abs() / top * grid).round().double().sum() if top else part.new_zeros(())
        mean = rounded((top.double() * total / (part.numel() * grid)).float(), up=False)
        out.append(torch.where(part < 0, -mean, mean))
    return torch.cat(out)


def signs_are_their_formula() -> None:
    """Of anchor − θ the signs are sent in two hops; what is left of it stays in the site: θ = anchor − e."""
    size = dist.get_world_size()
    model, local, steps = site_of("local-signs", 1)
    units = [unit for fragment in local.fragments for unit in fragment.units if not unit.exact]
    if not is_checked(local):
        return
    sites = Sites(size, HIDDEN)
    left = {unit: [torch.zeros(unit.numel) for _ in range(size)] for unit in units}
    for step in range(1, steps + 1):
        sites.train(step)
        scale = sites.anchor["scale"] - sites.mean("scale")
        for unit in units:
            anchor, *weights = [
                torch.cat([tensors[n].reshape(-1) for n in unit.parameters])
                for tensors in (sites.anchor, *map(sites.weights, range(size)))
            ]
            moved = [anchor - e - x for e, x in zip(left[unit], weights)]
            mean, own = two_hops([x + e for x, e in zip(moved, left[unit])], signs, 512)
            left[unit] = [e + (x - sent) for e, x, sent in zip(left[unit], moved, own)]
            for name, span, shape in unit.spans():
                sites.anchor[name] = (anchor - mean)[span].view(shape)
                for site, e in enumerate(left[unit]):
                    sites.weights(site)[name].copy_(sites.anchor[name] - e[span].view(shape))
        sites.anchor["scale"] = scale
        for site in range(size):
            sites.weights(site)["scale"].copy_(scale)
    check_equal("weights", trained(model), sites.weights(0), tolerance=1e-4)
    check(local.summary().ratio > 15, f"one step per round: {local.summary()}")


CASES = [ours_is_its_formula, low_rank_is_its_formula, signs_are_their_formula]
