"""AdamW for the inner steps of stacked sites that average: as long steps as those on all sites' common batch.

    r_i = Σ ±g_i over a block of values, the same random signs on all sites
    ρ = EMA (mean r)² / EMA mean r²   ≈ ‖mean g‖² / mean ‖g‖², between 1/P and 1 ;   θ ← θ − lr · m̂ / √(ρ·v̂)

A site's squared gradients are signal and noise, the mean's have P times less of the noise. Plain Adam therefore makes
steps on a site up to √P times shorter than on the common batch, and what sites average is too short. Only the sites
together can tell noise, which differs between them, from signal, which does not; one number per block and step will do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BLOCK = 65536  # values that have one ratio
MEMORY = 0.98  # of the moving averages


class NoiseRatio:
    """ρ of blocks of gradients. average: [sites here, numbers] → their mean over all sites; sites: P."""

    def __init__(self, average: Callable[[Tensor], Tensor], sites: int) -> None:
        self.average, self.sites = average, sites
        self.squares: Tensor | None = None  # [2, blocks]: of the mean, and the mean of squares
        self.steps = 0

    def update(self, gradients: Tensor) -> Tensor:
        """[blocks]; gradients: [sites here, values]."""
        count = gradients.shape[1]
        block = BLOCK if count % BLOCK == 0 else count
        generator = torch.Generator(gradients.device).manual_seed(self.steps)
        signs = torch.randint(0, 2, (count,), generator=generator, device=gradients.device, dtype=torch.int8)
        sketch = (gradients * signs.mul_(2).sub_(1)).view(len(gradients), -1, block).sum(2)
        mean = self.average(torch.cat((sketch, sketch.square()), 1))
        first, second = mean.view(2, -1)
        now = torch.stack((first.square(), second))
        self.squares = now if self.squares is None else self.squares.lerp_(now, 1 - MEMORY)
        self.steps += 1
        return (self.squares[0] / self.squares[1].clamp(min=1e-38)).clamp(1 / self.sites, 1.0)


class SiteAdamW(torch.optim.Optimizer):
    """AdamW on one flat parameter per site, float[sites here, values], with ρ·v̂ for v̂.

    parameter, lr, betas, eps, weight_decay: as AdamW's. ratio: of its gradients.
    """

    def __init__(
        self, parameter: Tensor, ratio: NoiseRatio, lr: float, betas: tuple[float, float], weight_decay: float,
        eps: float = 1e-8,
    ) -> None:  # fmt: skip
        super().__init__([parameter], {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.ratio, self.steps = ratio, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One inner step, on all sites."""
        group = self.param_groups[0]
        parameter = group["params"][0]
        gradients, state, (first, second) = parameter.grad, self.state[parameter], group["betas"]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        self.steps += 1
        m, v = state["exp_avg"], state["exp_avg_sq"]
        m.lerp_(gradients, 1 - first)
        v.mul_(second).addcmul_(gradients, gradients, value=1 - second)
        grown, grown2 = 1 - first**self.steps, 1 - second**self.steps
        ratio = self.ratio.update(gradients) / grown2
        root = (v.view(len(v), len(ratio), -1) * ratio[:, None]).view_as(v).sqrt_().add_(group["eps"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(m, root, value=-group["lr"] / grown)


class SignalAdamW(torch.optim.Optimizer):
    """AdamW on one flat parameter per site, float[sites here, values], that takes P times less of the noise:

        v' = v/P + (1 − 1/P)·s² ,   s² = what is left of the square of a mean of gradients after its own noise

    Nothing is sent. "m": the mean is Adam's first moment; "slow": one over fifty steps.
    """

    def __init__(
        self, parameter: Tensor, sites: int, kind: str, lr: float, betas: tuple[float, float], weight_decay: float,
        eps: float = 1e-8,
    ) -> None:  # fmt: skip
        super().__init__([parameter], {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.sites, self.kind, self.steps = sites, kind, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One inner step, on all sites."""
        group = self.param_groups[0]
        parameter = group["params"][0]
        g, state, (first, second) = parameter.grad, self.state[parameter], group["betas"]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            if self.kind == "slow":
                state["slow"] = torch.zeros_like(parameter)
        self.steps += 1
        m, v = state["exp_avg"], state["exp_avg_sq"]
        m.lerp_(g, 1 - first)
        v.mul_(second).addcmul_(g, g, value=1 - second)
        mean, beta = m, first
        if self.kind == "slow":
            mean, beta = state["slow"].lerp_(g, 0.02), 0.98
        grown = 1 - beta**self.steps
        part = (1 - beta) / (1 + beta) * (1 - beta ** (2 * self.steps)) / grown**2  # of the noise, in the mean's square
        full = v / (1 - second**self.steps)
        signal = ((mean / grown).square_() - part * full).clamp_(min=0).div_(max(1 - part, 1e-3))
        full.div_(self.sites).add_(torch.minimum(signal, full * self.sites), alpha=1 - 1 / self.sites)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(m, full.sqrt_().add_(group["eps"]), value=-group["lr"] / (1 - first**self.steps))
