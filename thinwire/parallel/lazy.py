"""Does lazy error propagation help at this boundary? (Optimus-CC, ASPLOS 2023; the sheet's analysis.)

The sender adds what a message left out, e_i, to the next one, so the gradients that arrive telescope:
ĝ_i = g_i + e_{i−1} − e_i. For weights with dW = Σ a_iᵀ g_i the error is then Σ (a_{i+1} − a_i)ᵀ e_i instead of
Σ a_iᵀ e_i: it cancels the part of e that meets the *mean* activation. With the share of the mean

    ρ = ‖ā‖² / E‖a‖² = 1 − E‖a_{i+1} − a_i‖² / (2 E‖a‖²)

lazy error is the smaller one where E‖Δa‖² < E‖a‖², that is ρ > ½. The analysis also wants errors of mean zero that are
uncorrelated with the differences of activations: both are measured beside it, over the first steps, and logged.
"""

from __future__ import annotations

import logging
import math

import torch
from torch import Tensor

logger = logging.getLogger("thinwire.pipeline")

MESSAGES = 24  # measured before deciding
THRESHOLD = 0.5
SUMS = ("messages", "a2", "d2", "pairs", "e2", "e_sum", "e_count", "de", "de_d2", "de_e2", "lazy")


class MeanShare:
    """Running sums over consecutive micro-batches at one boundary. `lazy` is None until decided."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sums = dict.fromkeys(SUMS, 0.0)
        self.lazy: bool | None = None
        self._last: dict[int, Tensor] = {}
        self._step: dict[int, Tensor] = {}

    def note_activation(self, index: int, a: Tensor) -> None:
        """a: float[rows, …], the activation whose gradient will be sent back."""
        if self.lazy is not None:
            return
        a, s = a.detach().float(), self.sums
        s["messages"] += 1
        s["a2"] += float(a.square().sum())
        last = self._last.get(index)
        if last is not None and last.shape == a.shape:
            self._step[index] = a - last
            s["d2"] += float(self._step[index].square().sum())
            s["pairs"] += 1
        self._last[index] = a

    def note_error(self, index: int, e: Tensor | None) -> None:
        """e: the residual a message left."""
        if self.lazy is not None or e is None:
            return
        s = self.sums
        s["e2"] += float(e.square().sum())
        s["e_sum"] += float(e.sum())
        s["e_count"] += e.numel()
        step = self._step.get(index)
        if step is not None and step.shape == e.shape:
            s["de"] += float((step * e).sum())
            s["de_d2"] += float(step.square().sum())
            s["de_e2"] += float(e.square().sum())

    @property
    def share(self) -> float:
        """ρ; NaN before two messages of one shape."""
        s = self.sums
        if not s["pairs"] or not s["a2"]:
            return math.nan
        return 1 - (s["d2"] / s["pairs"]) / (2 * s["a2"] / s["messages"])

    @property
    def error_mean(self) -> float:
        """|mean e| over its root mean square."""
        s = self.sums
        return abs(s["e_sum"] / s["e_count"]) / math.sqrt(s["e2"] / s["e_count"]) if s["e2"] else 0.0

    @property
    def correlation(self) -> float:
        """Cosine between differences of activations and errors."""
        s = self.sums
        return s["de"] / math.sqrt(s["de_d2"] * s["de_e2"]) if s["de_d2"] and s["de_e2"] else 0.0

    def decide(self) -> None:
        """Once enough was seen: keep the residual, or stop keeping it."""
        if self.lazy is not None or self.sums["messages"] < MESSAGES or math.isnan(self.share):
            return
        self.lazy = self.share > THRESHOLD
        self._last.clear()
        self._step.clear()
        logger.info(
            "%s: mean-activation share %.3f, mean of the error %.3f of its size, correlation with activation "
            "differences %.3f: lazy error %s",
            self.name, self.share, self.error_mean, self.correlation, "on" if self.lazy else "off",
        )  # fmt: skip

    def state_dict(self) -> dict[str, Tensor]:
        self.sums["lazy"] = -1.0 if self.lazy is None else float(self.lazy)
        return {"share": torch.tensor([self.sums[name] for name in SUMS], dtype=torch.float64)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.sums = dict(zip(SUMS, state["share"].tolist()))
        self.lazy = None if self.sums["lazy"] < 0 else bool(self.sums["lazy"])
