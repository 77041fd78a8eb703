"""What a newcomer takes from a member, and what a member's checkpoint holds.

model/<name>            weights
optim/<name>/<field>    moments
exchange/<name>, …      a rank's own residuals, shifts and memory (gradients.py); in checkpoints only
number/<name>           of the run
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.errors import UsageError

Numbers = dict[str, float]


class Shared:
    """What all members have alike: weights, moments, and the run's numbers. A newcomer takes it (tw.elastic.Quorum).

    named: the parameters. adam: their optimiser. numbers: of the run; changed in place. later: weights and moments are
    not in it, but a digest of them: they come while training goes on (late.py). taken: called after another member's
    state was taken, with whether weights and moments are the others'.
    """

    def __init__(
        self, named: Mapping[str, nn.Parameter], adam: torch.optim.Optimizer, numbers: Numbers, later: bool,
        taken: Callable[[bool], None],
    ) -> None:  # fmt: skip
        self.named = named
        self.adam = adam
        self.numbers = numbers
        self.later = later
        self.taken = taken
        self.is_whole = True  # weights and moments are those of this step

    def state_dict(self) -> dict[str, Any]:
        about: dict[str, Any] = {"digest": self.digest()} if self.later else {"tensors": self.tensors()}
        return about | {"numbers": dict(self.numbers)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not self.later:
            self.load_tensors(state["tensors"], "the other member")
        self.numbers.update(state["numbers"])
        self.taken(not self.later or state["digest"] == self.digest() != "")

    def digest(self) -> str:
        """Of weights and moments; "" where they are not those of this step."""
        if not self.is_whole:
            return ""
        found = hashlib.blake2b()
        for name, value in self.tensors().items():
            found.update(name.encode())
            found.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return found.hexdigest()

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
