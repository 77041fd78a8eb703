"""What the DDP cases share: a model, its batches, and its gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from thinwire.collectives import OkTopk

SPARSE = tw.Wire(gradient=tw.Reduction(OkTopk(0.1, tau=4, tau_prime=3), exact_dims=0, unit_mb=0.0012))


class Net(nn.Module):
    """Two branches; which are used is for the case to say."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(7)
        self.first = nn.Linear(12, 16)
        self.left = nn.Linear(16, 16)
        self.right = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.last = nn.Linear(16, 3)
        self.to(dtype)
        for p in self.parameters():
            p.data = (torch.randn(p.shape, generator=g, dtype=torch.float64) * 0.3).to(dtype)

    def forward(self, x: Tensor, branches: str = "lr") -> Tensor:
        h = torch.tanh(self.first(x))
        h = h + sum((getattr(self, {"l": "left", "r": "right"}[b])(h) for b in branches), torch.zeros_like(h))
        return self.last(self.norm(h))


def batch(step: int, rank: int | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """The input of a step on a rank; None: this one."""
    rank = dist.get_rank() if rank is None else rank
    g = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 12, generator=g, dtype=torch.float64).to(dtype)


def loss_of(model: nn.Module, x: Tensor, **how: str) -> Tensor:
    return (model(x, **how) ** 2).mean() + model(x, **how).abs().mean()


def wrap(model: nn.Module | None = None, **settings: object) -> DDP:
    """Under DDP, in several buckets."""
    return DDP(model or Net(), bucket_cap_mb=0.002, **settings)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    module = model.module if isinstance(model, DDP) else model
    return {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}


def dense(step: int, accumulate: int = 1, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The mean gradient over all ranks, computed here alone."""
    model, size = Net(dtype), dist.get_world_size()
    for rank in range(size):
        for i in range(accumulate):
            (loss_of(model, batch(step + 50 * i, rank, dtype)) / size).backward()
    return {n: p.grad for n, p in model.named_parameters()}


def backward(model: nn.Module, step: int, **how: str) -> None:
    model.zero_grad()
    loss_of(model, batch(step), **how).backward()


def residual_key(name: str) -> str:
    """Of a parameter, in this rank's part of a handle's state."""
    return f"rank{dist.get_rank()}of{dist.get_world_size()}/e/{name}"
