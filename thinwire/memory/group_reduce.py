"""The rule (rule.py) over a group: every member sends through a collective, all get the mean.

    u_i = s·x_i + η·e_i − h_i ;  (mean d, own_i) = exchange(u_i) ;  y = h̄ + mean d
    e_i ← β(e_i + s·x_i − h_i − own_i) ;  h_i ← h_i + α·own_i ;  h̄ ← h̄ + α·mean d

On a refresh, which the whole group draws alike, h_i ← x_i and h̄ ← mean x.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from thinwire.codecs.base import Codec
from thinwire.memory.state import KeyedState
from thinwire.memory.store import Key
from thinwire.steps import Steps

State = dict[str, Tensor]  # a collective's own tensors, by name


@runtime_checkable
class Averaging(Protocol):
    """What a channel asks of a collective; collectives/base.py says it in full, and what a group is."""

    def exchange(
        self, u: Tensor, group: Any = None, *, state: State, key: object = "", step: int = 0, seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        """(the mean of u over the group, this member's own part of it)."""

    # A collective may also have `steps`, which does the same and stops where it would wait (thinwire/steps.py), and
    # `mean_steps`, which gives the mean alone, or None where that is no cheaper.

    def mean(self, x: Tensor, group: Any = None) -> Tensor:
        """The exact mean of x over the group."""


def beside(value: Tensor | None, x: Tensor) -> Tensor | None:
    """A remembered value where x is: one that was loaded from a checkpoint is in host memory."""
    return None if value is None else value.to(x.device)


def reduce_by_rule(
    collective: Averaging, state: KeyedState, key: Key, x: Tensor, group: Any, *, collective_state: State, step: int,
    seed: int,
) -> Steps[Tensor]:  # fmt: skip
    """The mean of x over the group; stops where the collective would wait.

    collective: how members exchange. state: this member's keyed state, with the memory; key: whose. x: this member's
    tensor. group: the process group. collective_state: the collective's own tensors for this key, replaced in place.
    step, seed: the step's number and the message's seed, equal on all members.
    """
    memory = state.memory
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    e, h = beside(state.residual(key, x.shape), x), beside(state.shift(key, x), x)
    u = memory.outgoing(x, e, h)
    given: Any = {"state": collective_state, "key": key, "step": step, "seed": seed}
    if h is None and memory.beta is None and hasattr(collective, "mean_steps"):
        alone = collective.mean_steps(u, group)
        if alone is not None:
            return (yield from alone)
    if hasattr(collective, "steps"):
        mean, own = yield from collective.steps(u, group, **given)
    else:
        mean, own = collective.exchange(u, group, **given)
    center = beside(state.read("m", key), x) if memory.mirrored else None
    if h is not None and not memory.mirrored:
        center = collective.mean(h, group)  # of fixed shifts
    if memory.beta is not None:
        state.write("e", key, memory.residual(x, e, h, own))
    if memory.mirrored:
        refresh = memory.refreshes(seed)
        codec: Codec | None = getattr(collective, "codec", None)  # Gather's and TwoHop's
        moved = memory.next_shift(h, own, codec, x.clone() if refresh else None)
        if moved is not None:
            state.write("h", key, moved)
        moved = memory.next_shift(center, mean, codec, collective.mean(x, group) if refresh else None)
        if moved is not None:
            state.write("m", key, moved)
    return mean if center is None else center + mean
