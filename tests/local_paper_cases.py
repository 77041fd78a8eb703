"""The presets of local steps are the published algorithms: fifty rounds of each beside straight-line code."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from local_support import Net, Sites, inner_of, train, trained
from rank_cases import check, check_equal, check_ranks_agree
from torch import Tensor

from thinwire.parallel import LocalSteps

ROUNDS, HIDDEN = 50, 128  # two tiles per matrix
Residuals = dict[tuple[int, str], Tensor]


def rounded(scale: Tensor, up: bool) -> Tensor:
    """A scale with 7 significant bits."""
    mantissa, exponent = torch.frexp(scale)
    return torch.ldexp((torch.ceil if up else torch.round)(mantissa * 128) / 128, exponent)


def site_of(preset: str | dict[str, Any], every: int, **how: int) -> tuple[Net, LocalSteps, int]:
    """This rank's model after fifty rounds, and how many steps that took; all sites have one anchor."""
    model = Net(HIDDEN)
    inner = inner_of(model)
    local = LocalSteps(model.named_parameters(), inner, preset, every=every, **how)
    steps = every * ROUNDS
    for step in range(1, steps + 1):
        train(model, inner, step, dist.get_rank())
        local.step()
    with local.at_anchor():
        check_ranks_agree("anchors", trained(model))
    return model, local, steps


def is_checked(local: LocalSteps) -> bool:
    """Straight-line code of all sites is run by the first one; the others have nothing left to do."""
    local.close()
    return dist.get_rank() == 0


def nesterov(anchor: Tensor, mean: Tensor, velocity: Tensor, momentum: float = 0.9, lr: float = 0.7) -> Tensor:
    """v ← µ v + Δ ;  anchor ← anchor − lr (Δ + µ v), rounded as torch does. The velocity is changed in place."""
    velocity.mul_(momentum).add_(mean)
    return anchor.add(mean.add(velocity, alpha=momentum), alpha=-lr)


def diloco_is_the_published_algorithm() -> None:
    """arXiv 2311.08105: Δ = mean of (anchor − θ_i), Nesterov outside, all sites restart from the anchor."""
    model, local, steps = site_of("diloco", 1)
    if not is_checked(local):
        return
    sites = Sites(dist.get_world_size(), HIDDEN)
    velocity = {name: torch.zeros_like(a) for name, a in sites.anchor.items()}
    for step in range(1, steps + 1):
        sites.train(step)
        for name in sites.anchor:
            sites.anchor[name] = nesterov(sites.anchor[name], sites.mean(name), velocity[name])
            for site in range(len(sites.models)):
                sites.weights(site)[name].copy_(sites.anchor[name])
    check_equal("weights", trained(model), sites.weights(0), tolerance=1e-5)
    check((local.rounds, local.settings.fragments) == (ROUNDS, 1), f"{local.rounds} rounds")


def fp4(x: Tensor) -> Tensor:
    """E3M0 in blocks of 128: the nearest of 0 and ±s·2^−j, j = 0 … 6, s the block's largest magnitude."""
    out = torch.empty_like(x)
    for start in range(0, x.numel(), 128):
        part = x[start : start + 128]
        levels = torch.cat((rounded(part.abs().max(), up=True) * 2.0 ** -torch.arange(7.0), torch.zeros(1)))
        nearest = levels[(part.abs()[:, None].double() - levels).abs().argmin(1)]  # the larger of two that are as near
        out[start : start + 128] = torch.copysign(nearest, part)
    return out


def streaming_diloco_is_the_published_algorithm() -> None:
    """arXiv 2501.18512: fragment p is sent at its own offset as fp4, applied a step later by Nesterov, and half of the
    local weights is kept."""
    size = dist.get_world_size()
    model, local, steps = site_of("streaming-diloco", 2, fragments=2)
    if not is_checked(local):
        return
    sites = Sites(size, HIDDEN)
    velocity = {name: torch.zeros_like(a) for name, a in sites.anchor.items()}
    under_way: dict[int, tuple[int, dict[str, Tensor]]] = {}
    for step in range(1, steps + 1):
        sites.train(step)
        for number in [n for n, (due, _) in under_way.items() if due == step]:
            for name, mean in under_way.pop(number)[1].items():
                sites.anchor[name] = nesterov(sites.anchor[name], mean, velocity[name])
                for site in range(size):
                    weight = sites.weights(site)[name]
                    weight.copy_(0.5 * weight + 0.5 * sites.anchor[name])
        for number, fragment in enumerate(local.fragments):
            if step % 2 == number:
                means: dict[str, Tensor] = {}
                for unit in fragment.units:  # tensors are coded one after the other; a scalar is sent as it is
                    sent = []
                    for site in range(size):
                        weights = sites.weights(site)
                        flat = torch.cat([(sites.anchor[n] - weights[n]).reshape(-1) for n in unit.parameters])
                        sent.append(flat if unit.exact else fp4(flat))
                    mean = sum(sent[1:], start=sent[0]) / size
                    means |= {n: mean[span].view(shape) for n, span, shape in unit.spans()}
                under_way[number] = step + 1, means
    check_equal("weights", trained(model), sites.weights(0), tolerance=1e-4)
    check(local.rounds == 2 * ROUNDS - 1, f"{local.rounds} rounds of two fragments, the last under way")


