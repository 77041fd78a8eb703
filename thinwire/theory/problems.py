"""Finite sums over n workers, f = mean f_i, with what the step-size rules need: L, L_i, μ, a solution.

All three are linear models, f_i(x) = w·Σ_j ℓ(a_ij·x, b_ij) + (λ/2)‖x‖², so they share one gradient. The first
dimension S of every tensor is the run: S seeds (data, split) advance together, in hardly more time than one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, make_regression
from torch import Tensor

from thinwire.kernels.random import derive

WORKERS = 10
SPLITS = ("random", "by label")

Slope = Callable[[Tensor, Tensor], Tensor]


def squares(z: Tensor, b: Tensor) -> Tensor:
    """ℓ' of ½(z − b)²."""
    return z - b


def logistic_loss(z: Tensor, b: Tensor) -> Tensor:
    """ℓ' of log(1 + exp(−bz)), b = ±1."""
    return -b * torch.sigmoid(-b * z)


@dataclass(frozen=True)
class Problem:
    """S runs of one problem. Where the solutions are a set, `normal` projects onto its normal space."""

    name: str
    a: Tensor  # float64[S·n, m/n, d]: a worker's samples
    b: Tensor  # float64[S, m]
    slope: Slope  # ℓ'
    weight: float  # w
    lam: float  # λ
    solution: Tensor  # float64[S, d]
    L: Tensor  # float64[S, 1]: smoothness of f
    L_i: Tensor  # float64[S, n]: of the f_i
    mu: Tensor  # float64[S, 1]: strong convexity of f (on the normal space)
    normal: Tensor | None = None  # float64[S, d, d]; None: the solution is a point
    first: Tensor | None = None  # float64[S, d]: x⁰; None: 0

    @property
    def runs(self) -> int:
        return self.solution.shape[0]

    @property
    def workers(self) -> int:
        return self.L_i.shape[1]

    @property
    def dim(self) -> int:
        return self.solution.shape[1]

    @property
    def L_max(self) -> Tensor:
        return self.L_i.amax(dim=1, keepdim=True)

    def start(self) -> Tensor:
        """x⁰: float64[S, d]."""
        return torch.zeros_like(self.solution) if self.first is None else self.first.clone()

    def from_afar(self, distance: float) -> Problem:
        """The same with x⁰ so far from x*, in a random direction: a radius is then small against ‖x⁰ − x*‖²."""
        noise = torch.Generator().manual_seed(derive("convex", "afar"))
        way = torch.randn(self.solution.shape, generator=noise, dtype=torch.float64)
        return replace(self, first=self.solution + distance * way / way.norm(dim=1, keepdim=True))

    def gradients(self, x: Tensor) -> Tensor:
        """∇f_i(x) = w·A_iᵀℓ'(A_i x, b_i) + λx. x: [S, d] → [S, n, d]."""
        runs, dim = x.shape
        z = torch.bmm(x[:, None], self.a.view(runs, -1, dim).mT)[:, 0]
        slope = self.slope(z, self.b).mul_(self.weight)
        out = torch.bmm(slope.view(self.a.shape[0], 1, -1), self.a).view(runs, -1, dim)
        return out.add_(x[:, None], alpha=self.lam) if self.lam else out

    def error(self, x: Tensor) -> Tensor:
        """Squared distance to the solution set: [S]."""
        gap = x - self.solution
        if self.normal is not None:
            gap = torch.bmm(self.normal, gap[:, :, None])[:, :, 0]
        return gap.square().sum(dim=1)


def ridge(seeds: Sequence[int], samples: int = 100, dim: int = 80, lam: float | None = None) -> Problem:
    """The paper's ½‖Ax − y‖² + (λ/2)‖x‖², f_i = (n/2)‖A_i x − y_i‖² + (λ/2)‖x‖², a random split; lam: λ, 1/m unless
    given."""
    a, b = _regression(seeds, samples, dim)
    return _linear("ridge", a, b, squares, float(WORKERS), 1 / samples if lam is None else lam, curvature=1.0)


