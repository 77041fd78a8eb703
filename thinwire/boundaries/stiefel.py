"""Orthonormal matrices that learn: A of d × r with AᵀA = I, a point of the Stiefel manifold.

    ξ = G − A·sym(AᵀG)                          the gradient G in the tangent space of A
    m ← β₁m + (1 − β₁)ξ ;  v ← β₂v + (1 − β₂)·mean(ξ²)
    u = m̂ / (√v̂ + ε), in the tangent space ;  A ← polar(A − rate·u)

v is one number: A and A·Q, for any rotation Q of the coordinates, then learn alike. It is Adam for one parameter whose
entries have one scale (Bécigneul and Ganea, arXiv 1810.00760), with the polar factor as retraction.
"""

from __future__ import annotations

import torch
from torch import Tensor

BETAS = 0.9, 0.95
EPSILON = 1e-12
ITERATIONS = 12  # of Newton and Schulz: quadratic from singular values of 1 and a little more, so half would do


def orthonormal(width: int, rank: int, seed: int) -> Tensor:
    """A random one, float32 [width, rank]. Its bits may differ between devices and versions of LAPACK."""
    generator = torch.Generator().manual_seed(seed)
    gaussian = torch.randn(width, rank, generator=generator, dtype=torch.float64)
    return polar(gaussian).float()


def tangent(basis: Tensor, gradient: Tensor) -> Tensor:
    """The part of `gradient` along which `basis` stays orthonormal to first order; both [width, rank]."""
    inner = basis.T @ gradient
    return gradient - basis @ ((inner + inner.T) / 2)


def polar(matrix: Tensor) -> Tensor:
    """The nearest orthonormal matrix, M·(MᵀM)^(−1/2), computed in float64; in the dtype of `matrix`."""
    wide = matrix.double()
    values, vectors = torch.linalg.eigh(wide.T @ wide)
    return (wide @ (vectors * values.rsqrt()) @ vectors.T).to(matrix.dtype)


def retract(matrix: Tensor) -> Tensor:
    """The polar factor of A − u with u in the tangent space of A, whose singular values are 1 and more.

    X ← X·(3I − XᵀX)/2, which converges where they are below √3; larger ones are scaled down first. Only products: on a
    card an eigenvalue problem per boundary would take longer than the step. In float64; in the dtype of `matrix`.
    """
    x = matrix.double()
    gram = x.T @ x
    bound = gram.abs().sum(0).max().sqrt()  # no singular value is larger
    x = x / torch.where(bound < 1.5, torch.ones_like(bound), bound)
    for _ in range(ITERATIONS):
        x = 1.5 * x - 0.5 * (x @ (x.T @ x))
    return x.to(matrix.dtype)


class StiefelAdam:
    """The rule above for one matrix.

    like: a matrix of its shape and device.
    """

    def __init__(self, like: Tensor) -> None:
        self.moment = torch.zeros_like(like)
        self.square = torch.zeros((), dtype=like.dtype, device=like.device)
        self.count = torch.zeros((), dtype=torch.int64)

    def step(self, basis: Tensor, gradient: Tensor, rate: float) -> Tensor:
        """The next matrix.

        basis: the current one. gradient: of the loss. rate: by which an entry moves, on average over entries.
        """
        beta, gamma = BETAS
        self.count += 1
        slope = tangent(basis, gradient)
        self.moment.lerp_(slope, 1 - beta)
        self.square.lerp_(slope.square().mean(), 1 - gamma)
        count = int(self.count)
        scale = (self.square / (1 - gamma**count)).sqrt() + EPSILON
        direction = tangent(basis, self.moment / (1 - beta**count) / scale)
        return retract(basis - rate * direction)

    def tensors(self) -> dict[str, Tensor]:
        """Its state, for checkpoints; loaded by copying into these."""
        return {"moment": self.moment, "square": self.square, "count": self.count}


class EntryAdam:
    """Adam without weight decay, for the anchors of a boundary; its methods are StiefelAdam's."""

    def __init__(self, like: Tensor) -> None:
        self.moment = torch.zeros_like(like)
        self.square = torch.zeros_like(like)
        self.count = torch.zeros((), dtype=torch.int64)

    def step(self, values: Tensor, gradient: Tensor, rate: float) -> Tensor:
        """The next values.

        values: the current ones. gradient: of the loss. rate: Adam's.
        """
        beta, gamma = BETAS
        self.count += 1
        self.moment.lerp_(gradient, 1 - beta)
        self.square.lerp_(gradient.square(), 1 - gamma)
        count = int(self.count)
        scale = (self.square / (1 - gamma**count)).sqrt() + EPSILON
        return values - rate * (self.moment / (1 - beta**count) / scale)

    def tensors(self) -> dict[str, Tensor]:
        """Its state, for checkpoints; loaded by copying into these."""
        return {"moment": self.moment, "square": self.square, "count": self.count}
