"""Work that stops where it would wait for other ranks, so that other work can go on: a generator that yields there."""

from __future__ import annotations

from collections.abc import Generator
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
