"""Did every message arrive as it was sent? Both ends keep a checksum of what went from one member to another, and all
compare them when a step ends: nothing is added to a message.

The backend's own all-reduce adds values on their way and cannot be checked so. A checksum finds damage, not malice.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from thinwire.kernels.checksum import PRIME, checksum

MIX = 0x3C6EF372  # below 2³¹: a message's checksum counts MIX^(messages after it) times, so their order counts
WORD = 4  # bytes of a sum
HALF = 1 << 16  # powers are multiplied by halves, so that products stay below 2⁶³


class Transit:
    """The sums of this member, `rank` of `size`, since the last comparison: one per other member and direction."""

    def __init__(self, size: int, rank: int) -> None:
        self.size = size
        self.rank = rank
        self.totals: dict[tuple[int, int], list[Tensor]] = {}  # (from, to) → of each message, 0-d int64

    def add(self, source: int, to: int, total: Tensor) -> None:
        """A message with that checksum (0-d) went from member `source` to member `to`; one of them is this one."""
        self.totals.setdefault((source, to), []).append(total)

    def add_messages(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], members: Sequence[int]) -> None:
        """What was sent to each of `members` and what came from each, in their order; empty ones are not sent."""
        totals: dict[int, Tensor] = {}  # one message may go to many
        for member, sent, arrived in zip(members, outgoing, incoming):
            if member != self.rank and sent.numel():
                if id(sent) not in totals:
                    totals[id(sent)] = checksum_of(sent)
                self.add(self.rank, member, totals[id(sent)])
            if member != self.rank and arrived.numel():
                self.add(member, self.rank, checksum_of(arrived))

    def table(self, device: torch.device) -> Tensor:
        """uint8: every sum and its complement, zeros for those of others, and start anew. The maximum of all members'
        tables holds a sum and its complement for every pair only where both ends had the same."""
        if self.size == 1:
            return torch.zeros(2 * WORD, dtype=torch.uint8, device=device)
        others = [member for member in range(self.size) if member != self.rank]
        mine = [(self.rank, member) for member in others] + [(member, self.rank) for member in others]
        sums = self._sums(mine, device)
        words = sums.view(torch.uint8).view(-1, sums.element_size())[:, :WORD]  # the lower half
        out = torch.zeros(self.size * self.size, 2, WORD, dtype=torch.uint8, device=device)
        out[[source * self.size + to for source, to in mine]] = torch.stack((words, ~words), dim=1)
        self.totals.clear()
        return out.reshape(-1)

    def _sums(self, pairs: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
        """int64[pairs]: Σ MIX^(messages after it)·checksum mod p, by a few operations however many messages there were:
        each is a launch on a card."""
        rows = [self.totals.get(pair, []) for pair in pairs]
        most = max(1, *map(len, rows))
        nothing = torch.zeros((), dtype=torch.int64, device=device)
        padded = [total.to(device) for row in rows for total in [nothing] * (most - len(row)) + row]
        totals = torch.stack(padded).view(len(pairs), most)
        high, low = powers(most, device)
        return ((totals * high % PRIME * HALF + totals * low) % PRIME).sum(1) % PRIME

    def is_intact(self, tables: Tensor) -> Tensor:
        """0-d bool; tables: the maximum of all members'."""
        word, complement = tables.reshape(-1, 2, WORD).unbind(1)
        same = (word == ~complement).all(1).view(self.size, self.size)
        own = torch.eye(self.size, dtype=torch.bool, device=tables.device)
        return (same | own).all()


@cache
def powers(count: int, device: torch.device) -> Tensor:
    """int64[2, count]: MIX^(count − 1), …, MIX, 1 mod p, their upper and their lower halves; sent to a card once."""
    out = [1]
    while len(out) < count:
        out.append(out[-1] * MIX % PRIME)
    return torch.tensor([[power // HALF for power in out[::-1]], [power % HALF for power in out[::-1]]], device=device)


def checksum_of(message: Tensor) -> Tensor:
    """0-d int64, on the message's device."""
    return checksum(message.contiguous().view(-1).view(torch.uint8))
