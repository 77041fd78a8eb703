"""Messages between two ranks, on a process group of their own.

Gloo sends nothing until the receiver has said that it waits. So receives are posted as soon as their size is known, and
messages carry tags, by which they are matched. NCCL would need both ends to post in one order: frames travel over the
host's network whatever the default group is, and wait in the host's memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.codecs import frame as framing
from thinwire.codecs.base import from_raw, raw_bytes
from thinwire.collectives.groups import Group, destroy, twin, world
from thinwire.collectives.messages import gather
from thinwire.errors import RunFailed, UsageError

ANNOUNCED = framing.Header(0, 0, 0, framing.key_hash("a set of rows"))


@dataclass
class Message:
    """A message under way, sent or received: its bytes on the host, and what to wait for."""

    frame: Tensor
    work: dist.Work | None

    def wait(self) -> Tensor:
        """The bytes, once they are there, or have left."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        return self.frame


class Pair:
    """This rank's end of a pair. Made at both ends.

    group: of two ranks. what: is exchanged, named in errors.
    """

    def __init__(self, group: Group, what: str) -> None:
        size, self.rank = world(group)
        if size != 2:
            raise UsageError(f"{what}: the group of both ends has {size} ranks")
        self.what = what
        self.copies = 0
        self.group = twin(group, "gloo")

    def send(self, frame: Tensor, tag: int) -> Message:
        """Post bytes to the other end."""
        held = frame.cpu()
        return Message(held, dist.isend(held, group=self.group, group_dst=1 - self.rank, tag=tag))

    def receive(self, nbytes: int, tag: int) -> Message:
        """Post the receive of so many bytes from there."""
        frame = torch.empty(nbytes, dtype=torch.uint8)
        return Message(frame, dist.irecv(frame, group=self.group, group_src=1 - self.rank, tag=tag))

    def agree(self, value: int) -> bool:
        """Is the value the same at both ends?"""
        mine, other = gather(torch.tensor([value]), self.group)
        return torch.equal(mine, other)

    def copy(self, x: Tensor, source: int, tag: int) -> int:
        """x of the end `source`, exact, to the other end, whose x is overwritten; the bytes sent from here.

        RunFailed where it arrives damaged."""
        self.copies += 1
        header = framing.Header(0, 0, self.copies, framing.key_hash(self.what))
        if self.rank == source:
            frame = torch.cat((torch.zeros(framing.BYTES, dtype=torch.uint8, device=x.device), raw_bytes(x)))
            return self.send(framing.seal(header, frame), tag).wait().numel()
        frame = self.receive(framing.BYTES + x.nbytes, tag).wait()
        try:
            _, body = framing.unseal(frame, header)
        except ValueError as error:
            raise RunFailed(f"{self.what}: a message cannot be used: {error}") from error
        x.copy_(from_raw(body, x.dtype).view(x.shape))
        return 0

    # --- sets of rows, as a bitmap of all there are: both ends know its size

    def send_set(self, ids: Tensor, count: int, tag: int) -> Message:
        """Announce some of `count` rows. ids: int64, on the host."""
        bits = np.zeros(count, dtype=np.uint8)
        bits[ids.numpy()] = 1
        body = torch.from_numpy(np.packbits(bits, bitorder="little"))
        frame = torch.cat((torch.zeros(framing.BYTES, dtype=torch.uint8), body))
        return self.send(framing.seal(ANNOUNCED, frame), tag)

    def receive_set(self, count: int, tag: int) -> Message:
        """Post the receive of such an announcement."""
        return self.receive(framing.BYTES + framing.bitmap_bytes(count), tag)

    def read_set(self, message: Message, count: int) -> Tensor:
        """The announced rows, sorted; RunFailed where the announcement is damaged."""
        try:
            _, body = framing.unseal(message.wait(), ANNOUNCED)
        except ValueError as error:
            raise RunFailed(f"{self.what}: an announcement cannot be used: {error}") from error
        return torch.from_numpy(np.flatnonzero(np.unpackbits(body.numpy(), count=count, bitorder="little")))

    def close(self) -> None:
        """Destroy the group that was made here."""
        destroy(self.group)
