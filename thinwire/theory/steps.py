"""Step sizes of the theory, one rule per method: (problem, codec) → γ, and η for the methods that compress points.

"Shifted Compression Framework" (UAI 2022), with its slips corrected: theorem 3's M = 4ω/(np). ω and δ are the
codec's own; an Induced codec's ω already is ω(1 − δ), so the general forms of STAR and DIANA need no other rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.theory.mixed import Mixed
from thinwire.theory.problems import Problem


@dataclass(frozen=True)
class Step:
    """x ← x − γy, or with a mixing x ← (1 − η)x + ηy where y estimates x − γ∇f. Both float64[S, 1]."""

    gamma: Tensor
    eta: Tensor | None = None

    @property
    def effective(self) -> Tensor:
        """The step along the gradient: γ, or ηγ."""
        return self.gamma if self.eta is None else self.gamma * self.eta


Rule = Callable[[Problem, Codec], Step]


def dcgd(problem: Problem, codec: Codec) -> Step:
    """γ = 1/(L + 2·max(L_iω_i)/n); with ω = 0 gradient descent's 1/L."""
    noise = problem.L_i * torch.tensor(omegas(problem, codec), dtype=torch.float64)
    return Step(1 / (problem.L + 2 * noise.amax(dim=1, keepdim=True) / problem.workers))


def star(problem: Problem, codec: Codec) -> Step:
    """γ = 1/(L + max(L_iω(1 − δ))/n)."""
    return Step(1 / (problem.L + problem.L_max * _omega(problem, codec) / problem.workers))


def diana(problem: Problem, codec: Codec) -> Step:
    """γ = 1/(L_max(1 + 6ω/n))."""
    return Step(1 / (problem.L_max * (1 + 6 * _omega(problem, codec) / problem.workers)))


def diana_plotted(problem: Problem, codec: Codec) -> Step:
    """γ = 1/(2L_max(1 + 4ω)): without the 1/n; the trend over q of the paper's plotted DIANA curves fits it."""
    return Step(1 / (2 * problem.L_max * (1 + 4 * _omega(problem, codec))))


def rand_diana(problem: Problem, codec: Codec) -> Step:
    """γ = 1/((1 + 2ω/n)L_max + M·p·L_max), M = 4ω/(np), at p = 1/(1 + ω)."""
    omega, n = _omega(problem, codec), problem.workers
    p = 1 / (1 + omega)
    m = 4 * omega / (n * p)
    return Step(1 / ((1 + 2 * omega / n) * problem.L_max + m * p * problem.L_max))


def gdci(problem: Problem, codec: Codec) -> Step:
    """η = 1/(L/μ + (2ω/n)(L_max/μ − 1)), γ = 1/μ."""
    return _mixing(problem, 2 * _omega(problem, codec))


def vr_gdci(problem: Problem, codec: Codec) -> Step:
    """η = 1/(L/μ + (6ω/n)(L_max/μ − 1)), γ = 1/μ."""
    return _mixing(problem, 6 * _omega(problem, codec))


def ef21(problem: Problem, codec: Codec) -> Step:
    """EF21's γ = 1/(L + L̃√(β/θ)), θ = 1 − √(1−δ), β = (1−δ)/θ, L̃² = mean L_i²; for EF14 and EControl too."""
    delta = codec.delta(problem.dim)
    if delta is None:
        raise ValueError(f"{codec} is not contractive")
    theta = 1 - math.sqrt(1 - delta)
    spread = problem.L_i.square().mean(dim=1, keepdim=True).sqrt()
    return Step(1 / (problem.L + spread * math.sqrt(1 - delta) / theta))


def _mixing(problem: Problem, noise: float) -> Step:
    kappa, kappa_max = problem.L / problem.mu, problem.L_max / problem.mu
    return Step(1 / problem.mu, 1 / (kappa + noise / problem.workers * (kappa_max - 1)))


def omegas(problem: Problem, codec: Codec) -> list[float]:
    """ω_i of every worker."""
    if isinstance(codec, Mixed):
        return [_omega(problem, one) for one in codec.codecs]
    return [_omega(problem, codec)] * problem.workers


def _omega(problem: Problem, codec: Codec) -> float:
    omega = codec.omega(problem.dim)
    if omega is None:
        raise ValueError(f"{codec} is not unbiased")
    return omega
