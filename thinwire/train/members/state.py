"""What a newcomer takes from a member, and what a member's checkpoint holds.

model/<name>            weights
optim/<name>/<field>    moments
exchange/<name>, …      a rank's own residuals, shifts and memory (gradients.py); in checkpoints only
number/<name>           of the run
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.errors import UsageError

Numbers = dict[str, float]


class Shared:
    """What all members have alike: weights, moments, and the run's numbers. A newcomer takes it (tw.elastic.Quorum).

    named: the parameters. adam: their optimiser. numbers: of the run; changed in place. taken: called after another
    member's state was taken.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        adam: torch.optim.Optimizer,
        numbers: Numbers,
        taken: Callable[[], None],
    ) -> None:
        self.named = named
        self.adam = adam
        self.numbers = numbers
        self.taken = taken

    def state_dict(self) -> dict[str, Any]:
        return {"tensors": self.tensors(), "numbers": dict(self.numbers)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.load_tensors(state["tensors"], "the other member")
        self.numbers.update(state["numbers"])
        self.taken()

    def tensors(self) -> dict[str, Tensor]:
        """Weights and moments."""
        out = {f"model/{name}": p.detach() for name, p in self.named.items()}
        for name, p in self.named.items():
            out |= {f"optim/{name}/{field}": value for field, value in self.adam.state.get(p, {}).items()}
        return out

    @torch.no_grad()
    def load_tensors(self, state: Mapping[str, Tensor], source: str) -> None:
        """UsageError where they are of another model. source: where they come from."""
        for name, p in self.named.items():
            stored = state.get(f"model/{name}")
            if stored is None or stored.shape != p.shape:
                found = "is not there" if stored is None else f"is {tuple(stored.shape)} there, not {tuple(p.shape)}"
                raise UsageError(f"{source} has another model: {name} {found}")
            p.copy_(stored)
            prefix = f"optim/{name}/"
            fields = {key.removeprefix(prefix): value.clone() for key, value in state.items() if key.startswith(prefix)}
            if fields:
                self.adam.state[p] = fields


def checkpoint(shared: Shared, own: Mapping[str, Tensor], numbers: Mapping[str, float]) -> dict[str, Tensor]:
    """All that a rank goes on from. own: what belongs to it alone."""
    counts = {
        f"number/{name}": torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)
        for name, value in numbers.items()
    }
    return shared.tensors() | dict(own) | counts


def restore(shared: Shared, state: Mapping[str, Tensor], pp: int, source: str) -> Numbers:
    """Go on from there, but for what belongs to a rank alone: the numbers. pp: this member's pipeline ranks.
    UsageError where it is no checkpoint of an elastic run, or members had other pipelines."""
    numbers = {name.removeprefix("number/"): v.item() for name, v in state.items() if name.startswith("number/")}
    if "step" not in numbers:
        raise UsageError(f"{source} is of a run whose ranks stay: --elastic cannot go on from it")
    before = int(numbers.get("pp", 1))
    if before != pp:
        raise UsageError(f"{source} is of members with [mesh] pp = {before}, not {pp}: --elastic cannot go on from it")
    shared.load_tensors(state, source)
    return numbers
