"""Keyed values in a bounded file, read and written by position: a memory-mapped file would count as resident memory.

The file belongs to one store: it is locked while in use (flock, which ends with the process), and a second opener is
refused. The checksum of every value stays in RAM, so that what was changed in the file by anybody else is found when it
is read. Where a step begins (`load`) such a value is forgotten with a warning: the two ends of a wire compare their
values then, and send it anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import socket
import time
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from thinwire.codecs.base import from_raw, raw_bytes
from thinwire.errors import UsageError
from thinwire.kernels.checksum import checksum
from thinwire.memory.store import Entry, Key, RamStore

logger = logging.getLogger("thinwire.memory")

SUFFIX = ".store"
YOUNG = 60.0  # seconds; a file may not be locked yet


@dataclass
class _Slot:
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    checksum: int


class FileStore(RamStore):
    """RamStore in one file: an index in RAM, values by pread and pwrite.

    What a step is about to read is held in RAM once (`load`); what the next will read may come early (`prefetch`).
    path: the file, made anew; UsageError where another store has it open. dtype, capacity: as RamStore's.
    """

    def __init__(self, path: str | Path, dtype: str = "bf16", capacity: float | int | str = 1.0) -> None:
        super().__init__(dtype, capacity)
        self.path = Path(path)
        self.file = _open_alone(self.path)
        self._close = weakref.finalize(self, os.close, self.file)
        self.slots: dict[Key, _Slot] = {}
        self.free: dict[int, list[int]] = {}
        self.end = 0
        self.held: dict[Key, Entry] = {}
        self.coming: dict[Key, Entry] = {}

    # --- reading

    def load(self, keys: Iterable[Key]) -> None:
        """Read these keys. What cannot be read, or is not what was written, is forgotten, logged and counted."""
        self.held = {}
        problems: dict[Key, OSError] = {}
        for key in keys:
            try:
                if key in self.slots:
                    self.held[key] = self.coming.get(key) or self._read(self.slots[key])
            except OSError as error:
                problems[key] = error
        self.coming = {}
        self._lose(problems)

    def prefetch(self, keys: Iterable[Key]) -> None:
        self.coming = {}
        for key in keys:
            with contextlib.suppress(OSError):  # `load` reads it again, and says so
                if key in self.slots:
                    self.coming[key] = self._read(self.slots[key])

    def get(self, key: Key) -> Entry | None:
        """What is kept of a key. OSError where it cannot be read, or is not what was written."""
        if key in self.held:
            return self.held[key]
        slot = self.slots.get(key)
        return None if slot is None else self._read(slot)

    def at_rest(self, key: Key) -> Entry | None:
        """The same, for a checkpoint: what is not what was written is forgotten, as by `load`."""
        try:
            return self.get(key)
        except OSError as error:
            self._lose({key: error})
            return None

    def _read(self, slot: _Slot) -> Entry:
        data = torch.empty(slot.nbytes, dtype=torch.uint8)
        view, done = memoryview(data.numpy().data), 0
        while done < slot.nbytes:
            read = os.preadv(self.file, [view[done:]], slot.offset + done)
            if read == 0:
                raise OSError(f"the store {self.path} was cut by somebody else while in use")
            done += read
        if int(checksum(data)) != slot.checksum:
            raise OSError(f"the store {self.path} was changed by somebody else while in use")
        return Entry(from_raw(data, slot.dtype), slot.shape)

    def _lose(self, problems: dict[Key, OSError]) -> None:
        """These keys cannot be used: they are sent in full next time."""
        if not problems:
            return
        for key in problems:
            self.forget(key)
        self.lost += len(problems)
        first, error = next(iter(problems.items()))
        logger.warning("%s: %d keys are forgotten, the first is %r", error, len(problems), first)

    # --- writing

    def put(self, key: Key, entry: Entry) -> bool:
        self.forget_if_reshaped(key, entry)
        if not self.admits(key, entry.nbytes):
            return False
        slot = self.slots.get(key)
        offset = self._place(entry.nbytes) if slot is None else slot.offset
        self._drop_copies(key)
        data = raw_bytes(entry.data.cpu())
        view, done = memoryview(data.numpy().data), 0
        try:
            while done < entry.nbytes:
                done += os.pwrite(self.file, view[done:], offset + done)
        except OSError as error:
            if slot is None:
                self.free.setdefault(entry.nbytes, []).append(offset)
            else:
                self.forget(key)  # its former value may be half overwritten
            raise UsageError(f"cannot write the store {self.path}: {error.strerror}") from error
        if slot is None:
            self.used += entry.nbytes
        self.slots[key] = _Slot(offset, entry.nbytes, entry.shape, entry.data.dtype, int(checksum(data)))
        return True

    def _place(self, size: int) -> int:
        """Room for a new value: a hole of the same size, or the end of the file."""
        if self.free.get(size):
            return self.free[size].pop()
        self.end += size
        return self.end - size

    def forget(self, key: Key) -> None:
        self._drop_copies(key)
        slot = self.slots.pop(key, None)
        if slot is not None:
            self.used -= slot.nbytes
            self.free.setdefault(slot.nbytes, []).append(slot.offset)

    def _drop_copies(self, key: Key) -> None:
        self.held.pop(key, None)
        self.coming.pop(key, None)

    def close(self) -> None:
        """Forget everything and remove the file."""
        if self._close.alive:
            self.path.unlink(missing_ok=True)
            self._close()
        self.slots.clear()

    # --- what is kept

    def size_of(self, key: Key) -> int:
        return self.slots[key].nbytes

    def shape_of(self, key: Key) -> tuple[int, ...] | None:
        return self.slots[key].shape if key in self.slots else None

    def __contains__(self, key: object) -> bool:
        return key in self.slots

    def __iter__(self) -> Iterator[Key]:
        return iter(self.slots)


def _open_alone(path: Path) -> int:
    """The file, empty and locked. UsageError where that cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise UsageError(f"cannot open the store {path}: {error.strerror}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(file, 0)
    except BlockingIOError:
        os.close(file)
        raise UsageError(f"the store {path} is in use by another store: every one needs a path of its own") from None
    except OSError as error:
        os.close(file)
        raise UsageError(f"cannot lock the store {path}: {error.strerror}; give a path on a local disk") from None
    return file


def store_owner(run: str, rank: int) -> str:
    """What the names of a rank's store files begin with, unlike any other's in a shared folder.

    run: an id of the run, such as a random number. rank: the rank among all of the run.
    """
    return f"{_host()}-{run}-rank{rank}-"


def remove_dead_stores(folder: str | Path) -> None:
    """Remove what this user's dead runs on this machine have left in the folder: files named by `store_owner` that
    nobody has locked."""
    for path in Path(folder).glob("*" + SUFFIX):
        if path.name.startswith(f"{_host()}-"):
            with contextlib.suppress(FileNotFoundError, PermissionError, BlockingIOError):  # gone, another's, in use
                _remove_unlocked(path)


def _remove_unlocked(path: Path) -> None:
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        about = os.fstat(file)
        if about.st_uid == os.geteuid() and time.time() - about.st_mtime > YOUNG:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    finally:
        os.close(file)


def _host() -> str:
    """This machine's name: whether a file is locked is not seen from another machine on every shared disk."""
    return re.sub(r"[^\w.]", "_", socket.gethostname())
