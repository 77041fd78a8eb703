"""An exchange in a group whose members come and go: what changes with its members, and what a newcomer is told."""

from __future__ import annotations

import torch

from thinwire.collectives.members import Elastic, Saved
from thinwire.collectives.messages import maximum
from thinwire.data_parallel.exchange import Exchange
from thinwire.errors import UsageError


class Following:
    """An exchange that follows its quorum.

    group: whose members come and go. exchange: of its members. name: of what a newcomer is told. config: {field: text},
    equal on all members. device: where gradients are.
    """

    def __init__(
        self, group: Elastic, exchange: Exchange, name: str, config: dict[str, str], device: torch.device
    ) -> None:
        self.group = group
        self.exchange = exchange
        self.config = config
        self.device = device
        self.number: int | None = None  # of the quorum whose members the exchange knows
        group.register(name, self._load, self._save)

    def follow(self) -> None:
        """Before the first exchange of a step. All members begin anew where there is a new quorum."""
        if self.exchange.is_open:  # a member was lost before the vote knew of this step
            self.exchange.rollback()
        if self.group.number == self.number:
            return
        mine = torch.tensor([self.exchange.steps, self.group.committed, self.exchange.has_shifts])
        steps, committed, shifted = maximum(mine, self.group).tolist()
        if committed > self.group.committed:  # it was cut off while others went on, and has as many steps as they
            self.group.fall_behind()
            raise RuntimeError("this member's last step was not that of the others: it takes their state")
        self.exchange.rejoin(self.group, steps, bool(shifted), self.device)
        self.number = self.group.number

    def settle(self, counts: bool) -> None:
        """Keep what the step wrote, or drop it."""
        if counts:
            self.exchange.commit()
        else:
            self.exchange.rollback()

    def _save(self) -> Saved:
        return {"config": self.config, "steps": self.exchange.steps}

    def _load(self, told: Saved) -> None:
        theirs = told["config"]
        assert isinstance(theirs, dict)
        for field in [*self.config, *(name for name in theirs if name not in self.config)]:
            mine, other = self.config.get(field, "nothing"), theirs.get(field, "nothing")
            if mine != other:
                raise UsageError(f"this member differs from the quorum in {field}: {mine} against {other}")
        self.exchange.go_on_from(int(str(told["steps"])))
