"""Which gradients are final while backward still runs: they can be sent at once.

A parameter's gradient is final when it has been added to as often as in the step before: once per micro-batch, or more
often where two stages share it. The first step only counts. Whatever is not sent so goes when backward has ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import nn

from thinwire.data_parallel.reducer import Reducer


class GradientWatch:
    """Puts gradients into their reducers as soon as they are final.

    reducers: each with its parameters by name.
    """

    def __init__(self, reducers: list[Reducer]) -> None:
        self.counts: Counter[nn.Parameter] = Counter()
        self.usual: Mapping[nn.Parameter, int] = {}
        self.of = {p: (reducer, name) for reducer in reducers for name, p in reducer.parameters.items()}
        self.hooks = [p.register_post_accumulate_grad_hook(self._added) for p in self.of]

    def end_backward(self) -> None:
        """All gradients of the step are complete."""
        self.usual = dict(self.counts)
        self.counts.clear()

    def close(self) -> None:
        """Watch no more."""
        for hook in self.hooks:
            hook.remove()

    def _added(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        self.counts[parameter] += 1
        usual = self.usual.get(parameter, 0)
        reducer, name = self.of[parameter]
        if self.counts[parameter] == usual:
            reducer.put(name, parameter.grad)
        elif usual and self.counts[parameter] > usual:
            raise RuntimeError(f"{name} got more gradients than in the step before, after it was sent")
