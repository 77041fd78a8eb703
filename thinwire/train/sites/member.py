"""One rank among several sites: its averages (averaging.py), what sites tell each other (news.py), and the metrics."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.train.config.sections import TrainConfig
from thinwire.train.mesh import Mesh
from thinwire.train.sites.averaging import Sites
from thinwire.train.sites.news import News, Sent
from thinwire.train.totals import BYTES, COUNTS, Totals
from thinwire.train.update import Update


class Member:
    """Made and called on all ranks of all sites together, while all sites have the same weights.

    config, mesh, update, totals: of this rank. began: the step of the run before its first local step.
    """

    def __init__(self, config: TrainConfig, mesh: Mesh, update: Update, totals: Totals, began: int) -> None:
        self.averaging = Sites(config, mesh, update)
        self.news = News(self.averaging.settings, mesh, len(COUNTS))
        self.totals = totals
        self.began = began
        self.sent_before = Sent(0, 0)  # by this rank, before the checkpoint that the run goes on from

    def after(self, step: int, tokens: int, last: bool, stop: bool, numbers: dict[str, Any]) -> dict[str, Any] | None:
        """After the run's step of this number: average what is due; what was heard of other sites, None if nothing.

        tokens: that this site was trained on in it. last: it is the run's last step. stop: this site was asked to.
        numbers: of the step, of this site; the bytes in it become those of all sites, of the others as last heard.
        """
        self.averaging.step(tokens)
        self.news.note(numbers["loss"])
        if last:
            self.averaging.finish()
            heard = self.news.at_once(self.sent, self.totals.last)
        else:
            heard = self.news.after(step - self.began, stop, self.sent, self.totals.last)
        for at, name in enumerate(COUNTS[:BYTES]):
            numbers[name] += int(self.news.others[at])
        numbers["site_bytes"], numbers["site_raw_bytes"] = self.news.sent
        numbers["raw_bytes"] += self.news.sent.raw
        self.totals.bytes = sum(numbers[name] for name in (*COUNTS[: BYTES - 1], "site_bytes"))
        return heard

    @property
    def sent(self) -> Sent:
        """By this rank to other sites since the start of the run."""
        return Sent(*(sum(pair) for pair in zip(self.averaging.sent, self.sent_before)))

    def at_anchor(self) -> AbstractContextManager[None]:
        """Inside, the weights are those that all sites share."""
        return self.averaging.at_anchor()

    def close(self) -> None:
        """End the communication threads, and free the groups."""
        self.averaging.close()
        self.news.close()

    # --- checkpoints

    def state_dict(self) -> dict[str, Tensor]:
        """Everything between sites, and where the run is with it."""
        mesh = self.averaging.mesh.config
        numbers = {"sites": torch.tensor(mesh.sites), "began": torch.tensor(self.began)}
        return self.averaging.state_dict() | numbers | {_sent_name(): torch.tensor(self.sent)}

    def wants(self, name: str) -> bool:
        """Is this name of a checkpoint for `load_state_dict`?"""
        return name == _sent_name() or self.averaging.wants(name)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from there, also where it is of another number of sites."""
        self.averaging.load_state_dict(state)
        if _sent_name() in state:
            self.sent_before = Sent(*state[_sent_name()].tolist())

    def begin(self) -> None:
        """Before the first step: hear what the others have counted so far."""
        self.news.at_once(self.sent, self.totals.state())


def _sent_name() -> str:
    return f"rank-{dist.get_rank()}/between sites"
