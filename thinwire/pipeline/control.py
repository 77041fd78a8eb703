"""The small messages of a pipeline: announcements, digests of mirrors, and whether any rank saw a fault.

They have a process group of their own and are on the host, so that none waits behind frames. What concerns the next
step is sent during this one, where the next step is certain: then no rank waits for it. Only where the pipeline's group
has no backend for CPUs (NCCL alone) they are messages of that group, and nothing is sent ahead, since all ranks have to
make its messages in one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from thinwire.collectives.groups import destroy, has_cpu_backend, twin, world
from thinwire.collectives.messages import maximum
from thinwire.pipeline.announce import UNKNOWN, Announcement, Announcer
from thinwire.pipeline.mirror_check import Comparison, Digests, MirrorCheck, SampleLane


class Control:
    """One rank's part.

    group: the ranks of the pipeline. root: the rank of the first stage. device: of this rank's stages.
    sample_lanes: its lanes with per-sample memory in boundary order.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, root: int, device: torch.device, sample_lanes: list[SampleLane]
    ) -> None:
        self.on_host = device.type == "cpu" or world(group)[0] == 1 or has_cpu_backend(group)
        self.group = twin(group) if self.on_host and world(group)[0] > 1 else group
        self.device = torch.device("cpu") if self.on_host else device
        self.sample_lanes = sample_lanes
        self.announcer = Announcer(self.group, root, self.device)
        self.digests = Digests(self.group, self.device)
        self._comparison: Comparison | None = None  # of the next step's mirrors, under way

    def open(self, own: Announcement | str | None, next_certain: bool) -> Announcement:
        """Announce a step; returns it as all ranks know it.

        own: on the first stage's rank the announcement, or what is wrong. next_certain: there, the next step trains,
        with `next_ids` and of this shape.
        """
        if not self.on_host or not isinstance(own, Announcement):
            return self.announcer.announce(own)
        following = Announcement(own.step + 1, True, own.next_ids, own.shape, ahead=True) if next_certain else UNKNOWN
        if next_certain:
            own = replace(own, next_ids=None, ahead=True)
        announced = self.announcer.announce(own)
        if announced.ahead:
            self.announcer.announce_next(following)
        return announced

    def next_ids(self, announced: Announcement) -> Sequence[int] | None:
        """The samples of the step after this one, where they are known; waits for their announcement."""
        return self.announcer.announce_next(None).ids if announced.ahead else announced.next_ids

    def compare_mirrors(self, ids: Sequence[int]) -> MirrorCheck:
        """Forget, for the step that begins with these samples, mirrors that the two ends do not hold alike."""
        if self._comparison is not None and list(self._comparison.ids) != list(ids):
            self.restart()
        comparison, self._comparison = self._comparison or self._compare(ids), None
        return comparison.finish()

    def prepare_next(self, announced: Announcement) -> None:
        """All messages of this step have come: compare mirrors for the next one, if it is known. They are those that
        will be there if this step counts; if it does not, `restart` has to be called."""
        if announced.ahead:
            ids = self.announcer.announce_next(None).ids
            self._comparison = None if ids is None else self._compare(ids)

    def restart(self) -> None:
        """All ranks have gone back to other mirrors: what was compared of the next step's does not hold."""
        if self._comparison is not None:
            self._comparison.wait()
            self._comparison = None

    def close(self) -> None:
        """Free the group, where it is the control's own."""
        if self.group is not None and self.on_host:
            destroy(self.group)

    def any_faults(self, count: int) -> bool:
        """Did any rank count a fault?"""
        return bool(maximum(torch.tensor([count], device=self.device), self.group))

    def _compare(self, ids: Sequence[int]) -> Comparison:
        return Comparison(self.sample_lanes, ids, self.digests)