def interpolation(seeds: Sequence[int], samples: int = 60, dim: int = 80) -> Problem:
    """Fewer samples than parameters, no noise, λ = 0: all f_i are minimal on one affine set, ∇f_i(x*) = 0."""
    a, b = _regression(seeds, samples, dim)
    return _linear("interpolation", a, b, squares, float(WORKERS), 0.0, curvature=1.0)


def logistic(seeds: Sequence[int], split: str = "random", lam: float = 0.01) -> Problem:
    """Logistic regression on the breast-cancer data (569 × 30, standardised), mean loss plus (λ/2)‖x‖².

    Split "random": even and at random; "by label": sorted by class, so that most workers see one class only.
    """
    data = load_breast_cancer()
    features = (data.data - data.data.mean(axis=0)) / data.data.std(axis=0)
    labels = 2.0 * data.target - 1
    kept = len(labels) - len(labels) % WORKERS  # workers hold equally many samples
    a, b = [], []
    for seed in seeds:
        order = np.random.default_rng(seed).permutation(len(labels))[:kept]
        if split == "by label":
            order = order[np.argsort(labels[order], kind="stable")]
        a.append(features[order])
        b.append(labels[order])
    weight = WORKERS / kept
    name = f"logistic, split {split}"
    return _linear(name, np.stack(a), np.stack(b), logistic_loss, weight, lam, curvature=0.25)


def _regression(seeds: Sequence[int], samples: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """make_regression with its defaults, rows in random order: [S, m, d], [S, m]."""
    a, b = [], []
    for seed in seeds:
        x, y = make_regression(n_samples=samples, n_features=dim, random_state=seed)
        order = np.random.default_rng(seed).permutation(samples)
        a.append(x[order])
        b.append(y[order])
    return np.stack(a), np.stack(b)


def _linear(
    name: str, a: np.ndarray, b: np.ndarray, slope: Slope, weight: float, lam: float, curvature: float
) -> Problem:  # fmt: skip
    """Constants from the spectra of A and A_i (ℓ'' ≤ curvature), the solution by Newton's method."""
    rows, targets = torch.from_numpy(a), torch.from_numpy(b)
    runs, samples, dim = rows.shape
    scale = weight * curvature / WORKERS
    values, vectors = torch.linalg.eigh(scale * rows.mT @ rows)
    flat = samples < dim and not lam
    keep = torch.arange(dim) >= (dim - samples if flat else 0)
    workers = rows.reshape(runs * WORKERS, samples // WORKERS, dim)
    norms = torch.linalg.matrix_norm(workers, ord=2).view(runs, WORKERS).square()
    convex = values[:, keep][:, :1] if slope is squares else torch.zeros(runs, 1, dtype=torch.float64)
    problem = Problem(
        name, workers.contiguous(), targets, slope, weight, lam, torch.zeros(runs, dim, dtype=torch.float64),
        L=values[:, -1:] + lam, L_i=weight * curvature * norms + lam, mu=convex + lam,
        normal=(vectors * keep) @ vectors.mT if flat else None,
    )  # fmt: skip
    return _solved(problem)


def _solved(problem: Problem, steps: int = 30) -> Problem:
    """x* by Newton's method on f; least squares (`pinv`) where the Hessian is singular."""
    x, rows = problem.start(), problem.a.view(problem.runs, -1, problem.dim)
    eye = problem.lam * torch.eye(problem.dim, dtype=torch.float64)
    for _ in range(steps):
        z = (rows @ x[:, :, None])[:, :, 0]
        bend = torch.sigmoid(z) * torch.sigmoid(-z) if problem.slope is logistic_loss else torch.ones_like(z)
        hessian = problem.weight / problem.workers * (rows * bend[:, :, None]).mT @ rows + eye
        step = torch.linalg.pinv(hessian, hermitian=True, rtol=1e-12) @ problem.gradients(x).mean(1)[:, :, None]
        x = x - step[:, :, 0]
    return replace(problem, solution=x)
