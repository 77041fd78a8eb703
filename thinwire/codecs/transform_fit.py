"""A transform's book from what was sent: second moments of rows, their eigenvectors, and bits by water-filling.

    C = mean over rows of uuᵀ, u = x/rms(x) ;  V Λ Vᵀ = C
    the k-th bit of component i saves λ_i·(E(k−1) − E(k))           E(b): the error of a normal variable with b bits

All bits of a row go where they save most, one after the other (greedily, which is optimal, since each further bit of a
component saves less). The bits of four rows, one of each class by scale, are given out together: there a bit saves
ρ_c·λ_i·(E(k−1) − E(k)), ρ_c: the mean square of the class's rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.lowrank import matrix_shape
from thinwire.codecs.transform import ERROR, Transform
from thinwire.codecs.transform_book import CLASSES, STEP, Book

LOOKED_AT = 2048  # rows of a message, at most
LEAST = 1e-12  # a variance, beside those of unit rows


@dataclass
class Moments:
    """Sums over messages. products: float32[d, d], of mean uuᵀ. energies: float32[classes], of the mean squares of a
    class of rows over that of all rows. count: float32[], of messages."""

    products: Tensor
    energies: Tensor
    count: Tensor

    @staticmethod
    def of(x: Tensor) -> Moments:
        """Of one message: x as a codec is given it."""
        rows = x.detach().reshape(matrix_shape(tuple(x.shape)))
        rows = rows[:: max(1, -(-len(rows) // LOOKED_AT))].float()
        rms = rows.square().mean(1, keepdim=True).sqrt()
        unit = torch.where(rms > 0, rows / rms, 0)
        products = unit.T @ unit / max(len(unit), 1)
        return Moments(products, energies_of(rms.square()), torch.ones((), device=x.device))

    def plus(self, other: Moments | None) -> Moments:
        """With another's, if it is of the same width."""
        if other is None or other.products.shape != self.products.shape:
            return self
        return Moments(self.products + other.products, self.energies + other.energies, self.count + other.count)

    def tensors(self) -> dict[str, Tensor]:
        """For checkpoints."""
        return {"products": self.products, "energies": self.energies, "count": self.count}

    @staticmethod
    def read(state: Mapping[str, Tensor]) -> Moments:
        """From `tensors()`."""
        return Moments(*(state[name].clone() for name in ("products", "energies", "count")))


def energies_of(squares: Tensor) -> Tensor:
    """float32[classes], of rows' mean squares: the mean of each class over that of all; ones where rows are too few."""
    each = len(squares) // CLASSES
    if each == 0:
        return torch.ones(CLASSES, device=squares.device)
    ordered = squares.view(-1).sort().values[: CLASSES * each].view(CLASSES, each)
    return ordered.mean(1) / ordered.mean().clamp_min(LEAST**3)


def fit(codec: Transform, moments: Moments) -> Book:
    """The book of a codec for rows like those seen. Waits for a card."""
    basis = eigenvectors(moments.products / moments.count)
    return Book.of(basis, *allotted(codec, moments, basis))


def eigenvectors(covariance: Tensor) -> Tensor:
    """float32[…, d, d]: those of a covariance, the largest first, as the other end has them."""
    return torch.linalg.eigh(covariance)[1].flip(-1).to(torch.bfloat16).float()


def allotted(codec: Transform, moments: Moments, basis: Tensor) -> tuple[Tensor, Tensor]:
    """The steps and bits of a book in that basis."""
    return allotted_to(codec, *spread(moments, basis))


def allotted_to(codec: Transform, variances: Tensor, energies: Tensor) -> tuple[Tensor, Tensor]:
    """The steps and bits of components of these variances, in classes of rows of these energies."""
    total = codec.row_bits(len(variances))
    alike = given_out(variances[None], total)
    classes = given_out(energies[:, None] * variances, CLASSES * total)
    bits = torch.cat((alike, classes))
    return torch.tensor(STEP, device=variances.device)[bits] * variances.sqrt(), bits


def spread(moments: Moments, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Of what was seen the variance of each component of a basis, and the energy of each class of rows."""
    covariance = moments.products / moments.count
    return (basis * (covariance @ basis)).sum(0).clamp_min(LEAST), (moments.energies / moments.count).clamp_min(LEAST)


def given_out(variances: Tensor, total: int) -> Tensor:
    """int64, of variances' shape: of so many bits in all each goes where it saves most."""
    error = torch.tensor(ERROR, device=variances.device)
    saved = variances[..., None] * (error[:-1] - error[1:])
    taken = torch.zeros(saved.numel(), dtype=torch.int64, device=variances.device)
    taken[saved.reshape(-1).topk(min(total, saved.numel())).indices] = 1
    return taken.view(saved.shape).sum(-1)
