"""A model that was trained with learned boundaries goes on without them: they open little by little.

    y = p + share·(x − p)       p: what a boundary passes of hidden states x; share: 0 → 1 over `[boundary] open` steps

Hidden states cross whole meanwhile, whatever the split is now, and what is exported is a plain model. Evaluation is
that of the plain model from the start.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.errors import UsageError
from thinwire.train.config.sections import TrainConfig
from thinwire.train.model.boundaries import cutting, read_boundaries
from thinwire.train.model.stage import Stage


class Opening:
    """The boundaries that open in a run; there may be none.

    config: the run's. stages: this rank's.
    """

    def __init__(self, config: TrainConfig, stages: Mapping[int, Stage]) -> None:
        self.steps = config.boundary.open
        self.seen: dict[str, Tensor] = {}
        self.share = 1.0
        found = read_boundaries(Path(config.model.path or "")) if self.steps else {}
        self.needs_tokens = any("tokens" in own or "table" in own for own in found.values())
        if self.needs_tokens and config.run.recompute:
            raise UsageError(
                "[boundary] open: boundaries with anchors or tables do not open under [run] recompute: leave it out"
            )
        for stage in stages.values():
            layers = stage.get_submodule(stage.family.root).get_submodule(stage.family.layers)
            for number, layer in layers.named_children():
                if int(number) in found:
                    hook = cutting(found[int(number)], self.seen, lambda: self.share)
                    layer.register_forward_pre_hook(hook, with_kwargs=True)

    def check(self, steps: int) -> None:
        """UsageError where a run of so many steps would end before all is open."""
        if self.steps > steps:
            raise UsageError(f"[boundary] open = {self.steps}: the run has {steps} steps only")

    def begin(self, step: int, train: bool = True) -> None:
        """What follows belongs to training step number `step`, or to an evaluation."""
        self.share = min(1.0, (step + 1) / self.steps) if train and self.steps else 1.0

    def around(self, modules: dict[int, nn.Module]) -> dict[int, nn.Module]:
        """The stages' modules; they are called with `tokens` where boundaries have anchors or tables."""
        return {i: Told(module, self.seen) if self.needs_tokens else module for i, module in modules.items()}


class Told(nn.Module):
    """A module that is called with the tokens of its micro-batch, and leaves them where hooks look."""

    def __init__(self, module: nn.Module, seen: dict[str, Tensor]) -> None:
        super().__init__()
        self.module = module
        self.seen = seen

    def forward(self, x: Tensor, *, tokens: Tensor | None = None, **more: Any) -> Any:
        """tokens: ids, int[batch, seq]; None where torch only looks at shapes. more: `module`'s own keywords."""
        self.seen["tokens"] = x.new_zeros(x.shape[:2], dtype=torch.int64) if tokens is None else tokens
        return self.module(x, **more)
