"""Work that stops where it would wait for other ranks, so that other work can go on: a generator that yields there."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]  # its result is a T


def finish(steps: Steps[T]) -> T:
    """Run the work to its end, and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


def finish_together(works: Iterable[Steps[object]], most: int) -> None:
    """Run all works to their ends, one step of each in turn, so that at most `most` of them wait at a time."""
    ended = object()
    waiting: list[Steps[object]] = []
    for work in works:
        waiting += [work] if next(work, ended) is None else []
        while len(waiting) > most:
            waiting = [one for one in waiting if next(one, ended) is None]
    while waiting:
        waiting = [one for one in waiting if next(one, ended) is None]
