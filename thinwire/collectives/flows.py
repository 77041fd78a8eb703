"""Several TCP flows between the same ranks, for links on which one flow cannot fill the rate.

On a link with latency and loss one flow carries about 1.22·MSS/(RTT·√loss), whatever the link's rate (Mathis et al.
1997). Every Gloo backend has sockets of its own, so K backends of the same ranks are K flows (connections.py). A
message is cut into K contiguous pieces, piece i goes over flow (tag + i) mod K. Both ends know size and tag, so nothing
has to be agreed.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.connections import Connection, more_connections
from thinwire.collectives.groups import Group, explicit, unmetered, world
from thinwire.errors import UsageError

# Bytes of a piece at least. A flow that is new or was silent sends 10 packets, 14 480 bytes, before the first answer.
# With flows enough, a message is cut into pieces of 7 000 to 14 000 bytes, each of which crosses in one latency.
LEAST = 7_000
MOST_STREAMS = 64


class Flows:
    """Point-to-point messages over several flows between the members of a group.

    All members make it at the same time, with the same number of streams. Messages between two members that have the
    same tag arrive in the order in which they were sent, as in a plain group. Nothing is counted here: who sends over a
    `Metered` group counts its bytes, as with `dist.isend`.

    group: whose members send to each other. Its own sockets are the first flow.
    streams: how many flows. 1 opens no connection. What is on a card goes over the group's own flow: NCCL opens flows
    by itself.
    """

    def __init__(self, group: Group, streams: int) -> None:
        if isinstance(streams, bool) or not isinstance(streams, int) or not 1 <= streams <= MOST_STREAMS:
            raise UsageError(f"streams {streams!r}: allowed is a whole number from 1 to {MOST_STREAMS}")
        self.groups: list[dist.ProcessGroup] = []  # the group; none where there is nobody to send to
        self.others: list[Connection] = []  # one per flow beside the group's own
        if world(group)[0] == 1:
            return
        plain = explicit(unmetered(group))
        if streams > 1 and dist.get_backend(plain) == "nccl":
            raise UsageError(
                f"streams {streams} on NCCL: it opens flows by itself, so set NCCL_SOCKET_NTHREADS and "
                "NCCL_NSOCKS_PERTHREAD (their product is the number of flows, 64 at most) and leave streams at 1"
            )
        self.groups = [plain]
        self.others = more_connections(plain, streams - 1) if streams > 1 else []

    def isend(self, x: Tensor, peer: int, tag: int = 0) -> list[dist.Work]:
        """Send x to the member with rank `peer` in the group; all of the returned works are to be waited for.

        x: contiguous, unchanged until then. An empty one is not sent. tag: as the receiver's.
        A flow whose connection is lost raises at `wait`.
        """
        works = [flow.send([piece], peer, tag) for piece, flow in self._over_flows(x, tag)]
        return [work for work in works if work is not None]

    def irecv(self, x: Tensor, peer: int, tag: int = 0) -> list[dist.Work]:
        """Receive x from the member with rank `peer` in the group; x is there when all returned works are done.

        x: contiguous, as many bytes as are sent. tag: as the sender's.
        """
        works = [flow.recv([piece], peer, tag) for piece, flow in self._over_flows(x, tag)]
        return [work for work in works if work is not None]

    @property
    def count(self) -> int:
        """How many flows there are; 0 where there is nobody to send to."""
        return len(self.groups) + len(self.others)

    def close(self) -> None:
        """Close the connections that were opened here; the group itself stays."""
        self.others.clear()

    def _over_flows(self, x: Tensor, tag: int) -> list[tuple[Tensor, Connection]]:
        """The pieces of a message, each with the flow that carries it."""
        flows: list[Connection] = [*self.groups, *(self.others if x.device.type == "cpu" else ())]
        return [(piece, flows[(tag + i) % len(flows)]) for i, piece in enumerate(pieces(x, len(flows)))]


def pieces(x: Tensor, count: int) -> list[Tensor]:
    """The bytes of x (contiguous), cut into at most `count` views, none shorter than LEAST unless it is the only one.

    Lengths differ by one byte at most, and depend on the number of bytes alone. No piece where x is empty.
    """
    if not x.is_contiguous():
        raise ValueError(f"a message must be contiguous, not of strides {x.stride()}")
    if x.numel() == 0:
        return []
    data = x.detach().view(-1).view(torch.uint8)
    return list(data.tensor_split(max(1, min(count, data.numel() // LEAST))))
