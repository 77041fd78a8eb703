"""At step start the two ends of every boundary with per-sample memory compare their mirrors of the step's samples.

Each end sends one digest per sample, −1 where it holds no mirror. A sample is warm where both digests are equal, and
cold in this step everywhere else. So lost or different mirrors are detected and healed, and both ends know the size of
every frame, by one small message. Where the next step is known, it is sent before this one has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.memory.store import Key, RamStore
from thinwire.pipeline.lane import Lane

TAG = 2  # on a CPU, the last bits of the tags of digests


class MirrorCheck(NamedTuple):
    """What a comparison found: whether this rank holds any mirror of these samples, and how many differed."""

    found: bool
    differing: int


@dataclass(frozen=True)
class SampleLane:
    """A lane whose two ends remember samples: its boundary's number, and the rank of its other end in the group."""

    lane: Lane
    boundary: int
    peer: int


class Digests:
    """The digests that the other ends send: on a CPU receives are posted when those of the step before have come.

    group: the ranks of the pipeline; on CPUs nobody else sends in it with tags that end in TAG.
    device: where messages of the group have to be.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.posted: dict[tuple[int, int], tuple[Tensor, dist.Work]] = {}  # by boundary and number of samples

    def exchange(self, lanes: Sequence[SampleLane], own: Sequence[Tensor]) -> tuple[list[Tensor], list[dist.Work]]:
        """Send each lane's digests to its other end: (what they send, once the works are done; the works)."""
        if self.device.type != "cpu":
            return self._batch(lanes, own)
        incoming: list[Tensor] = []
        works: list[dist.Work] = []
        for one, digests in zip(lanes, own):
            count = len(digests)
            posted = (one.boundary, count) in self.posted
            buffer, work = self.posted.pop((one.boundary, count)) if posted else self._post(one, count)
            incoming.append(buffer)
            sent = dist.isend(digests, group=self.group, group_dst=one.peer, tag=_tag(one.boundary, count))
            works += [work] if sent is None else [work, sent]
        return incoming, works

    def post_again(self, lanes: Sequence[SampleLane], count: int) -> None:
        """The digests of `count` samples have come: wait for as many in the next step."""
        for one in lanes if self.device.type == "cpu" else ():
            self.posted[one.boundary, count] = self._post(one, count)

    def _post(self, one: SampleLane, count: int) -> tuple[Tensor, dist.Work]:
        buffer = torch.empty(count, dtype=torch.int64)
        work = dist.irecv(buffer, group=self.group, group_src=one.peer, tag=_tag(one.boundary, count))
        assert work is not None
        return buffer, work

    def _batch(self, lanes: Sequence[SampleLane], own: Sequence[Tensor]) -> tuple[list[Tensor], list[dist.Work]]:
        outgoing = [digests.to(self.device) for digests in own]
        incoming = [torch.empty_like(digests) for digests in outgoing]
        receives = [dist.P2POp(dist.irecv, x, group=self.group, group_peer=one.peer) for one, x in zip(lanes, incoming)]
        sends = [dist.P2POp(dist.isend, x, group=self.group, group_peer=one.peer) for one, x in zip(lanes, outgoing)]
        return incoming, dist.batch_isend_irecv(receives + sends) if lanes else []


def _tag(boundary: int, count: int) -> int:
    return (boundary << 20 | count) * 4 + TAG


class Comparison:
    """A comparison under way: digests are sent when it is made. All ranks make it together.

    lanes: this rank's, in boundary order.
    ids: the samples of the step.
    digests: how they travel.
    """

    def __init__(self, lanes: Sequence[SampleLane], ids: Sequence[int], digests: Digests) -> None:
        self.lanes = lanes
        self.ids = ids
        self.digests = digests
        self.own = [one.lane.digests(ids).cpu() for one in lanes]
        self.incoming, self.works = digests.exchange(lanes, self.own)

    def wait(self) -> None:
        """Until the other ends' digests are there."""
        for work in self.works:
            work.wait()
        self.digests.post_again(self.lanes, len(self.ids))

    def finish(self) -> MirrorCheck:
        """Wait, and forget, for this step, the samples whose mirrors the two ends do not hold alike."""
        self.wait()
        differing = 0
        for one, here, there in zip(self.lanes, self.own, self.incoming):
            different = [self.ids[i] for i in (here != there.cpu()).nonzero().flatten().tolist()]
            if different:
                one.lane.forget(different)
            differing += len(different)
        return MirrorCheck(any(bool((digests >= 0).any()) for digests in self.own), differing)


class Prefetch:
    """Reads the next batch's mirrors from a file store while backward runs: one thread, joined before anything is
    written."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, stores: Sequence[RamStore], keys: Sequence[Key]) -> None:
        """Read `keys` of every store in the background; a second call in the same step does nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(stores, keys), name="thinwire prefetch")
            self._thread.start()

    def _run(self, stores: Sequence[RamStore], keys: Sequence[Key]) -> None:
        try:
            for store in stores:
                store.prefetch(keys)
        except BaseException as error:  # handed to the thread that joins
            self._error = error

    def join(self) -> None:
        """Wait for the read; an error in it is raised here."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error = self._error
        self._error = None
        if error is not None:
            raise error
