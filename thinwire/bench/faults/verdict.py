"""How a cell ended, told from outside: from exit statuses, printed lines, seconds, and results beside the reference.

Good endings: *goes on* (results equal an undisturbed run's, bit for bit), *rolled back* (the step was dropped on all
ranks, or an earlier checkpoint was taken, and that was said), *one line* (every rank that did not end well says in one
line what was wrong, within the time). Everything else is silence of one kind: a wrong result that nobody noticed, a
hang, a traceback, a process that ended without a word.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.bench.faults.watched import RESULT, Ended
from thinwire.train.local import PREFIX

GOES_ON, ROLLED_BACK, ONE_LINE = GOOD = ("goes on", "rolled back", "one line")
WRONG, HANG, TRACEBACK, NO_WORD = BAD = ("WRONG", "HANG", "TRACEBACK", "NO WORD")
Result = dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """word: one of GOOD or BAD. seconds: from the fault to the end of the last rank. said: the line that was printed,
    or what is wrong."""

    word: str
    seconds: float
    said: str = ""

    @property
    def good(self) -> bool:
        """Is it one of the good endings?"""
        return self.word in GOOD


def bad_ending(ended: Sequence[Ended], killed: int | None, seconds: float) -> Verdict | None:
    """The verdict on ranks of which some did not end well; None where all did. killed: the rank that had to die."""
    for rank, one in enumerate(ended):
        if one.stuck:
            return Verdict(HANG, seconds, f"rank {rank} had to be ended; it had said: {_last(one)}")
    for rank, one in enumerate(ended):
        at = next((at for at, line in enumerate(one.lines) if line.startswith("Traceback")), None)
        if at is not None:
            return Verdict(TRACEBACK, seconds, f"rank {rank}: " + " | ".join(one.lines[max(0, at - 2) :])[-3000:])
    failed = [rank for rank, one in enumerate(ended) if one.status]
    if not failed:
        return None
    for rank in failed:
        if rank != killed and not _lines(ended[rank]):
            return Verdict(NO_WORD, seconds, f"rank {rank} ended with {ended[rank].status}: {_last(ended[rank])}")
    unaware = [rank for rank in range(len(ended)) if rank not in failed]
    if unaware:
        return Verdict(WRONG, seconds, f"ranks {failed} failed, ranks {unaware} ended as if all were well")
    first = min((rank for rank in failed if _lines(ended[rank])), key=lambda rank: ended[rank].at)
    return Verdict(ONE_LINE, seconds, _lines(ended[first])[-1])


def compared(
    ended: Sequence[Ended], reference: Sequence[Result], replicas: Sequence[Sequence[int]], seconds: float
) -> Verdict:
    """The verdict on loops that all came to their end. reference: the results of an undisturbed run. replicas: groups
    of ranks whose weights must be equal."""
    results = [result_of(one) for one in ended]
    if results == list(reference):
        return Verdict(GOES_ON, seconds)
    dropped = results[0]["dropped"]
    if not dropped:
        return Verdict(WRONG, seconds, "losses or weights differ from the undisturbed run's, and nobody noticed")
    for rank, (result, plain) in enumerate(zip(results, reference)):
        if result["dropped"] != dropped:
            return Verdict(WRONG, seconds, f"rank {rank} dropped steps {result['dropped']}, rank 0 {dropped}")
        if result["weights"][: dropped[0] - 1] != plain["weights"][: dropped[0] - 1]:
            return Verdict(WRONG, seconds, f"rank {rank}: weights differ before the step that was dropped")
        if any(step > 1 and result["weights"][step - 1] != result["weights"][step - 2] for step in dropped):
            return Verdict(WRONG, seconds, f"rank {rank}: a step that was dropped changed the weights")
    for group in replicas:
        if len({results[rank]["weights"][-1] for rank in group}) > 1:
            return Verdict(WRONG, seconds, f"ranks {list(group)} have different weights at the end")
    return Verdict(ROLLED_BACK, seconds, f"step {', '.join(map(str, dropped))} dropped on all ranks")


def result_of(one: Ended) -> Result:
    """What a loop printed as its result."""
    line = next(line for line in one.lines if line.startswith(RESULT))
    found: Result = json.loads(line.removeprefix(RESULT))
    return found


def _lines(one: Ended) -> list[str]:
    return [line for line in one.lines if line.startswith(PREFIX)]


def _last(one: Ended) -> str:
    return next((line for line in reversed(one.lines) if line.strip()), "nothing")
