"""What trains the models of `thinwire bench scratch`: AdamW, or Muon for matrices and AdamW for the rest.

Muon (Jordan 2024): the momentum of a matrix's gradient is made nearly orthonormal, so that every direction of it moves
alike.

    m ← μ·m + (1 − μ)·g ;  u = ns((1 − μ)·g + μ·m)·√max(1, rows/columns) ;  W ← (1 − rate·λ)·W − rate·u

ns: five steps X ← aX + (bA + cA²)X, A = XXᵀ, of X = G/‖G‖, in bfloat16 on a card. torch.optim.Muon is the same rule; it
takes one matrix after the other, at a rate that a captured CUDA graph could not change. Here matrices of one shape go
through it together (tests/test_scratch_models.py compares both).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.bench.scratch.model import Block, Embed, Head
from thinwire.bench.scratch.options import YARDSTICK, Scratch
from thinwire.boundaries.projected import BoundedStage

COEFFICIENTS = 3.4445, -4.7750, 2.0315
ITERATIONS = 5
MOMENTUM, DECAY = 0.95, 0.05
# rates of AdamW beside Muon's, as the yardstick has them but for embeddings (there 28, in bfloat16)
EMBEDDING, HEAD, VECTORS = 12.0, 0.16, 0.6
TABLE = 1.2  # of the tables of boundaries: a tenth of the embedding's


def orthonormal(x: Tensor) -> Tensor:
    """Matrices [n, r, c] with singular values near 1."""
    x = x.bfloat16() if x.is_cuda else x
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (torch.linalg.vector_norm(x.float(), dim=(-2, -1), keepdim=True) + 1e-7).to(x.dtype)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).float()


class Muon:
    """Of matrices. rate: float32[], read in every step."""

    def __init__(self, matrices: Sequence[nn.Parameter], rate: Tensor) -> None:
        self.rate = rate
        self.alike: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for one in matrices:
            self.alike.setdefault(tuple(one.shape), []).append(one)
        self.momenta = {
            shape: torch.zeros(len(ours), *shape, device=ours[0].device) for shape, ours in self.alike.items()
        }

    @torch.no_grad()
    def step(self) -> None:
        """By the gradients that are there."""
        for shape, ours in self.alike.items():
            gradient = torch.stack([one.grad for one in ours if one.grad is not None]).float()
            momentum = self.momenta[shape].lerp_(gradient, 1 - MOMENTUM)
            update = orthonormal(gradient.lerp(momentum, MOMENTUM)) * max(1.0, shape[0] / shape[1]) ** 0.5
            for one, part in zip(ours, update.unbind()):
                one.mul_(1 - self.rate * DECAY).sub_(self.rate * part)


class Optimisers:
    """Of all stages of a model.

    setup: says which. stages: in order; of a model with boundaries, `BoundedStage`s.
    """

    def __init__(self, setup: Scratch, stages: Sequence[nn.Module]) -> None:
        device = next(stages[0].parameters()).device
        self.rate = torch.zeros((), device=device)
        self.parts: list[tuple[Any, Tensor, float]] = []
        self.muon: Muon | None = None
        more: dict[str, Any] = {"fused": True, "capturable": True} if device.type == "cuda" else {"foreach": True}
        own = [stage.trained() if isinstance(stage, BoundedStage) else list(stage.parameters()) for stage in stages]
        self.parameters = [parameter for of in own for parameter in of]
        if setup.model != YARDSTICK:
            self._adam(self.parameters, 1.0, betas=(0.9, 0.95), **more)
            return
        of: dict[float, list[nn.Parameter]] = {}
        for parameter, factor in relative_rates(stages):
            of.setdefault(factor, []).append(parameter)
        self.muon = Muon(of.pop(1.0), self.rate)
        for factor, ours in of.items():
            self._adam(ours, factor, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.001, **more)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of all parameters."""
        for one in self.parameters:
            if set_to_none:
                one.grad = None
            elif one.grad is not None:
                one.grad.zero_()

    def set_rate(self, rate: float) -> None:
        """From the next step on; on a card in a tensor that a graph reads."""
        self.rate.fill_(rate)
        for optimiser, tensor, factor in self.parts:
            tensor.fill_(rate * factor)
            if not tensor.is_cuda:
                for group in optimiser.param_groups:
                    group["lr"] = rate * factor

    def step(self) -> None:
        """Of all of them."""
        if self.muon is not None:
            self.muon.step()
        for optimiser, _, _ in self.parts:
            optimiser.step()

    def _adam(self, parameters: Sequence[nn.Parameter], factor: float, **more: Any) -> None:
        rate = torch.zeros_like(self.rate)
        lr: Any = rate if rate.is_cuda else 0.0
        self.parts.append((torch.optim.AdamW(parameters, lr=lr, **more), rate, factor))


def relative_rates(stages: Sequence[nn.Module]) -> list[tuple[nn.Parameter, float]]:
    """Of every parameter of the yardstick's model its rate beside Muon's; 1.0: it is Muon's."""
    out = []
    for stage in stages:
        if isinstance(stage, BoundedStage) and stage.table is not None:
            out.append((stage.table, TABLE))
        for module in stage.modules():
            for name, one in module.named_parameters(recurse=False):
                if isinstance(module, (Embed, Head)):
                    out.append((one, EMBEDDING if isinstance(module, Embed) else HEAD))
                elif isinstance(module, nn.RMSNorm):
                    out.append((one, VECTORS))
                elif isinstance(module, Block) or name in ("query", "key", "value", "merge"):
                    out.append((one, 1.0))
    return out
