"""At step start the two ends of every boundary with per-sample memory compare their mirrors of the step's samples.

Each end sends one digest per sample, −1 where it holds no mirror. A sample is warm where both digests are equal, and
cold in this step everywhere else. So lost or different mirrors are detected and healed, and both ends know the size of
every frame, by one small message. Where the next step is known, it is sent when this one has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from thinwire.memory.store import Key, RamStore
from thinwire.pipeline.lane import Lane

TAG = 2  # of digests, on a CPU


class MirrorCheck(NamedTuple):
    """What a comparison found: whether this rank holds any mirror of these samples, and how many differed."""

    found: bool
    differing: int


class Comparison:
    """A comparison under way: digests are sent when it is made. All ranks make it together.

    lanes: this rank's lanes with per-sample memory in boundary order, each with the rank of its other end in the group.
    ids: the samples of the step.
    group: the ranks of the pipeline; on CPUs nobody else sends with the tag TAG in it.
    device: where messages of the group have to be.
    """

    def __init__(
        self, lanes: Sequence[tuple[Lane, int]], ids: Sequence[int], group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.lanes = [lane for lane, _ in lanes]
        self.ids = ids
        self.own = [lane.digests(ids) for lane in self.lanes]
        outgoing = [digests.to(device) for digests in self.own]
        self.incoming = [torch.empty_like(digests) for digests in outgoing]
        tag = TAG if device.type == "cpu" else 0
        peers = [peer for _, peer in lanes]
        receives = [dist.P2POp(dist.irecv, x, group=group, group_peer=p, tag=tag) for p, x in zip(peers, self.incoming)]
        sends = [dist.P2POp(dist.isend, x, group=group, group_peer=p, tag=tag) for p, x in zip(peers, outgoing)]
        self.works = dist.batch_isend_irecv(receives + sends) if peers else []

    def wait(self) -> None:
        """Until the other ends' digests are there."""
        for work in self.works:
            work.wait()

    def finish(self) -> MirrorCheck:
        """Wait, and forget, for this step, the samples whose mirrors the two ends do not hold alike."""
        self.wait()
        differing = 0
        for lane, here, there in zip(self.lanes, self.own, self.incoming):
            different = [self.ids[i] for i in (here != there.cpu()).nonzero().flatten().tolist()]
            if different:
                lane.forget(different)
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
