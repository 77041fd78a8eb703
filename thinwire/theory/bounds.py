"""How near theory promises that a method comes which does not reach x*: the radius of its theorem.

Theorem 1 of "Shifted Compression Framework" (UAI 2022), for compressed gradients with constant shifts h_i, and the same
argument for compressed points (GDCI), whose T_i(x) = x − γ∇f_i(x):

    DCGD, FIXED   (2γ/μ)·mean_i (ω_i/n)·‖∇f_i(x*) − h_i‖²
    GDCI          2η·mean_i (ω_i/n)·‖T_i(x*)‖²

In expectation ‖x − x*‖² falls to this at the rate 1 − γμ, or 1 − η. Here it is relative to ‖x⁰ − x*‖², as errors are.
"""

from __future__ import annotations

import torch

from thinwire.theory.methods import Method
from thinwire.theory.problems import Problem
from thinwire.theory.steps import omegas


def radius(method: Method, problem: Problem) -> list[float] | None:
    """Per run; None where no theorem here gives one: exact methods, and those with residuals."""
    if method.exact or method.memory.beta is not None:
        return None
    step = method.rule(problem, method.codec)
    at_solution = problem.gradients(problem.solution)
    if step.eta is None:
        shift = method.memory.fixed
        left = at_solution if shift is None else at_solution - torch.as_tensor(shift)
        factor = 2 * step.gamma / problem.mu
    else:
        left = problem.solution[:, None] - step.gamma[:, None] * at_solution
        factor = 2 * step.eta
    noise = torch.tensor(omegas(problem, method.codec), dtype=torch.float64) / problem.workers
    spread = (noise * left.square().sum(dim=2)).mean(dim=1, keepdim=True)
    return ((factor * spread)[:, 0] / problem.error(problem.start())).tolist()
