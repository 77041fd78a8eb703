"""The actions of a pipeline schedule, such as 2F0 (stage 2, forward, micro-batch 0), read and written.

The spelling is torch.distributed.pipelining's, so lists and CSV files can be exchanged with torch:
F forward · B whole backward · I backward for the input · W backward for the weights · SEND_F, RECV_F, SEND_B,
RECV_B messages · REDUCE_GRAD the stage's gradient reduction · (3F5;4B1)OVERLAP_F_B two actions run as one.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from thinwire.errors import UsageError


class Kind(StrEnum):
    """What an action does; the letters are explained at the top of this file."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - the literature's letter
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    REDUCE_GRAD = "REDUCE_GRAD"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    OVERLAP = "OVERLAP_F_B"


COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
_AFTER = {Kind.B: Kind.F, Kind.I: Kind.F, Kind.W: Kind.I}  # on the same stage and micro-batch


class Action(NamedTuple):
    """One step of one rank. `parts` holds the two halves of an OVERLAP_F_B; it has no stage of its own."""

    stage: int
    kind: Kind
    microbatch: int | None = None
    parts: tuple[Action, ...] = ()

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind}"
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"

    def flat(self) -> tuple[Action, ...]:
        """The action, or its two halves in the order torch's runtime performs them."""
        return self.parts or (self,)


@dataclass(frozen=True)
class Schedule:
    """What each rank computes, in order. Messages follow from it: see `lowered`."""

    name: str
    ranks: tuple[tuple[Action, ...], ...]  # compute actions only
    rank_of: tuple[int, ...]  # stage -> rank
    microbatches: int

    @property
    def stages(self) -> int:
        return len(self.rank_of)

    def compute(self, rank: int) -> Iterator[Action]:
        """The rank's single computations, overlapped pairs taken apart."""
        for action in self.ranks[rank]:
            yield from action.flat()

    def remote(self, stage: int, to: int) -> bool:
        """Whether a tensor from `stage` to its neighbour `to` crosses a link (at the tip of a V: no)."""
        return 0 <= to < self.stages and self.rank_of[stage] != self.rank_of[to]

    def lowered(self) -> tuple[tuple[Action, ...], ...]:
        """The lists with messages and reductions: sends right after, receives right before computing."""
        return tuple(tuple(_with_messages(self, rank)) for rank in range(len(self.ranks)))

    def text(self) -> str:
        """One line per rank."""
        return "\n".join(f"rank {r}: {' '.join(map(str, ops))}" for r, ops in enumerate(self.lowered()))


def _with_messages(schedule: Schedule, rank: int) -> Iterator[Action]:
    left = dict.fromkeys((s for s, r in enumerate(schedule.rank_of) if r == rank), schedule.microbatches)
    for action in schedule.ranks[rank]:
        parts = action.flat()
        for stage, kind, microbatch, _ in parts:
            before = stage - 1 if kind is Kind.F else stage + 1
            if kind is not Kind.W and schedule.remote(stage, before):
                yield Action(stage, Kind.RECV_F if kind is Kind.F else Kind.RECV_B, microbatch)
        yield action
        for stage, kind, microbatch, _ in parts:
            after = stage + 1 if kind is Kind.F else stage - 1
            if kind is not Kind.W and schedule.remote(stage, after):
                yield Action(stage, Kind.SEND_F if kind is Kind.F else Kind.SEND_B, microbatch)
            if kind in (Kind.B, Kind.W):
                left[stage] -= 1
                if not left[stage]:
                    yield Action(stage, Kind.REDUCE_GRAD)


_SINGLE = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|REDUCE_GRAD|UNSHARD|RESHARD|F|B|I|W)(\d*)")
_PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")


def parse_action(text: str) -> Action:
    """The inverse of `str(action)`."""
    word = text.strip()
    if pair := _PAIR.fullmatch(word):
        return Action(-1, Kind.OVERLAP, None, tuple(parse_action(part) for part in pair[1].split(";")))
    single = _SINGLE.fullmatch(word)
    if single is None:
        raise UsageError(f"schedule action {text!r}: write stage, kind and micro-batch, such as 2F0 or 3SEND_B1")
    stage, kind, microbatch = single.groups()
    return Action(int(stage), Kind(kind), int(microbatch) if microbatch else None)


def read_csv(path: str | Path) -> Schedule:
    """A schedule from torch's CSV: one row per rank, empty cells idle; messages are dropped and derived anew."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read schedule {path}: {error}") from None
    rows = [[parse_action(cell) for cell in row if cell.strip()] for row in csv.reader(io.StringIO(text))]
    return from_lists(Path(path).stem, rows)


def write_csv(schedule: Schedule, path: str | Path, messages: bool = False) -> None:
    """Write torch's CSV: its format "compute_only", or with `messages` "compute_comms"."""
    rows = schedule.lowered() if messages else schedule.ranks
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(rows)


def from_lists(name: str, rows: Sequence[Sequence[Action]]) -> Schedule:
    """A checked schedule from one list of actions per rank: every stage on one rank, every F and backward once."""
    ranks = tuple(tuple(a for a in row if a.flat()[0].kind in COMPUTE) for row in rows)
    owner: dict[int, int] = {}
    seen: set[Action] = set()
    for rank, row in enumerate(ranks):
        for action in (part for a in row for part in a.flat()):
            if owner.setdefault(action.stage, rank) != rank:
                raise UsageError(
                    f"schedule {name}: stage {action.stage} is on two ranks, {owner[action.stage]}, {rank}"
                )
            if action.kind in _AFTER and action._replace(kind=_AFTER[action.kind]) not in seen:
                raise UsageError(f"schedule {name}: {action} comes before its {_AFTER[action.kind]}")
            if action in seen or action.microbatch is None:
                raise UsageError(f"schedule {name}: {action}, rank {rank}, is repeated or has no micro-batch")
            seen.add(action)
    if not seen or sorted(owner) != list(range(len(owner))):
        raise UsageError(f"schedule {name}: stages {sorted(owner)} are not 0, 1, 2, …")
    schedule = Schedule(name, ranks, tuple(owner[s] for s in range(len(owner))), _microbatches(seen))
    _check_complete(schedule, seen)
    return schedule


def _microbatches(actions: set[Action]) -> int:
    return 1 + max(a.microbatch for a in actions if a.microbatch is not None)


def _check_complete(schedule: Schedule, seen: set[Action]) -> None:
    for stage in range(schedule.stages):
        for m in range(schedule.microbatches):
            have = {k for k in COMPUTE if Action(stage, k, m) in seen}
            if have not in ({Kind.F, Kind.B}, {Kind.F, Kind.I, Kind.W}):
                raise UsageError(
                    f"schedule {schedule.name}: stage {stage}, micro-batch {m} has {sorted(map(str, have))};"
                    " needed is F and B, or F, I and W"
                )
