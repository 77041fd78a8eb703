"""What every collective is, and how bytes move between the members of a group.

    exchange(u, group, state=…, key=…, step=…, seed=…) → (mean, own),   Σ_i own_i = P · mean

`own` is what this member's part of the mean was: the memory's residual is what is left of u without it. `state` is a
dict of tensors that the channel owns and checkpoints; a collective replaces entries and never writes into one.
`seed` is the group's; a member's own is derived from it and its rank. World size 1 needs no process group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.groups import Group
from thinwire.collectives.sums import exact_mean
from thinwire.steps import Steps, finish

State = dict[str, Tensor]


class Collective:
    """One way to average a vector over a group; a subclass says how in `exchange`, or in `steps`."""

    fixed_sizes = False  # messages of one tensor have the same sizes every time, so receives can be posted early

    def exchange(
        self, u: Tensor, group: Group = None, *, state: State, key: object = "", step: int = 0, seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        """(mean of u over the group, this member's part of it).

        u: this member's tensor, of the same shape on all. group: the process group. state: tensors kept for this key,
        replaced in place. key: names the tensor in errors. step: its number. seed: the group's, of this message.

        InvalidExchange, after the last message, where this member sees that the result cannot be used; others may not
        have seen it, and the caller has to agree with them (`Reducer`, `tw.all_reduce` and `FrozenAdam` do). On a card
        some raise nothing, since the host would have to wait: the mean is not finite then.
        """
        return finish(self.steps(u, group, state=state, key=key, step=step, seed=seed))

    def steps(
        self, u: Tensor, group: Group = None, *, state: State, key: object = "", step: int = 0, seed: int = 0
    ) -> Steps[tuple[Tensor, Tensor]]:
        """`exchange`, stopping where it would wait for messages, so that other exchanges can go on. Where a subclass
        has `exchange` only, it never stops."""
        if type(self).exchange is Collective.exchange:
            raise NotImplementedError(f"{type(self).__name__} has neither exchange nor steps")
        yield from ()
        return self.exchange(u, group, state=state, key=key, step=step, seed=seed)

    def mean_steps(self, u: Tensor, group: Group = None) -> Steps[Tensor] | None:
        """`steps` for a memory that does not ask for this member's part, where that is cheaper; else None."""
        return None

    def mean(self, x: Tensor, group: Group = None) -> Tensor:
        """The exact mean, for what a memory sends in full."""
        return exact_mean(x, group)

    def for_shapes(self, shapes: Sequence[tuple[int, ...]]) -> Collective:
        """This collective for the flat concatenation of several tensors; the same, where shapes mean nothing to it."""
        return self

    def leave_groups(self, group: Group) -> list[dist.ProcessGroup]:
        """Groups that this collective made of members of `group`, which are forgotten: for the caller to destroy."""
        return []

    def finish_step(self, states: list[State], numels: list[int], group: Group = None) -> None:
        """Once per step, after its last exchange: what is decided over all units. states: the units' states, changed
        in place; numels: their sizes in values."""