def bin_means(values: Tensor) -> Tensor:
    """SparseLoCo's two bits: subtract the mean, four bins of 6σ/4, each decoded to the mean of what fell into it."""
    centred = values - values.mean()
    sigma = centred.norm() / math.sqrt(max(1, values.numel() - 1))
    codes = (centred / (6 * sigma / 4) + 2).round().clamp(0, 3) if sigma > 0 else torch.full_like(values, 2)
    out = torch.empty_like(values)
    for code in range(4):
        out[codes == code] = values[codes == code].mean()
    return out


def two_levels(values: Tensor) -> Tensor:
    """Signs, and the two magnitudes of least squared error, found by trying all ways to cut the sorted ones in two."""
    sorted_ = values.abs().sort().values
    best = (math.inf, sorted_.mean(), sorted_.mean())
    for cut in range(1, values.numel()):
        low, high = sorted_[:cut].mean(), sorted_[cut:].mean()
        error = float((sorted_[:cut] - low).square().sum() + (sorted_[cut:] - high).square().sum())
        best = min(best, (error, low, high), key=lambda found: found[0])
    low, high = (rounded(level, up=False) for level in best[1:])
    return torch.copysign(torch.where(values.abs() > (low + high) / 2, high, low), values)


def sparse(u: Tensor, values_code) -> Tensor:
    """The 64 largest of every 64 × 64 tile (of 4,096 in a row), as many in proportion of a smaller one."""
    matrix = u.view(1, -1) if u.dim() < 2 else u
    high, wide = (1, 4096) if u.dim() < 2 else (64, 64)
    chosen = torch.zeros_like(matrix, dtype=torch.bool)
    for top in range(0, matrix.shape[0], high):
        for left in range(0, matrix.shape[1], wide):
            tile = matrix[top : top + high, left : left + wide]
            order = tile.abs().reshape(-1).sort(descending=True, stable=True).indices[: math.ceil(tile.numel() / 64)]
            mark = torch.zeros(tile.numel(), dtype=torch.bool)
            mark[order] = True
            chosen[top : top + high, left : left + wide] = mark.view(tile.shape)
    out = torch.zeros_like(matrix)
    out[chosen] = values_code(matrix[chosen])
    return out.view(u.shape)


def _sent(residuals: Residuals, site: int, name: str, moved: Tensor, values_code) -> Tensor:
    """e ← 0.95 e + Δ ;  send its largest ;  e ← e − what was sent."""
    if not moved.dim():
        return moved
    kept = 0.95 * residuals.get((site, name), torch.zeros_like(moved))
    sent = sparse(moved + kept, values_code)
    residuals[site, name] = kept + (moved - sent)
    return sent


def sparseloco_is_the_published_algorithm() -> None:
    """arXiv 2508.15706: error feedback, top 64 of every tile, two bits, plain SGD outside."""
    size = dist.get_world_size()
    model, local, steps = site_of("sparseloco", 1)
    if not is_checked(local):
        return
    sites, residuals = Sites(size, HIDDEN), {}
    for step in range(1, steps + 1):
        sites.train(step)
        for name in sites.anchor:
            mean = sites.mean(name, lambda site, x, name=name: _sent(residuals, site, name, x, bin_means))
            sites.anchor[name] = sites.anchor[name] - mean
            for site in range(size):
                sites.weights(site)[name].copy_(sites.anchor[name])
    check_equal("weights", trained(model), sites.weights(0), tolerance=1e-4)
    check(local.summary().ratio > 20, f"one step per round: {local.summary()}")


CASES = [
    diloco_is_the_published_algorithm, streaming_diloco_is_the_published_algorithm,
    sparseloco_is_the_published_algorithm,
]  # fmt: skip
