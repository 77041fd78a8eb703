"""The announcement: what the rank of the first stage sends to all stages before a step.

It holds the step's number, train or evaluate, the sample ids, the shape of the batch and the ids of the next batch.
Where the user has made a mistake, its one line is sent instead, and every rank raises it. A checksum stands behind
every message. Where the next step is certain, it is announced with this one, and nobody waits for it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.groups import world
from thinwire.errors import RunFailed, UsageError
from thinwire.kernels.random import derive

Ids = Sequence[int | str] | Tensor
NONE = -1
FIRST_LENGTH = 64  # 64-bit words of the broadcast; grows with the batch, on all ranks alike
INT64 = range(-(2**63), 2**63)
TAG = 1  # of announcements, on a CPU


@dataclass(frozen=True)
class Announcement:
    """One step as all stages know it.

    step: its number.
    train: False in evaluation.
    ids: one per row of the batch, where given.
    shape: the whole batch's, where given.
    next_ids: the next batch's, where given.
    ahead: the next step's announcement follows at once.
    """

    step: int
    train: bool
    ids: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None
    next_ids: tuple[int, ...] | None = None
    ahead: bool = False

    def announces(self, step: Announcement) -> bool:
        """Is that the step which this one announced ahead?"""
        return (self.step, self.train, self.ids, self.shape) == (step.step, step.train, step.ids, step.shape)

    def words(self) -> list[int]:
        """All of it as 64-bit words: every tuple after its length, NONE for one that is absent."""
        out = [self.step, int(self.train) + 2 * int(self.ahead)]
        for values in (self.ids, self.shape, self.next_ids):
            if values is None:
                out.append(NONE)
            else:
                out += [len(values), *values]
        return out

    @staticmethod
    def read(words: list[int]) -> Announcement:
        """The announcement of these `words`."""
        tuples: list[tuple[int, ...] | None] = []
        at = 2
        for _ in range(3):
            count = words[at]
            tuples.append(None if count == NONE else tuple(words[at + 1 : at + 1 + count]))
            at += 1 + max(count, 0)
        ids, shape, next_ids = tuples
        return Announcement(words[0], bool(words[1] & 1), ids, shape, next_ids, bool(words[1] & 2))


UNKNOWN = Announcement(0, True)  # stands for a next step that nobody is certain of


def sample_ids(ids: Ids | None) -> tuple[int, ...] | None:
    """`ids` as 64-bit integers: whole numbers as they are, texts by hash. UsageError where one stands twice, or is
    of another type."""
    if ids is None:
        return None
    given = ids.tolist() if isinstance(ids, Tensor) else ids
    if not isinstance(given, Iterable) or isinstance(given, str):
        raise UsageError(f"ids = {ids!r}: must be a list or tensor of sample ids, one per row of the batch")
    given = list(given)
    out = []
    for one in given:
        if isinstance(one, str):
            out.append(derive("sample", one))
        elif isinstance(one, int) and not isinstance(one, bool) and one in INT64:
            out.append(one)
        else:
            raise UsageError(f"a sample id is a whole number of 64 bits or a text, not {one!r}")
    if len(set(out)) != len(out):
        twice = next(g for g, o in zip(given, out) if out.count(o) > 1)
        raise UsageError(f"sample id {twice!r} stands twice in one batch: every sample needs its own id")
    return tuple(out)


def announcement(
    step: int, train: bool, ids: Ids | None, shape: Sequence[int] | None, next_ids: Ids | None, per_sample: str
) -> Announcement | str:
    """The announcement of a step, or one line that says what is wrong with the arguments.

    step, train, ids, shape, next_ids: as in Announcement, as the user gave them.
    per_sample: the link that remembers samples, in words, if ids are needed; else "".
    """
    try:
        known = sample_ids(ids)
        following = sample_ids(next_ids)
    except UsageError as error:
        return str(error)
    if known is None and per_sample:
        return f"{per_sample} remembers samples: give step(ids=…) on the first stage, one id per row"
    if shape is not None and (not isinstance(shape, Sequence) or not shape or not all(type(n) is int for n in shape)):
        return f"shape = {shape!r}: must be the batch's, x.shape"
    given = None if shape is None else tuple(shape)
    if known is not None and given is not None and given[0] != len(known):
        return f"{len(known)} sample ids for a batch of shape {given}"
    return Announcement(step, train, known, given, following)


class Announcer:
    """Messages from the first stage's rank to all others: one each, or two where the batch has grown.

    group: the ranks of the pipeline; on CPUs nobody else sends with the tag TAG in it.
    root: the rank of the first stage in the group.
    device: where messages of the group have to be. On a CPU receives are posted as soon as the message before has come,
    so that an announcement takes one latency; on a GPU it is a broadcast.
    """

    def __init__(self, group: dist.ProcessGroup | None, root: int, device: torch.device) -> None:
        self.group = group
        self.root = root
        self.device = device
        self.size, self.rank = world(group)
        self.length = FIRST_LENGTH
        self.ahead: Announcement | None = None  # of the next step, where it is known
        self._posted: tuple[Tensor, dist.Work] | None = None
        self._sent: list[tuple[Tensor, dist.Work]] = []  # kept until they have left
        self._post()

    def announce(self, announced: Announcement | str | None) -> Announcement:
        """Return what the first stage's rank announces. All ranks of the pipeline call it together.

        announced: on the first stage's rank the announcement, or a text that is raised on every rank as a UsageError;
        ignored elsewhere.
        """
        known, self.ahead = self.ahead, None
        if known is None or known == UNKNOWN:
            return self._exchange(announced)
        if isinstance(announced, Announcement) and not known.announces(announced):
            raise UsageError(f"next_certain=True announced {str(known)[:200]} as the next step: {str(announced)[:200]}")
        if isinstance(announced, str):
            raise UsageError(announced)
        return known

    def announce_next(self, announced: Announcement | None) -> Announcement:
        """The next step's announcement, one step early; arguments as of `announce`. Other ranks wait for it here, so
        they call this when it has had time to arrive. A second call returns the same."""
        if self.ahead is None:
            self.ahead = self._exchange(announced)
        return self.ahead

    def fail(self, wrong: str) -> None:
        """Raise a UsageError on all ranks: what is `wrong`, as the first stage's rank says it."""
        self._exchange(wrong)
        while self.size > 1:  # what came was the announcement of the next step
            self._exchange(wrong)

    def _exchange(self, announced: Announcement | str | None) -> Announcement:
        words = _pack(announced) if self.rank == self.root else []
        if self.size > 1:
            words = self._transfer(words)
        is_error, *content = words
        if is_error:
            raise UsageError(bytes(content).decode())
        return Announcement.read(content)

    def _transfer(self, words: list[int]) -> list[int]:
        """A message of `length` words that begins with their number, and a second one for those that do not fit."""
        room = self.length - 1
        head = [len(words), *words[:room]]
        first = torch.zeros(self.length, dtype=torch.int64)
        first[: len(head)] = torch.tensor(head)
        first = self._send_checked(first)
        total = int(first[0])
        received = first[1 : 1 + min(total, room)].tolist()
        if total > room:
            rest = torch.tensor(words[room:] or [0] * (total - room))
            received += self._send_checked(rest).tolist()
            self.length = 1 << (total + 1).bit_length()
        self._post()
        return received

    def _send_checked(self, words: Tensor) -> Tensor:
        """Send with a checksum behind the words; RunFailed where they arrive damaged.

        A rank that believed in another step, other samples or evaluation would go on with wrong mirrors, or wait for
        messages that nobody sends."""
        message = torch.cat((words, torch.tensor([_checksum(words)])))
        arrived, stored = self._send(message).split([len(words), 1])
        if int(stored) != _checksum(arrived):
            raise RunFailed(
                f"the announcement of a step arrived damaged at rank {self.rank} of the pipeline (checksum)"
            )
        return arrived

    def _send(self, words: Tensor) -> Tensor:
        """The root's words, on all ranks."""
        if self.device.type != "cpu":
            words = words.to(self.device)
            dist.broadcast(words, group=self.group, group_src=self.root)
            return words.cpu()
        if self.rank == self.root:
            self._sent = [(held, work) for held, work in self._sent if not work.is_completed()]
            for peer in range(self.size):
                work = None if peer == self.root else dist.isend(words, group=self.group, group_dst=peer, tag=TAG)
                if work is not None:
                    self._sent.append((words, work))
            return words
        if self._posted is None:  # the second of two
            dist.recv(words, group=self.group, group_src=self.root, tag=TAG)
            return words
        words, work = self._posted
        self._posted = None
        work.wait()
        return words

    def _post(self) -> None:
        """Wait for the next message from now on."""
        if self.size > 1 and self.rank != self.root and self.device.type == "cpu":
            buffer = torch.empty(self.length + 1, dtype=torch.int64)
            work = dist.irecv(buffer, group=self.group, group_src=self.root, tag=TAG)
            assert work is not None
            self._posted = buffer, work


def _checksum(words: Tensor) -> int:
    return zlib.crc32(words.numpy().tobytes())


def _pack(announced: Announcement | str | None) -> list[int]:
    """1 and the bytes of a text, or 0 and the words of an announcement."""
    if announced is None:
        raise RuntimeError("the first stage's rank has nothing to announce")
    if isinstance(announced, str):
        return [1, *announced.encode()]
    return [0, *announced.words()]
