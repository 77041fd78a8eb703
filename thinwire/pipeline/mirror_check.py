"""At step start the two ends of every boundary with per-sample memory compare their mirrors of the step's samples.

Each end sends one digest per sample, −1 where it holds no mirror. A sample is warm where both digests are equal, and
cold in this step everywhere else. So lost or different mirrors are detected and healed, and both ends know the size of
every frame, by one small message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.pipeline.lane import Lane


class MirrorCheck(NamedTuple):
    """What a comparison found: whether this rank holds any mirror of these samples, and how many differed."""

    found: bool
    differing: int


def compare_mirrors(
    lanes: Sequence[tuple[Lane, int]], ids: Sequence[int], group: dist.ProcessGroup | None, device: torch.device
) -> MirrorCheck:
    """Forget, for this step, the samples whose mirrors the two ends do not hold alike. All ranks call it together.

    lanes: this rank's lanes with per-sample memory in boundary order, each with the rank of its other end in the group.
    ids: the samples of the step.
    group: the ranks of the pipeline.
    device: where messages of the group have to be.
    """
    own = [lane.digests(ids) for lane, _ in lanes]
    others = _exchange(own, [peer for _, peer in lanes], group, device)
    differing = 0
    for (lane, _), here, there in zip(lanes, own, others):
        different = [ids[i] for i in (here != there).nonzero().flatten().tolist()]
        if different:
            lane.forget(different)
        differing += len(different)
    return MirrorCheck(any(bool((digests >= 0).any()) for digests in own), differing)


def _exchange(
    own: Sequence[Tensor], peers: Sequence[int], group: dist.ProcessGroup | None, device: torch.device
) -> list[Tensor]:
    """Send own[i] to peers[i]; what each of them sent, of the same length."""
    outgoing = [digests.to(device) for digests in own]
    incoming = [torch.empty_like(digests) for digests in outgoing]
    operations = []
    for peer, out, into in zip(peers, outgoing, incoming):
        operations.append(dist.P2POp(dist.isend, out, group=group, group_peer=peer))
        operations.append(dist.P2POp(dist.irecv, into, group=group, group_peer=peer))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    return [digests.cpu() for digests in incoming]
