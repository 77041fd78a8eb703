"""How well classes are told apart: accuracy and Matthews' correlation, from counts of (label, prediction)."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.train.data.samples import IGNORED


class Scores:
    """Counts predictions of this rank since they were last taken.

    classes: how many there are. device: where logits are.
    """

    def __init__(self, classes: int, device: torch.device) -> None:
        self.classes = classes
        self.counts = torch.zeros(classes * classes, dtype=torch.int64, device=device)

    @torch.no_grad()
    def add(self, logits: Tensor, labels: Tensor) -> None:
        """logits: [rows, classes]; labels: [rows], IGNORED for rows that do not count."""
        pairs = labels * self.classes + logits.argmax(-1)
        self.counts += torch.bincount(pairs[labels != IGNORED], minlength=self.classes**2)

    def take(self) -> Tensor:
        """[label, prediction]: the counts, on the host; from here on they are counted anew."""
        taken = self.counts.view(self.classes, self.classes).cpu()
        self.counts = torch.zeros_like(self.counts)
        return taken

    def take_all(self) -> Tensor:
        """`take`, summed over all ranks, which call it together."""
        taken = self.take()
        dist.all_reduce(taken)
        return taken


def hits(confusion: Tensor) -> tuple[int, int]:
    """How many predictions are right, and of how many. confusion: [label, prediction]."""
    return int(confusion.diagonal().sum()), int(confusion.sum())


def summary(confusion: Tensor) -> dict[str, float]:
    """Accuracy and Matthews' correlation, for the metrics; nothing where there were no predictions."""
    right, total = hits(confusion)
    return {"accuracy": right / total, "matthews": matthews(confusion)} if total else {}


def matthews(confusion: Tensor) -> float:
    """Matthews' correlation for any number of classes (Gorodkin's R_K): 1 where all are right, 0 for a guess.

        (c·s − Σ p_k t_k) / √((s² − Σ p_k²)(s² − Σ t_k²))

    with c right of s, t_k labels and p_k predictions of class k; 0 where all labels, or all predictions, are one class.
    confusion: [label, prediction].
    """
    right, total = hits(confusion)
    truly = confusion.sum(1).tolist()
    predicted = confusion.sum(0).tolist()
    spread = (total**2 - sum(p * p for p in predicted)) * (total**2 - sum(t * t for t in truly))
    return (right * total - sum(p * t for p, t in zip(predicted, truly))) / math.sqrt(spread) if spread else 0.0
