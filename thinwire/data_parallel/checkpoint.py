"""Compression state in checkpoints: every rank's own, under names that hold its rank.

torch.distributed.checkpoint keeps one of equal names, so a residual without its rank in the name would be rank 0's
everywhere. On a changed world size the mean residual is conserved: every new rank gets the mean of the old ones, and so
the sum over ranks, divided by their number, is what it was.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from os import PathLike

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from thinwire.collectives.groups import Group, world
from thinwire.data_parallel.exchange import SLOTS, Exchange
from thinwire.distributed.checkpoint_files import CheckpointReader
from thinwire.errors import UsageError

RANKED = re.compile(r"rank(\d+)of(\d+)/(.*)", re.DOTALL)
Ranks = dict[int, dict[str, Tensor]]


class RankState:
    """An exchange's state under names that hold this rank, `rank` of `size`. elastic: members come and go, and one goes
    on from its own part, whatever its number was."""

    def __init__(self, exchange: Exchange, rank: int, size: int, elastic: bool = False) -> None:
        self.exchange, self.rank, self.size, self.elastic = exchange, rank, size, elastic

    def follow(self) -> tuple[int, int]:
        """(members, this member's rank) as the exchange has them now: in a quorum they change."""
        self.size, self.rank = self.exchange.place
        return self.size, self.rank

    def state_dict(self) -> dict[str, Tensor]:
        """ "rank<r>of<P>/<name>" → tensor."""
        return {f"rank{self.rank}of{self.size}/{name}": value for name, value in self.exchange.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """This rank's part, or, from another number of ranks, the mean of all of theirs. UsageError where parts are
        missing."""
        old, ranks = split(state)
        if self.elastic and len(ranks) == 1:
            self.exchange.load_state_dict(*ranks.values())
            return
        if old == self.size:
            if self.rank not in ranks:
                raise UsageError(f"the state has no part for rank {self.rank} of {self.size}")
            self.exchange.load_state_dict(ranks[self.rank])
            return
        if len(ranks) != old:
            raise UsageError(
                f"{old} ranks wrote this state and {self.size} read it: all parts are needed, not {len(ranks)}"
            )
        self.exchange.load_state_dict(_mean(ranks))


def concerns(name: str, rank: int, size: int) -> bool:
    """Is a part of that name for this rank to read: its own, or, of another number of ranks, anybody's?"""
    match = RANKED.fullmatch(name)
    return match is not None and (int(match[2]) != size or int(match[1]) == rank)


def split(state: Mapping[str, Tensor]) -> tuple[int, Ranks]:
    """(how many ranks wrote it, rank → its tensors). UsageError where names are no compression state's."""
    ranks: Ranks = {}
    sizes = set()
    for name, value in state.items():
        match = RANKED.fullmatch(name)
        if match is None:
            raise UsageError(f"{name!r} is no name of compression state: rank<r>of<P>/… is expected")
        ranks.setdefault(int(match[1]), {})[match[3]] = value
        sizes.add(int(match[2]))
    if len(sizes) != 1:
        raise UsageError(f"compression state of one number of ranks is expected, not of {sorted(sizes) or 'none'}")
    return sizes.pop(), ranks


def _mean(ranks: Ranks) -> dict[str, Tensor]:
    """Residuals and shifts averaged over the old ranks; thresholds, regions and bases start anew."""
    out = {"step": next(iter(ranks.values()))["step"]}
    names = {n for part in ranks.values() for n in part if n.partition("/")[0] in SLOTS}
    for name in sorted(names):
        parts = [part[name] for part in ranks.values() if name in part]
        total = parts[0].double()
        for part in parts[1:]:
            total = total + part
        out[name] = (total / len(ranks)).to(parts[0].dtype)
    return out


def read_state(path: str | PathLike[str], prefix: str, group: Group = None) -> dict[str, Tensor]:
    """What load_state_dict needs, from a checkpoint saved by dcp.save({prefix: x.state_dict(), …}, checkpoint_id=path).

        handle.load_state_dict(tw.parallel.read_state(path, "wire"))

    path: the checkpoint's folder. prefix: the state's name in it. group: the process group that is averaged over; None
    is torch's default one. Only this rank's part is read, or everybody's where the number of ranks has changed.
    UsageError where there is no checkpoint, or none of that name for this rank.
    """
    size, rank = world(group)
    reader = CheckpointReader(path)
    try:
        known = reader.read_metadata().state_dict_metadata
    except FileNotFoundError:
        raise UsageError(f"{path} holds no checkpoint of torch.distributed.checkpoint (no .metadata)") from None
    wanted = {}
    for name, about in known.items():
        if name.startswith(f"{prefix}.") and concerns(name.removeprefix(f"{prefix}."), rank, size):
            assert isinstance(about, TensorStorageMetadata), name
            wanted[name] = torch.empty(about.size, dtype=about.properties.dtype)
    if not wanted:
        raise UsageError(f"the checkpoint has no state of {prefix!r} for rank {rank} of {size}")
    dcp.load(wanted, storage_reader=reader, no_dist=True)
    return {name.removeprefix(f"{prefix}."): value for name, value in wanted.items()}
