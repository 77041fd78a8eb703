"""What sites tell each other beside weights: whether one was asked to stop, and its part of the metrics.

It goes with a round: one small message per rank leaves when a round is sent, and is read when the round's mean is
applied, which waits for the other sites anyway. Between two rounds sites tell each other nothing, so a site knows the
others' numbers as of the last round, and a stop takes effect at the next one, on all sites after the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.config.local import Local
from thinwire.local_steps.schedule import Schedule
from thinwire.torch_private.groups import timeout_of
from thinwire.train.mesh import Mesh

HEAD = 5  # numbers of a message before the counters: stop, losses added up, of how many steps, bytes sent, raw bytes


class Sent(NamedTuple):
    """Bytes to other sites, and what data parallel in fp32 would have sent there."""

    bytes: int
    raw: int


class News:
    """All ranks of all sites; every method but `note` is called by all of them together.

    settings: when rounds are. mesh: of this rank. counters: how many a message has.
    """

    def __init__(self, settings: Local, mesh: Mesh, counters: int) -> None:
        self.schedule = Schedule.of(settings)
        self.mesh = mesh
        self.group = dist.new_group(timeout=timeout_of(None), backend="gloo")
        self.under_way: tuple[dist.Work, list[Tensor]] | None = None
        self.loss, self.steps = 0.0, 0  # added up since the last message
        self.others = torch.zeros(counters, dtype=torch.float64)  # counters of all other sites, as last heard
        self.sent = Sent(0, 0)  # by all ranks of all sites, as last heard

    def note(self, loss: float) -> None:
        """Of this site's step."""
        self.loss += loss
        self.steps += 1

    def after(self, step: int, stop: bool, sent: Sent, counters: Tensor) -> dict[str, Any] | None:
        """Tell and hear, as is due after this inner step; what was heard (`_heard`), None where nothing was due.

        stop: this site was asked to. sent: by this rank to other sites so far. counters: of this rank."""
        exact = self.schedule.is_warmup(step)
        if exact or 0 in self.schedule.sent(step):
            self._tell(stop, sent, counters)
        return self._hear() if exact or 0 in self.schedule.applied(step) else None

    def at_once(self, sent: Sent, counters: Tensor) -> dict[str, Any] | None:
        """Tell and hear now, at the start and the end of training."""
        self._hear()
        self._tell(False, sent, counters)
        return self._hear()

    def close(self) -> None:
        """Free the group."""
        dist.destroy_process_group(self.group)

    def _tell(self, stop: bool, sent: Sent, counters: Tensor) -> None:
        head = torch.tensor([stop, self.loss, self.steps, *sent], dtype=torch.float64)
        mine = torch.cat((head, counters.double()))
        self.loss, self.steps = 0.0, 0
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        work = dist.all_gather(everyone, mine, group=self.group, async_op=True)
        assert work is not None
        self.under_way = work, everyone

    def _hear(self) -> dict[str, Any] | None:
        if self.under_way is None:  # it was told before the checkpoint that this run goes on from
            return None
        work, everyone = self.under_way
        self.under_way = None
        work.wait()
        return self._heard(everyone)

    def _heard(self, everyone: Sequence[Tensor]) -> dict[str, Any]:
        """stop: was any site asked to? losses: of each site, the mean since the last round. sent: bytes to other sites
        by each site so far."""
        sites = torch.stack(list(everyone)).view(self.mesh.config.sites, self.mesh.config.site_ranks, -1)
        others = [site for site in range(self.mesh.config.sites) if site != self.mesh.site]
        sums = sites.sum(1)
        self.others = sums[others, HEAD:].sum(0)
        self.sent = Sent(*(int(number) for number in sums[:, 3:HEAD].sum(0).tolist()))
        losses = [loss / steps if steps else None for _, loss, steps, *_ in sites[:, 0].tolist()]
        sent = [int(number) for number in sums[:, 3].tolist()]
        return {"stop": bool(sites[:, :, 0].any()), "losses": losses, "sent": sent}
