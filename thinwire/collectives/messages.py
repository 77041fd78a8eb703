"""How bytes move between the members of a group: everybody's message to everybody, each of a known size.

Every function takes what groups.py takes as a group, and counts what it sends where the group is `Metered`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.codecs.base import raw_bytes
from thinwire.collectives.early import Early, PointToPoint, Receives
from thinwire.collectives.groups import Group, Metered, count_sent, members, world
from thinwire.steps import Steps, finish

BUCKET = 4  # peers a message is exchanged with before those of the next are waited for
DIRECT_MEMBERS = 16  # up to so many, values go from each member to each other one: one latency, P − 1 messages
SMALL = 1 << 15  # bytes: so few go directly between up to four times as many
MODERATE = 1 << 20  # bytes: of more, the transfer counts and not the latency, and the backend adds while it receives


class Swap:
    """outgoing[j] to member j, sizes[j] bytes of uint8 from member j: posted when made, awaited by `arriving`.

    Step s sends to (r + s) mod P and receives from (r − s) mod P, so that no member is everybody's target at once
    (Ok-Topk's destination rotation). All steps are posted at once, in buckets; a bucket is handed over when it is
    there, while later ones are in flight, always in the same order. Nothing is sent where there is nothing to send.

    A bucket's receives are posted before its sends. Gloo sends nothing until the other end has said that it expects it,
    and that word takes the connection which the other direction's data takes: behind it, two members that are a few
    milliseconds apart would send one after the other instead of both at once. Where the group has `early`, receives
    have been posted since the last time.
    """

    def __init__(
        self, outgoing: list[Tensor], sizes: list[int], group: Group, dtype: torch.dtype = torch.uint8,
        rotates: bool = True, bucket: int | None = BUCKET,
    ) -> None:  # fmt: skip
        """dtype: of the values that the messages hold; for whoever counts them. rotates: False: everybody sends to
        member 0 first, then to 1, … bucket: messages that are awaited together; None: all of them."""
        self.outgoing = outgoing
        self.rotates = rotates
        self.bucket = bucket
        self.dtype = dtype
        self.sizes = sizes
        self.group = group
        self.size, self.rank = world(group)
        count_sent(group, sum(x.nbytes for x in outgoing) - outgoing[self.rank].nbytes)
        own = group if isinstance(group, Metered) and outgoing[self.rank].device.type == "cpu" else None
        self.early = None if own is None else own.early
        self.tag = 0 if self.early is None else self.early.tag()
        self.posted: list[tuple[list[int], list[dist.Work]]] = []
        if self.early is not None:
            self._send(self.early.flows, self.early.take(self.tag, sizes, self.rank))
        elif own is not None and own.flows is not None and self.size > 1:
            self._send(own.flows, Early(own.flows, 0).post(0, sizes, self.rank))
        else:
            self._post()

    def arriving(self) -> Iterator[tuple[int, Tensor]]:
        """(member, what it sent here), own first."""
        yield self.rank, self.outgoing[self.rank]
        for sources, works in self.posted:
            for work in works:
                work.wait()
            for source in sources:
                yield source, self.incoming[source]
        _note_all(self.group, self.outgoing, self.incoming)
        if self.early is not None:
            self.early.post_again(self.tag, self.sizes, self.rank)

    def wait(self) -> list[Tensor]:
        """What everybody sent here, in member order."""
        arrived = dict(self.arriving())
        return [arrived[member] for member in range(self.size)]

    def _post(self) -> None:
        device = self.outgoing[self.rank].device
        self.incoming = [torch.empty(n, dtype=torch.uint8, device=device) for n in self.sizes]
        for bucket in self._buckets():
            receives = [(self.incoming[source], source) for _, source in bucket if self.sizes[source]]
            sends = [(self.leaving(to), to) for to, _ in bucket if self.outgoing[to].numel()]
            works = members(self.group).post(receives, sends)
            self.posted.append(([source for _, source in bucket], works))

    def _send(self, flows: PointToPoint, receives: Receives) -> None:
        """Send over the flows what belongs to receives that are posted."""
        self.incoming = receives.buffers
        for bucket in self._buckets():
            works = [work for _, source in bucket for work in receives.works.get(source, ())]
            for to, _ in bucket:
                if self.outgoing[to].numel():
                    works += flows.isend(self.leaving(to), to, self.tag)
            self.posted.append(([source for _, source in bucket], works))

    def leaving(self, to: int) -> Tensor:
        """What is sent to a member."""
        return self.outgoing[to].contiguous()

    def _buckets(self) -> list[list[tuple[int, int]]]:
        """(member to send to, member to receive from), in the order in which they are served."""
        pairs = [((self.rank + s) % self.size, (self.rank - s) % self.size) for s in range(1, self.size)]
        if not self.rotates:
            pairs = [(member, member) for member in range(self.size) if member != self.rank]
        together = self.bucket or self.size
        return [pairs[first : first + together] for first in range(0, len(pairs), together)]


def swap(outgoing: list[Tensor], sizes: list[int], group: Group) -> list[Tensor]:
    """`Swap`, all of it, in member order."""
    return Swap(outgoing, sizes, group).wait()


def gather(x: Tensor, group: Group) -> list[Tensor]:
    """Every member's x, in rank order; all of one shape and dtype."""
    return finish(gather_steps(x, group))


def gather_steps(x: Tensor, group: Group) -> Steps[list[Tensor]]:
    """`gather`. On CPUs every member sends to every other one, unless they are many: Gloo's own goes round a ring."""
    size, rank = world(group)
    if size == 1:
        return [x]
    if _goes_directly(x, size):
        under_way = Swap([raw_bytes(x.contiguous())] * size, [x.nbytes] * size, group, x.dtype)
        yield
        received = under_way.wait()
        return [x if j == rank else received[j].view(x.dtype).view(x.shape) for j in range(size)]
    out = [torch.empty_like(x) for _ in range(size)]
    count_sent(group, x.nbytes * (size - 1))
    members(group).all_gather(out, x.contiguous())
    _note_all(group, [x] * size, out)
    return out


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """The sum over the members, in a new tensor."""
    return finish(all_reduce_steps(x, group))


def all_reduce_steps(x: Tensor, group: Group, in_place: bool = False) -> Steps[Tensor]:
    """`all_reduce`; in_place: x is nobody's any more.

    On CPUs two members swap what they have; more of them send the parts of a moderate x to owners and back. That is as
    many bytes as any other way, in one or two latencies. Members add in rank order, so all have the same bits.
    """
    size, rank = world(group)
    if size == 1:
        return x.clone()
    if size == 2 and _goes_directly(x, size):
        return _sum((yield from gather_steps(x, group)))
    if x.device.type == "cpu" and size <= DIRECT_MEMBERS and x.nbytes <= MODERATE:
        parts = [raw_bytes(part) for part in x.reshape(-1).tensor_split(size)]
        sizes = [part.numel() for part in parts]
        to_owners = Swap(parts, [sizes[rank]] * size, group, x.dtype)
        yield
        total = raw_bytes(_sum([part.view(x.dtype) for part in to_owners.wait()]))
        to_all = Swap([total] * size, sizes, group, x.dtype)
        yield
        return torch.cat(to_all.wait()).view(x.dtype).view(x.shape)
    out = x if in_place else x.clone()
    count_sent(group, 2 * x.nbytes * (size - 1) // size)
    if not x.is_cuda:
        members(group).all_reduce(out)
        return out
    work = members(group).start_all_reduce(out)
    yield
    work.wait()
    return out


def upload(x: Tensor, device: torch.device) -> Tensor:
    """A few values of the host's on a device; a card's stream fetches them, and the host does not wait for it."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def _sum(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def maximum(values: Tensor, group: Group) -> Tensor:
    """Entry by entry over the members, in a new tensor."""
    size, _ = world(group)
    if size == 1:
        return values.clone()
    if _goes_directly(values, size):
        return torch.stack(gather(values, group)).amax(0)
    out = values.clone()
    members(group).all_reduce(out, dist.ReduceOp.MAX)
    return out


def _goes_directly(x: Tensor, size: int) -> bool:
    return x.device.type == "cpu" and size <= (4 * DIRECT_MEMBERS if x.nbytes <= SMALL else DIRECT_MEMBERS)


def _note_all(group: Group, outgoing: list[Tensor], incoming: list[Tensor]) -> None:
    """Messages to every member and from every member, in the order of members; where checksums of them are kept."""
    if isinstance(group, Metered) and group.transit is not None:
        group.transit.add_messages(outgoing, incoming, group.members or range(group.transit.size))
