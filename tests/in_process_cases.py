"""A training with compressed gradients, member by member: the same between real ranks and between members in one
process, to the bit."""

from __future__ import annotations

from functools import partial

import torch
from rank_cases import check
from torch import Tensor, nn

from thinwire import collectives as c
from thinwire.codecs import Quantize
from thinwire.collectives.groups import Group, Metered, world
from thinwire.collectives.in_process import InProcessGroup
from thinwire.memory import Diana, ErrorFeedback, Memory
from thinwire.memory.channel import Channel

STEPS = 200
METHODS: dict[str, tuple[c.Collective, Memory]] = {
    "Ok-Topk as published": (c.OkTopk(0.05, tau_prime=32, thresholds="nudged"), ErrorFeedback()),
    "Ok-Topk": (c.OkTopk(0.05, values="int8", indices="coded"), ErrorFeedback()),
    "gTopk": (c.GTopk(0.05), ErrorFeedback()),
    "4 bits": (c.Quantized(4), ErrorFeedback()),
    "DIANA": (c.Gather(Quantize(4, rounding="stochastic")), Diana()),
}


def trained(name: str, group: Group, steps: int = STEPS) -> tuple[Tensor, int]:
    """This member's weights after training its own copy of a small network, and the bytes it sent."""
    _, rank = world(group)
    meter = Metered(group) if not isinstance(group, Metered) else group
    generator = torch.Generator().manual_seed(5)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    weights = [p.data.copy_(0.5 * torch.randn(p.shape, generator=generator)) for p in model.parameters()]
    collective, memory = METHODS[name]
    channel = Channel(collective, memory, seed=3, name=name)
    own = torch.Generator().manual_seed(100 + rank)
    for step in range(steps):
        x = torch.randn(16, 8, generator=own)
        with torch.enable_grad():
            loss = (model(x) - x[:, :4] * x[:, 4:]).square().mean()
            parts = torch.autograd.grad(loss, list(model.parameters()))
        channel.begin(step)
        mean = channel.reduce("gradient", torch.cat([part.reshape(-1) for part in parts]), meter)
        channel.commit()
        for weight, part in zip(weights, mean.split([w.numel() for w in weights])):
            weight.sub_(part.view_as(weight), alpha=0.1)
    return torch.cat([weight.reshape(-1) for weight in weights]), meter.sent


def members_in_one_process_train_as_ranks_do() -> None:
    """Weights and bytes of every rank after 200 steps."""
    size, rank = world(None)
    with torch.no_grad():
        for name in METHODS:
            mine, sent = trained(name, None)
            weights, there = InProcessGroup(size).run(partial(trained, name))[rank]
            check(
                torch.equal(mine, weights), f"{name}: {int((mine != weights).sum())} of {mine.numel()} weights differ"
            )
            check(sent == there, f"{name}: {sent} bytes between ranks, {there} in one process")
