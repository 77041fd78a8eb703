"""A small regression on every site, and the weights of sites computed by straight-line code."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

Weights = dict[str, Tensor]


class Net(nn.Module):
    """Two layers with numbers, so that fragments have something to deal out; a buffer, and a frozen parameter."""

    def __init__(self, hidden: int = 24) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(3)
        self.layers = nn.ModuleList([nn.Linear(8, hidden), nn.Linear(hidden, 8)])
        self.scale = nn.Parameter(torch.ones(()))
        self.fixed = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("seen", torch.zeros(()))
        for p in self.layers.parameters():
            p.data = 0.3 * torch.randn(p.shape, generator=g)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1 + dist.get_rank() if dist.is_initialized() else 1
        return self.scale * self.layers[1](torch.tanh(self.layers[0](x)))


def loss_of(model: nn.Module, step: int, site: int) -> Tensor:
    """Mean square error to a fixed function, on this site's batch of the step."""
    g = torch.Generator().manual_seed(997 * step + site)
    x = torch.randn(16, 8, generator=g)
    return (model(x) - torch.sin(2 * x).roll(1, 1)).square().mean()


def inner_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, inner: torch.optim.Optimizer, step: int, site: int) -> None:
    """One inner step."""
    inner.zero_grad()
    loss_of(model, step, site).backward()
    inner.step()


def trained(model: nn.Module) -> Weights:
    """Copies of the weights that train."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


class Sites:
    """All sites of a run in this process: models, inner optimisers, one anchor."""

    def __init__(self, count: int, hidden: int = 24) -> None:
        self.models = [Net(hidden) for _ in range(count)]
        self.inner = [inner_of(model) for model in self.models]
        self.anchor = trained(self.models[0])

    def train(self, step: int) -> None:
        for site, (model, inner) in enumerate(zip(self.models, self.inner)):
            train(model, inner, step, site)

    def weights(self, site: int) -> Weights:
        return {name: p.data for name, p in self.models[site].named_parameters() if p.requires_grad}

    def mean(self, name: str, coded: Callable[[int, Tensor], Tensor] = lambda site, x: x) -> Tensor:
        """Of what every site sends of its outer gradient, added in the order of sites."""
        count = len(self.models)
        total = coded(0, self.anchor[name] - self.weights(0)[name]).clone()
        for site in range(1, count):
            total += coded(site, self.anchor[name] - self.weights(site)[name])
        return total / count
