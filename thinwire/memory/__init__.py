"""Memories: the numbers of the one rule (rule.py) and the keyed state it works on (store.py, file_store.py)."""

from thinwire.memory.file_store import FileStore
from thinwire.memory.rule import (
    EF21,
    Delta,
    Diana,
    EControl,
    ErrorFeedback,
    FixedShift,
    Memory,
    Plain,
    RandDiana,
    StarShift,
)  # fmt: skip
from thinwire.memory.store import Entry, RamStore

__all__ = [
    "EF21",
    "Delta",
    "Diana",
    "EControl",
    "Entry",
    "ErrorFeedback",
    "FileStore",
    "FixedShift",
    "Memory",
    "Plain",
    "RamStore",
    "RandDiana",
    "StarShift",
]  # fmt: skip
