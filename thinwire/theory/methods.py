"""The methods: each is a codec, a memory, and a step-size rule, which also determines what is compressed.

No method has an update of its own: simulate.py runs all of them by the one rule of thinwire.memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from thinwire.codecs import Codec, Identity, Induced, RandK, TopK
from thinwire.kernels.random import derive
from thinwire.memory import EF21, Diana, EControl, ErrorFeedback, FixedShift, Memory, Plain, RandDiana, StarShift
from thinwire.theory import steps
from thinwire.theory.problems import Problem

BAD_SHIFT = 100.0  # standard deviation of the shifts of FIXED


@dataclass(frozen=True)
class Method:
    """A method. What it sends per step follows from its codec and its memory (bits.py)."""

    name: str
    codec: Codec
    memory: Memory
    rule: steps.Rule
    exact: bool = True  # does theory promise x*, or a neighbourhood only?


def gd() -> Method:
    """Gradient descent: nothing is compressed."""
    return Method("GD", Identity(), Plain(), steps.dcgd)


def dcgd(codec: Codec, exact: bool = False) -> Method:
    """Compressed gradient descent without memory; `exact` where all ∇f_i vanish at the solution."""
    return Method("DCGD", codec, Plain(), steps.dcgd, exact)


def fixed(codec: Codec, problem: Problem) -> Method:
    """Bad shifts: BAD_SHIFT·N(0, 1), far from ∇f_i(x*); the error at which it stalls is proportional to BAD_SHIFT²."""
    noise = torch.Generator().manual_seed(derive("convex", "bad shift"))
    shape = problem.runs, problem.workers, problem.dim
    shift = BAD_SHIFT * torch.randn(shape, generator=noise, dtype=torch.float64)
    return Method("FIXED", codec, FixedShift(shift), steps.dcgd, exact=False)


def star(codec: Codec, problem: Problem, name: str = "STAR") -> Method:
    """The shifts ∇f_i(x*), which are unknown in practice; with Induced(C, Q) the paper's C ∈ B(δ)."""
    return Method(name, codec, StarShift(problem.gradients(problem.solution)), steps.star)


def diana(codec: Codec, rule: steps.Rule = steps.diana, name: str = "DIANA") -> Method:
    """Shifts that are learned from what is sent, with the step size of `rule`."""
    return Method(name, codec, Diana(), rule)


def rand_diana(codec: Codec, problem: Problem) -> Method:
    """Shifts that are refreshed by a dense message with probability p = 1/(1 + ω)."""
    return Method("Rand-DIANA", codec, RandDiana(1 / (1 + (codec.omega(problem.dim) or 0.0))), steps.rand_diana)


def gdci(codec: Codec) -> Method:
    """Points are compressed, without memory."""
    return Method("GDCI", codec, Plain(), steps.gdci, exact=False)


def vr_gdci(codec: Codec) -> Method:
    """Points are compressed against shifts that are learned from what is sent."""
    return Method("VR-GDCI", codec, Diana(), steps.vr_gdci)


def every(problem: Problem, density: float = 0.3) -> list[Method]:
    """The comparison: Rand-K for the unbiased, Top-K for the contractive, both for the induced, at one K."""
    rand, top = RandK(density), TopK(density)
    both = Induced(top, rand)
    delta = top.delta(problem.dim) or 1.0
    return [
        gd(),
        dcgd(rand),
        fixed(rand, problem),
        star(rand, problem),
        star(both, problem, "STAR + Top-K"),
        diana(rand),
        diana(both, name="generalised DIANA"),
        rand_diana(rand, problem),
        gdci(rand),
        vr_gdci(rand),
        Method("EF14", top, ErrorFeedback(), steps.ef21, exact=False),
        Method("EF21", top, EF21(), steps.ef21),
        Method("EControl", top, EControl(delta / 4), steps.ef21),
    ]
