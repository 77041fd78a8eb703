"""The learning rate as a function of the step, which parameters decay, and how long a run is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from thinwire.train.config.sections import OptimConfig


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
