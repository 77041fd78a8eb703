"""Ok-Topk's exchange of all workers between two re-estimations, as one Triton kernel: one pass over their gradients."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.gpu.launch import launch

SIZE = 1024  # values of every worker that a program handles


@triton.jit(do_not_specialize=["n"])
def _exchange(
    gradients, residuals, mean, local, overall, bounds, shift, counts, n, P: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """counts: int32[P·P + P], selected by worker and region, then passed by region; added to."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < n
    region = tl.zeros([SIZE], tl.int32)
    for edge in tl.static_range(1, P):
        region += (at >= tl.load(bounds + edge)).to(tl.int32)
    region = tl.where(inside, region, -1)
    owner = (region + tl.load(shift).to(tl.int32) + P) % P
    total = tl.zeros([SIZE], tl.float32)
    for step in tl.static_range(P):  # the owner's own first, then the members before it
        member = (owner + (P - step)) % P
        place = member.to(tl.int64) * n + at
        u = tl.load(residuals + place, mask=inside, other=0.0) + tl.load(gradients + place, mask=inside, other=0.0)
        taken = tl.where(tl.abs(u) >= tl.load(local + member), u, 0.0)
        total = taken if step == 0 else total + taken
    passed = tl.abs(total) >= tl.load(overall)
    tl.store(mean + at, tl.where(passed, tl.math.div_rn(total, tl.full([SIZE], P, tl.float32)), 0.0), mask=inside)
    first, last = tl.min(tl.where(inside, region, P)), tl.max(region)
    for worker in tl.static_range(P):
        place = worker * n.to(tl.int64) + at
        g = tl.load(gradients + place, mask=inside, other=0.0)
        e = tl.load(residuals + place, mask=inside, other=0.0)
        u = e + g
        chosen = inside & (tl.abs(u) >= tl.load(local + worker))
        tl.store(residuals + place, e + (g - tl.where(chosen & passed, u, 0.0)), mask=inside)
        for j in range(first, last + 1):
            tl.atomic_add(counts + worker * P + j, tl.sum((chosen & (region == j)).to(tl.int32)), sem="relaxed")
    for j in range(first, last + 1):
        tl.atomic_add(counts + P * P + j, tl.sum((inside & passed & (region == j)).to(tl.int32)), sem="relaxed")


def exchange(
    gradients: Tensor, residuals: Tensor, local: Tensor, overall: Tensor, bounds: Tensor, shift: Tensor, counts: Tensor
) -> Tensor:
    """The mean of what passes; residuals are changed in place, counts added to.

    gradients, residuals: float32[workers, n]. local, overall: float32[workers] and [1], thresholds. bounds:
    int64[workers + 1]. shift: int64[1]. counts: int32, as `_exchange` has them.
    """
    size, n = gradients.shape
    mean = torch.empty(n, device=gradients.device)
    given = gradients, residuals, mean, local, overall, bounds, shift, counts
    launch(_exchange, triton.cdiv(n, SIZE), *given, n, P=size, SIZE=SIZE)
    return mean
