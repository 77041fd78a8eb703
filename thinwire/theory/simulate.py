"""Run a method on a problem: n workers per run, S runs at once, all through codec.rows and the memory's rule.

v_i = ∇f_i(x), or x − γ∇f_i(x) where points are compressed
u_i = s·v_i + η·e_i − h_i ;  d_i = C(u_i) ;  y = mean(h_i + d_i)
x ← x − γy, or (1 − η)x + ηy
e_i ← β(e_i + s·v_i − h_i − d_i) ;  h_i ← h_i + α·d_i, or v_i on a refresh
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.codecs import Identity
from thinwire.kernels.random import derive, hash32
from thinwire.theory.bits import paper_bits, real_bits
from thinwire.theory.bounds import radius
from thinwire.theory.methods import Method
from thinwire.theory.mixed import Mixed
from thinwire.theory.problems import Problem
from thinwire.theory.steps import Step, omegas

STOP = 1e-18  # the paper's last error
EVERY = 20  # steps between two measurements of the error
BLOCK = 512  # steps whose seeds are computed together
STALL = 0.65  # of GD's steps to `stop`, for methods that stall far above it
MARGIN = 2.0  # how many times GD's steps at this γ an exact method may take: shifts are learned meanwhile


@dataclass
class State:
    """Where S runs are: the point x, and per worker the residual e and the shift h, None where the memory has none."""

    x: Tensor  # [S, d]
    e: Tensor | None  # [S, n, d]
    h: Tensor | None  # [S, n, d]


@dataclass
class Trace:
    """‖x − x*‖²/‖x⁰ − x*‖² of S runs at P moments, and what a worker had sent by then, on average."""

    method: Method
    dim: int
    steps: list[int] = field(default_factory=list)  # [P]
    error: list[list[float]] = field(default_factory=list)  # [P, S]
    refreshed: list[list[float]] = field(default_factory=list)  # [P, S]: dense messages per worker
    radius: list[float] | None = None  # [S]: how near theory promises that it comes; None: no theorem says

    def bits(self, unit: str) -> list[list[float]]:
        """[P, S] bits that a worker has sent, in "paper" or "real" bits."""
        count = paper_bits if unit == "paper" else real_bits
        per_step = count(self.method.codec, self.dim)
        dense = count(Identity(), self.dim)
        return [[t * per_step + r * dense for r in row] for t, row in zip(self.steps, self.refreshed)]

    def reached(self, target: float) -> list[int | None]:
        """Per run the first moment (an index into `steps`) at which the error is at most `target`."""
        runs = len(self.error[0])
        return [next((p for p, row in enumerate(self.error) if row[s] <= target), None) for s in range(runs)]

    def floor(self) -> list[float]:
        """Per run the geometric mean of the error over the last fifth of the steps: where a method stalls."""
        tail = self.error[-max(1, len(self.error) // 5) :]
        return [math.exp(sum(math.log(max(row[s], 1e-300)) for row in tail) / len(tail)) for s in range(len(tail[0]))]


@contextmanager
def one_thread() -> Iterator[None]:
    """Tensors this small are slower on several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            yield
    finally:
        torch.set_num_threads(threads)


def seeds_of(runs: Sequence[int], workers: int) -> Iterator[list[int]]:
    """S·n seeds for step 0, 1, …: 63 bits from (run, step, worker) alone."""
    keys = [(derive("convex", "low", run), derive("convex", "high", run)) for run in runs]
    index = torch.arange(BLOCK * workers)
    while True:
        low = torch.stack([hash32(index, a) for a, _ in keys])
        high = torch.stack([hash32(index, b) // 2 for _, b in keys])
        both = (high * 2**32 + low).view(len(runs), BLOCK, workers)
        yield from both.transpose(0, 1).reshape(BLOCK, -1).tolist()
        index = index + BLOCK * workers


def advance(
    method: Method, problem: Problem, state: State, step: Step, alpha: float | Tensor, seeds: list[int]
) -> Tensor | None:
    """One step, in place. Returns which workers refreshed their shift, bool[S, n, 1], or None.

    alpha: the step size of the shifts, or one per worker, float64[n, 1]. seeds: one per run and worker."""
    memory = method.memory
    g = problem.gradients(state.x)
    h = state.h
    v = g if step.eta is None else state.x[:, None] - step.gamma[:, None] * g
    u = memory.outgoing(v, state.e, h)
    d = method.codec.rows(u.view(-1, problem.dim), seeds).view_as(u)
    y = (d if h is None else h + d).mean(dim=1)
    state.x = state.x - step.gamma * y if step.eta is None else torch.lerp(state.x, y, step.eta)
    if memory.beta is not None:
        state.e = memory.residual(v, state.e, h, d)
    if h is not None:
        if isinstance(alpha, Tensor):
            state.h = memory.shifted(h, alpha * d, 1.0)
        elif alpha:
            state.h = memory.shifted(h, d, alpha)
    if not memory.refresh or h is None:
        return None
    coins = torch.tensor([memory.refreshes(s) for s in seeds]).view(problem.runs, -1, 1)
    state.h = torch.where(coins, v, h)
    return coins


def simulate(
    method: Method, problem: Problem, runs: Sequence[int], stop: float = STOP, limit: int | None = None
) -> Trace:
    """Run until every run's relative error is at most `stop`, or for `limit` steps (None: as theory predicts).

    runs: the seed of each run."""
    step = method.rule(problem, method.codec)
    alpha = _alpha(method, problem)
    method.memory.check(method.codec, problem.dim)
    like = torch.zeros(problem.runs, problem.workers, problem.dim, dtype=torch.float64)
    shift = method.memory.base_shift("x", like)
    state = State(problem.start(), like if method.memory.beta is not None else None,
                  like if shift is None and method.memory.mirrored else shift)  # fmt: skip
    first, refreshed = problem.error(state.x), torch.zeros(problem.runs, dtype=torch.float64)
    runs_at_first = [[1.0] * problem.runs], [[0.0] * problem.runs]
    trace = Trace(method, problem.dim, [0], *runs_at_first, radius(method, problem))
    limit = expected_steps(method, problem, stop) if limit is None else limit
    with one_thread():
        for t, seeds in zip(range(1, limit + 1), seeds_of(runs, problem.workers)):
            coins = advance(method, problem, state, step, alpha, seeds)
            if coins is not None:
                refreshed += coins.double().mean(dim=(1, 2))
            if t % EVERY == 0:
                trace.steps.append(t)
                trace.error.append((problem.error(state.x) / first).tolist())
                trace.refreshed.append(refreshed.tolist())
                if max(trace.error[-1]) <= stop:
                    break
    return trace


def _alpha(method: Method, problem: Problem) -> float | Tensor:
    """The memory's α; of workers that compress differently 1/(1 + ω_i) each."""
    if isinstance(method.codec, Mixed) and method.memory.alpha is None:
        return torch.tensor([[1 / (1 + omega)] for omega in omegas(problem, method.codec)], dtype=torch.float64)
    return method.memory.alpha_for(method.codec, problem.dim)


def expected_steps(method: Method, problem: Problem, stop: float = STOP) -> int:
    """log(1/stop)/(2γμ), what GD takes at this step size, times MARGIN where the method is exact, else STALL."""
    slowest = float((method.rule(problem, method.codec).effective * problem.mu).min())
    gd = math.log(1 / stop) / (2 * slowest)
    return EVERY * math.ceil((MARGIN if method.exact else STALL) * gd / EVERY)
