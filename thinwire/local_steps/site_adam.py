"""AdamW for the inner steps of one of several sites: steps as long as those of all sites' common batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class SiteAdamW(torch.optim.Optimizer):
    """AdamW, but for its denominator: √(v̂/P + (1 − 1/P)·m̂²) instead of √v̂.

    A site's gradient is signal and noise, E g² = s² + n². The mean over P sites has s² + n²/P only. So plain Adam makes
    the step shorter on a site than on the common batch, up to √P times, and what sites average is too short. Here v̂/P +
    (1 − 1/P)·m̂² estimates s² + n²/P, since m̂ is mostly signal. With one site it is AdamW. Averaging makes up for the
    noise of the longer steps.

    parameters, lr, betas, eps, weight_decay: as torch's AdamW. sites: P, how many average.
    """

    def __init__(
        self, parameters: Iterable[Tensor] | Iterable[dict[str, Any]], lr: float = 1e-3, *, sites: int,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.01,
    ) -> None:  # fmt: skip
        if sites < 1:
            raise ValueError(f"sites = {sites}: must be 1 or more")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "sites": sites}
        super().__init__(parameters, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One inner step. closure: not taken."""
        if closure is not None:
            raise ValueError("SiteAdamW takes no closure")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        m, v, (first, second), sites = state["exp_avg"], state["exp_avg_sq"], group["betas"], group["sites"]
        m.lerp_(gradient, 1 - first)
        v.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        grown, grown2 = (1 - beta ** float(state["step"]) for beta in (first, second))
        square = m.square().mul_((1 - 1 / sites) / grown**2).add_(v, alpha=1 / (sites * grown2))
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(m, square.sqrt_().add_(group["eps"]), value=-group["lr"] / grown)
