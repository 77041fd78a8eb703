"""What the first stage tells the others at step start, and what neighbours tell each other about what they remember.

1. The rank of stage 0 broadcasts (step, train, sample ids, rows, input shape, next ids), or one line of complaint.
2. Over every boundary with per-sample memory both ends exchange a digest per sample, −1 where there is none.
   Warm means both have it and it is equal; anything else is cold on this visit. So detection of lost or different
   mirrors, their healing, and agreement on message sizes are one small message (design rule 2).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.groups import world
from thinwire.errors import UsageError
from thinwire.kernels.random import derive

Ids = Sequence[int | str] | Tensor
NONE = -1
ROOM = 64  # 64-bit words of the broadcast; grows with the batch, on all ranks alike
INT64 = range(-(2**63), 2**63)


@dataclass(frozen=True)
class Announcement:
    """One step as all stages know it. `ids` one a row of the batch; `shape` the whole input's, where it was given."""

    step: int
    train: bool
    ids: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None
    next_ids: tuple[int, ...] | None = None

    @property
    def rows(self) -> int | None:
        if self.ids is not None:
            return len(self.ids)
        return self.shape[0] if self.shape else None

    def sizes(self, microbatches: int) -> list[int] | None:
        """Rows of every micro-batch, as torch splits a batch; None where nothing was said."""
        return None if self.rows is None else split_sizes(self.rows, microbatches)

    def ids_of(self, microbatch: int, microbatches: int) -> tuple[int, ...] | None:
        if self.ids is None:
            return None
        sizes = self.sizes(microbatches) or []
        start = sum(sizes[:microbatch])
        return self.ids[start : start + sizes[microbatch]]

    def words(self) -> list[int]:
        parts = (self.ids, self.shape, self.next_ids)
        return [self.step, int(self.train), *(n for p in parts for n in ((NONE,) if p is None else (len(p), *p)))]

    @staticmethod
    def read(words: list[int]) -> Announcement:
        parts: list[tuple[int, ...] | None] = []
        at = 2
        for _ in range(3):
            count = words[at]
            parts.append(None if count == NONE else tuple(words[at + 1 : at + 1 + count]))
            at += 1 + max(count, 0)
        return Announcement(words[0], bool(words[1]), *parts)


@lru_cache(maxsize=64)
def split_sizes(rows: int, microbatches: int) -> list[int]:
    """As torch.tensor_split."""
    whole, rest = divmod(rows, microbatches)
    return [whole + (i < rest) for i in range(microbatches)]


def sample_ids(ids: Ids | None) -> tuple[int, ...] | None:
    """Ids as 64-bit integers: whole numbers as they are, texts by hash. Twice the same, or another type: UsageError."""
    if ids is None:
        return None
    given = ids.tolist() if isinstance(ids, Tensor) else ids
    if not isinstance(given, Iterable) or isinstance(given, str):
        raise UsageError(f"ids = {ids!r}: must be a list or tensor of sample ids, one a row of the batch")
    given, out = list(given), []
    for one in given:
        if isinstance(one, str):
            out.append(derive("sample", one))
        elif isinstance(one, int) and not isinstance(one, bool) and one in INT64:
            out.append(one)
        else:
            raise UsageError(f"a sample id is a whole number of 64 bits or a text, not {one!r}")
    if len(set(out)) != len(out):
        twice = next(g for g, o in zip(given, out) if out.count(o) > 1)
        raise UsageError(f"sample id {twice!r} stands twice in one batch: every sample needs an id of its own")
    return tuple(out)


def announcement(
    step: int, train: bool, ids: Ids | None, shape: Sequence[int] | None, next_ids: Ids | None, per_sample: str
) -> Announcement | str:
    """What the first stage's rank says of a step; a user's mistake is said too, so that every rank raises it.
    `per_sample`: the link that remembers samples, in words, if ids are needed."""
    try:
        known, following = sample_ids(ids), sample_ids(next_ids)
    except UsageError as error:
        return str(error)
    if known is None and per_sample:
        return f"{per_sample} remembers samples: give step(ids=…) on the first stage, one id a row"
    if shape is not None and (not isinstance(shape, Sequence) or not shape or not all(type(n) is int for n in shape)):
        return f"shape = {shape!r}: must be the batch's, x.shape"
    given = None if shape is None else tuple(shape)
    if known is not None and given is not None and given[0] != len(known):
        return f"{len(known)} sample ids for a batch of shape {given}"
    return Announcement(step, train, known, given, following)


class Announcer:
    """The broadcast from the first stage's rank, in one message unless the batch has outgrown it."""

    def __init__(self, group: Any, root: int, device: torch.device) -> None:
        self.group, self.root, self.device, self.room = group, root, device, ROOM

    def announce(self, mine: Announcement | str | None) -> Announcement:
        """`mine` on the first stage's rank (a text is a complaint, raised on every rank); ignored elsewhere."""
        size, rank = world(self.group)
        words = _pack(mine) if rank == self.root else []
        if size > 1:
            words = self._broadcast(words, rank)
        if words[0]:
            raise UsageError(bytes(words[1:]).decode())
        return Announcement.read(words[1:])

    def _broadcast(self, words: list[int], rank: int) -> list[int]:
        first = torch.zeros(self.room, dtype=torch.int64)
        head = [len(words), *words[: self.room - 1]]
        first[: len(head)] = torch.tensor(head)
        first = self._send(first)
        total = int(first[0])
        got = first[1 : 1 + min(total, self.room - 1)].tolist()
        if total > self.room - 1:
            rest = torch.tensor(words[self.room - 1 :] or [0] * (total - self.room + 1))
            got += self._send(rest).tolist()
            self.room = 1 << (total + 1).bit_length()
        return got

    def _send(self, words: Tensor) -> Tensor:
        words = words.to(self.device)
        dist.broadcast(words, group=self.group, group_src=self.root)
        return words.cpu()


def _pack(mine: Announcement | str | None) -> list[int]:
    if mine is None:
        raise RuntimeError("the first stage's rank has nothing to announce")
    return [1, *mine.encode()] if isinstance(mine, str) else [0, *mine.words()]


@dataclass(frozen=True)
class Pair:
    """One boundary's exchange: my words for the peer (a rank of the group)."""

    peer: int
    mine: Tensor


def swap_words(pairs: Sequence[Pair], group: Any, device: torch.device) -> list[Tensor]:
    """What the peer of every pair sent, int64 of the same length; pairs stand in boundary order on both sides."""
    outgoing = [pair.mine.to(device) for pair in pairs]
    incoming = [torch.empty_like(words) for words in outgoing]
    operations = []
    for pair, out, into in zip(pairs, outgoing, incoming):
        operations.append(dist.P2POp(dist.isend, out, group=group, group_peer=pair.peer))
        operations.append(dist.P2POp(dist.irecv, into, group=group, group_peer=pair.peer))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    return [words.cpu() for words in incoming]
