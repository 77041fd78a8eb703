"""The way between both ends of boundaries: one message per boundary, all at once, beside the pipeline's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.codecs import frame as framing
from thinwire.codecs.base import raw_bytes
from thinwire.collectives.groups import destroy, twin, world
from thinwire.distributed.values import gather_json
from thinwire.errors import RunFailed


class PlacedStage(Protocol):
    """What is asked of a stage: CompressedStage has it. group: the ranks of the pipeline."""

    stage_index: int
    submod: nn.Module
    group: dist.ProcessGroup | None


class BoundaryLinks:
    """A pipeline's ranks, as the ends of boundaries see them. All of them make one, together.

    pipeline: their group. stages: this rank's, by number.
    """

    def __init__(self, pipeline: dist.ProcessGroup | None, stages: Iterable[int]) -> None:
        self.pipeline = pipeline
        self.rank_of = self._places(list(stages))
        self.group = twin(pipeline) if world(pipeline)[0] > 1 else None
        self.moves = 0  # exchanges between both ends
        self.sent = 0  # bytes of this rank so far

    def move(self, into: dict[int, Tensor], leaving: dict[int, Tensor], up: bool) -> None:
        """Messages of all boundaries at once: from receivers to senders (`up`), or back. By boundary."""
        me = world(self.pipeline)[1]
        self.moves += 1
        operations: list[dist.P2POp] = []
        arriving: dict[int, Tensor] = {}
        for index in sorted({*into, *leaving}):
            sender, receiver = self.rank_of[index], self.rank_of[index + 1]
            if sender == receiver:
                into[index].copy_(leaving[index])
                continue
            peer = receiver if me == sender else sender
            way: Callable[..., dist.Work | None]
            if index in into:
                way, frame = dist.irecv, _frame(into[index])
                arriving[index] = frame
            else:
                way, frame = dist.isend, framing.seal(self._header(index, up), _frame(leaving[index]))
                self.sent += frame.nbytes
            operations.append(dist.P2POp(way, frame, group=self.group, group_peer=peer, tag=2 * index + up))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        for index, frame in arriving.items():
            into[index].copy_(self._opened(frame, index, up).view(into[index].dtype))

    def close(self) -> None:
        """Free the group that was made here."""
        if self.group is not None:
            destroy(self.group)

    def _places(self, mine: list[int]) -> dict[int, int]:
        """Stage → rank in the pipeline's group."""
        if world(self.pipeline)[0] == 1:
            return dict.fromkeys(mine, 0)
        said = gather_json(mine, self.pipeline)
        return {int(stage): rank for rank, listed in enumerate(said) for stage in listed}

    def _header(self, index: int, up: bool) -> framing.Header:
        return framing.Header(0, 0, self.moves, framing.key_hash(f"boundary {index} {'up' if up else 'down'}"))

    def _opened(self, frame: Tensor, index: int, up: bool) -> Tensor:
        """What a frame holds; RunFailed where it arrived damaged: both ends would no longer be one."""
        try:
            return framing.unseal(frame, self._header(index, up))[1].clone()
        except ValueError as error:
            raise RunFailed(f"the learned boundary {index}→{index + 1}: a message cannot be used: {error}") from error


def _frame(values: Tensor) -> Tensor:
    """Room for a header, and the values' bytes."""
    return torch.cat((torch.zeros(framing.BYTES, dtype=torch.uint8, device=values.device), raw_bytes(values)))
