"""A stage's products in bfloat16, its messages in the dtype of its weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.train.config.sections import TrainConfig
from thinwire.train.model.stage import Stage


def autocast(config: TrainConfig) -> Callable[[], AbstractContextManager[Any]]:
    """Makes the context in which a stage runs: torch's autocast to bfloat16, or none, as `[run] autocast` says."""
    if config.run.autocast == "off":
        return nullcontext
    return lambda: torch.autocast(config.run.device, dtype=torch.bfloat16)


class Casting(nn.Module):
    """A stage under autocast, whose messages keep one dtype: what crosses a boundary has the weights' dtype."""

    def __init__(self, stage: Stage, context: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.stage, self.context = stage, context
        self.dtype = next(stage.parameters()).dtype

    def forward(self, x: Tensor, **beside: Tensor) -> Tensor:
        """What the stage makes of `x`; beside: its own keywords."""
        with self.context():
            return self.stage(x, **beside).to(self.dtype)


def casting(stage: Stage, config: TrainConfig) -> nn.Module:
    """The stage as `[run] autocast` says."""
    return stage if config.run.autocast == "off" else Casting(stage, autocast(config))
