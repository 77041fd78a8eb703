"""The learning rate as a function of the step, what optimisers are given, and how long a run is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from thinwire.config.wire import Wire
from thinwire.data_parallel.frozen_adam import FrozenAdam
from thinwire.train.config.sections import OptimConfig, TrainConfig


def rate(config: OptimConfig, step: int, steps: int) -> float:
    """The rate of `step`, 0 … steps − 1: linear from lr/warmup to lr, then constant, or a cosine down to lr · final.

    The last step of the cosine has lr · final; so would any after it.
    """
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    if config.schedule == "constant":
        return config.lr
    span = max(1, steps - 1 - config.warmup)
    done = min(1.0, (step - config.warmup) / span)
    return config.lr * (config.final + (1 - config.final) * (1 + math.cos(math.pi * done)) / 2)


def groups(config: OptimConfig, named: Mapping[str, nn.Parameter]) -> list[dict[str, Any]]:
    """Two groups for torch's optimisers, with the names of their parameters: matrices with weight decay; biases and
    norms without. `named`: the parameters by name."""
    out = []
    for decay, matrices in ((config.weight_decay, True), (0.0, False)):
        chosen = {name: weight for name, weight in named.items() if (weight.dim() > 1) == matrices}
        if chosen:
            out.append({"params": list(chosen.values()), "names": list(chosen), "weight_decay": decay})
    return out


def total_steps(config: OptimConfig, steps_per_epoch: int) -> int:
    """How many steps a run has: `[optim] steps`, or `epochs` times `steps_per_epoch`."""
    return config.steps if config.steps is not None else config.epochs * steps_per_epoch


def frozen_adam(
    config: TrainConfig, wire: Wire, replicas: dist.ProcessGroup, named: Mapping[str, nn.Parameter], epoch: int
) -> FrozenAdam:
    """The wire's gradient section is for its momentum; `freeze_after` replaces its warm-up. replicas: the ranks
    with the same parameters, `named`. epoch: steps of one."""
    after = epoch if config.optim.freeze_after == "epoch" else config.optim.freeze_after
    inside: Any = [{**g, "params": list(zip(g.pop("names"), g["params"]))} for g in groups(config.optim, named)]
    given = {"wire": wire} if wire.gradient is not None else {"wire": "off"}
    return FrozenAdam(
        inside, **moments(config), weight_decay=config.optim.weight_decay, freeze_after=after, group=replicas,
        seed=config.run.seed, **given,
    )  # fmt: skip


def moments(config: TrainConfig) -> dict[str, Any]:
    """Rate, and what the two moments are kept with."""
    return {"lr": config.optim.lr, "betas": config.optim.betas, "eps": config.optim.eps}
