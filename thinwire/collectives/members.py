"""What thinwire asks of a process group, as one small protocol: who is in it, and how bytes and sums move.

torch's groups fulfil it by `torch.distributed` (`TorchMembers`). A group whose members come and go fulfils it too
(`Elastic`; thinwire/elastic/ has the one that torchft makes).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist
from torch import Tensor

Message = tuple[Tensor, int]  # what is sent or received, and the other member's rank
Saved = Mapping[str, object]  # what a newcomer is told: texts, numbers, tensors, and lists and tables of them


class Members(ABC):
    """The members of a group by their rank in it. Tensors that are passed are contiguous."""

    @abstractmethod
    def world(self) -> tuple[int, int]:
        """(how many, this member's rank)."""

    @property
    @abstractmethod
    def backends(self) -> str:
        """The names of what moves the bytes, such as "cpu:gloo,cuda:nccl"."""

    @abstractmethod
    def isend(self, x: Tensor, peer: int, tag: int = 0) -> dist.Work:
        """Send x to a member; messages of one tag arrive in the order in which they were sent."""

    @abstractmethod
    def irecv(self, x: Tensor, peer: int, tag: int = 0) -> dist.Work:
        """Receive x from a member."""

    @abstractmethod
    def post(self, receives: Sequence[Message], sends: Sequence[Message]) -> list[dist.Work]:
        """These receives, then these sends, at once."""

    @abstractmethod
    def all_gather(self, out: list[Tensor], x: Tensor) -> None:
        """Every member's x, in rank order."""

    @abstractmethod
    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """x ← the sum over the members, or their maximum."""

    @abstractmethod
    def start_all_reduce(self, x: Tensor) -> dist.Work:
        """x ← the sum over the members, when what is returned has been waited for."""

    @abstractmethod
    def broadcast(self, x: Tensor, source: int) -> None:
        """x ← that member's x."""


class Elastic(Members):
    """A group whose members come and go. They meet before every step, and every step ends with a vote: what it wrote
    is kept where the vote is yes, and dropped elsewhere.

    Members vote each for themselves. So a step may count for one and not for another, to whom somebody sent no more
    before he died. When they meet again the other takes the first one's state, and learns that the step counted: what
    it sent in that step was applied, so its residual is the one after the step.

    slow: with local steps a site whose inner step takes more than so many times the others' median makes fewer of them
    in a round; None: all make as many."""

    slow: float | None = None

    @property
    @abstractmethod
    def number(self) -> int:
        """Of the present quorum, equal on its members. A later quorum has a higher one. It is another one after every
        change of members, and after a step that did not count."""

    @property
    @abstractmethod
    def committed(self) -> int:
        """The quorum in which the last step that counted was made; −1 before the first."""

    @property
    @abstractmethod
    def counted(self) -> bool:
        """Did the last step count, as far as this member knows?"""

    @abstractmethod
    def begin(self) -> None:
        """Meet: who is there. A newcomer, and a member that fell behind, takes the state of another."""

    @abstractmethod
    def commit(self) -> bool:
        """The vote that ends the step: does it count?"""

    @abstractmethod
    def stage(self, settle: Callable[[bool], None]) -> None:
        """Call `settle` with whether the step counts: at the vote where it does, else when members have met again."""

    @abstractmethod
    def report(self, error: Exception) -> None:
        """This step cannot count: this member will vote no."""

    @abstractmethod
    def fall_behind(self) -> None:
        """This member's state is not the others': it takes theirs before the next step."""

    @abstractmethod
    def register(self, name: str, load: Callable[[Saved], None], save: Callable[[], Saved]) -> None:
        """What a newcomer has to know. save: gives it, on a member. load: takes it, on a newcomer."""


class DirectMembers(Members):
    """A process group by its own methods, whether torch.distributed has it in its lists or not."""

    @abstractmethod
    def process_group(self) -> dist.ProcessGroup:
        """That of now."""

    def world(self) -> tuple[int, int]:
        group = self.process_group()
        return group.size(), group.rank()

    def isend(self, x: Tensor, peer: int, tag: int = 0) -> dist.Work:
        return self.process_group().send([x], peer, tag)

    def irecv(self, x: Tensor, peer: int, tag: int = 0) -> dist.Work:
        return self.process_group().recv([x], peer, tag)

    def post(self, receives: Sequence[Message], sends: Sequence[Message]) -> list[dist.Work]:
        return [self.irecv(x, peer) for x, peer in receives] + [self.isend(x, peer) for x, peer in sends]

    def all_gather(self, out: list[Tensor], x: Tensor) -> None:
        group = self.process_group()
        self.finish(group, group.allgather([out], [x]))

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(op)
        group = self.process_group()
        self.finish(group, group.allreduce([x], options))

    def start_all_reduce(self, x: Tensor) -> dist.Work:
        return self.process_group().allreduce([x], dist.AllreduceOptions())

    def broadcast(self, x: Tensor, source: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = source
        group = self.process_group()
        self.finish(group, group.broadcast([x], options))

    def finish(self, group: dist.ProcessGroup, work: dist.Work) -> None:
        """Wait for a collective of the group."""
        work.wait()


class TorchMembers(Members):
    """One of torch's process groups; None: the default one."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group

    def world(self) -> tuple[int, int]:
        return dist.get_world_size(self.group), dist.get_rank(self.group)

    @property
    def backends(self) -> str:
        return str(dist.get_backend_config(self.group))

    def isend(self, x: Tensor, peer: int, tag: int = 0) -> dist.Work:
        work = dist.isend(x, group=self.group, tag=tag, group_dst=peer)
        assert work is not None, "this rank is not a member of the group"
        return work

    def irecv(self, x: Tensor, peer: int, tag: int = 0) -> dist.Work:
        work = dist.irecv(x, group=self.group, tag=tag, group_src=peer)
        assert work is not None, "this rank is not a member of the group"
        return work

    def post(self, receives: Sequence[Message], sends: Sequence[Message]) -> list[dist.Work]:
        operations = [dist.P2POp(dist.irecv, x, group=self.group, group_peer=peer) for x, peer in receives]
        operations += [dist.P2POp(dist.isend, x, group=self.group, group_peer=peer) for x, peer in sends]
        return dist.batch_isend_irecv(operations) if operations else []

    def all_gather(self, out: list[Tensor], x: Tensor) -> None:
        dist.all_gather(out, x, group=self.group)

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        dist.all_reduce(x, op=op, group=self.group)

    def start_all_reduce(self, x: Tensor) -> dist.Work:
        work = dist.all_reduce(x, group=self.group, async_op=True)
        assert work is not None, "this rank is not a member of the group"
        return work

    def broadcast(self, x: Tensor, source: int) -> None:
        dist.broadcast(x, group=self.group, group_src=source)
