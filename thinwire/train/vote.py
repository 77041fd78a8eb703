"""The vote at the end of a step: one message from every rank to every other one, in one latency.

Each rank says what it found wrong, its part of the gradient's norm, whether it was asked to stop, its part of the
metrics, and the checksums of the gradient messages that it sent and got. So all ranks know alike whether the step
counts, and nothing else of a step has to be agreed on. Receives are posted one step ahead.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.codecs.base import raw_bytes
from thinwire.collectives.early import Early
from thinwire.collectives.flows import Flows
from thinwire.collectives.groups import ALONE, Metered, destroy, twin, world
from thinwire.collectives.messages import gather
from thinwire.collectives.transit import Transit
from thinwire.errors import RunFailed

HEAD = 6  # numbers of every ballot beside those of the metrics


@dataclass(frozen=True)
class Ballot:
    """What one rank says of a step.

    step: its number. faults: how many things this rank saw go wrong. squares: of its part of the gradient, added up.
    stop: it was asked to stop after this step. tied: a checksum of its copy of a tied embedding, 0 without one.
    seconds: of its step before this one, 0 without one.
    numbers: of the metrics. tables: checksums of gradient messages (collectives/transit.py), uint8.
    """

    step: int
    faults: int
    squares: float
    stop: bool
    tied: int
    seconds: float
    numbers: Tensor
    tables: Tensor

    def pack(self) -> Tensor:
        """uint8, of the same length on all ranks, with a checksum at its end."""
        head = torch.tensor(
            [self.step, self.faults, self.squares, self.stop, self.tied, self.seconds], dtype=torch.float64
        )
        content = torch.cat((raw_bytes(head), raw_bytes(self.numbers.double()), self.tables))
        return torch.cat((content, raw_bytes(torch.tensor([_checksum(content)]))))


@dataclass(frozen=True)
class Exchanging:
    """One kind of gradient exchange: the ranks of its groups, all of them of one size. A rank in none has no part in
    it; nor has a group whose ranks exchange nothing."""

    groups: list[list[int]]

    @property
    def bytes(self) -> int:
        """Of a rank's table."""
        return Transit(len(self.groups[0]), 0).table(torch.device("cpu")).numel()

    def intact(self, tables: Sequence[Tensor]) -> bool:
        """Did all messages arrive as they were sent? tables: of all ranks; zeros where nothing was exchanged."""
        for ranks in self.groups:
            of_group = torch.stack([tables[rank] for rank in ranks])
            took_part = of_group.any(1)
            if len(ranks) == 1 or not took_part.any():
                continue
            if not took_part.all() or not Transit(len(ranks), 0).is_intact(of_group.amax(0)):
                return False
        return True


class Vote:
    """All ranks of a site.

    numbers: how many of them a ballot has. exchanging: the kinds of gradient exchanges, in the order of their tables.
    site: the ranks of this site; None: all ranks of the run.
    """

    def __init__(self, numbers: int, exchanging: Sequence[Exchanging], site: dist.ProcessGroup | None = None) -> None:
        self.numbers = numbers
        self.exchanging = exchanging
        self.size, own = world(site)
        self.first = world(None)[1] - own  # the number of the site's first rank in the run
        group = twin(site) if self.size > 1 else None
        self.group = Metered(ALONE) if group is None else Metered(group, early=Early(Flows(group, 1), 0))

    def tables(self, found: Sequence[Tensor | None]) -> Tensor:
        """A ballot's `tables` from those of this rank, None for kinds that it has no part in."""
        return torch.cat([
            torch.zeros(kind.bytes, dtype=torch.uint8) if table is None else table
            for kind, table in zip(self.exchanging, found)
        ])  # fmt: skip

    def hold(self, mine: Ballot) -> list[Ballot]:
        """Every rank's ballot, in rank order of the site. RunFailed where one is damaged, or of another step."""
        if self.group.early is not None:
            self.group.early.begin()
        packed = gather(mine.pack(), self.group)
        ballots = [self._read(rank, one) for rank, one in enumerate(packed, self.first)]
        for rank, ballot in enumerate(ballots, self.first):
            if ballot.step != mine.step:
                raise RunFailed(f"rank {rank} is at step {ballot.step}, where this rank is at step {mine.step}")
        return ballots

    def intact(self, ballots: Sequence[Ballot]) -> bool:
        """Did all gradient messages of the step arrive as they were sent?"""
        split = [kind.bytes for kind in self.exchanging]
        tables = zip(*(ballot.tables.split(split) for ballot in ballots))
        return all(kind.intact(of_kind) for kind, of_kind in zip(self.exchanging, tables))

    def close(self) -> None:
        """Free the group."""
        group = self.group.group
        if isinstance(group, dist.ProcessGroup):
            destroy(group)

    def _read(self, rank: int, packed: Tensor) -> Ballot:
        content, stored = packed[:-8], packed[-8:].clone().view(torch.int64)
        if int(stored) != _checksum(content):
            raise RunFailed(f"what rank {rank} said of the step arrived damaged (checksum)")
        split = 8 * (HEAD + self.numbers)
        step, faults, squares, stop, tied, seconds, *rest = content[:split].clone().view(torch.float64).tolist()
        numbers = torch.tensor(rest, dtype=torch.float64)
        return Ballot(int(step), int(faults), squares, bool(stop), int(tied), seconds, numbers, content[split:])


def _checksum(content: Tensor) -> int:
    return zlib.crc32(content.numpy().tobytes())
