"""The keyed state of a channel: what is committed, what this step has staged, what a checkpoint holds.

Slots: e residual · h shift (mirror) · m mean shift of a group · q right factor of low rank. Within a step writes are
staged, and read back as they will be stored; `commit` keeps them, `rollback` drops them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from numbers import Integral

import torch
from torch import Tensor

from thinwire.errors import UsageError
from thinwire.memory.file_store import FileStore
from thinwire.memory.host import HostStore
from thinwire.memory.rule import Memory
from thinwire.memory.store import Entry, Key, RamStore

SLOTS = ("e", "h", "m", "q")


class KeyedState:
    """A value per slot and key, in one store per slot.

    memory: the rule's numbers, and where its mirrors are kept (RAM, pinned host memory, a file).
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.stores: dict[str, RamStore] = {slot: RamStore() for slot in SLOTS}
        if memory.path is not None:
            self.stores["h"] = FileStore(memory.path, memory.store, memory.capacity)
        elif memory.host:
            self.stores["h"] = HostStore(memory.store, memory.capacity)
        else:
            self.stores["h"] = RamStore(memory.store, memory.capacity)
        self.staged: dict[tuple[str, Key], Entry | None] | None = None  # None: no step is open

    def residual(self, key: Key, shape: torch.Size) -> Tensor | None:
        """e of a key; one of another shape (a short last batch) belongs to nothing that is sent now: None."""
        return self.read("e", key) if self.shape("e", key) == tuple(shape) else None

    def shift(self, key: Key, like: Tensor) -> Tensor | None:
        """h of a key, fixed (in the dtype and on the device of `like`) or learned; None stands for zero."""
        fixed = self.memory.base_shift(key, like)
        if fixed is not None:
            return fixed.to(like)
        return self.read("h", key) if self.memory.mirrored else None

    def is_warm(self, key: Key, shape: tuple[int, ...]) -> bool:
        """Is there a mirror of that shape for the key?"""
        return self.shape("h", key) == shape

    def read(self, slot: str, key: Key) -> Tensor | None:
        """The value of a key in a slot as stored (rounded), or None. Do not write into it."""
        staged = self.staged or {}
        entry = staged[slot, key] if (slot, key) in staged else self.stores[slot].get(key)
        return None if entry is None else self.stores[slot].unpack(entry)

    def shape(self, slot: str, key: Key) -> tuple[int, ...] | None:
        """The shape of a key's value in a slot, without reading it; None where there is none."""
        if self.staged and (slot, key) in self.staged:
            entry = self.staged[slot, key]
            return None if entry is None else entry.shape
        return self.stores[slot].shape_of(key)

    def write(self, slot: str, key: Key, value: Tensor) -> None:
        """Stage a key's value in a slot, or store it where no step is open; the tensor is not the caller's any more."""
        store = self.stores[slot]
        entry = store.pack(value)
        if self.staged is None:
            store.put(key, entry)
        elif store.admits(key, entry.nbytes):
            self.staged[slot, key] = entry

    def empty_mirror(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Where a fused kernel may write the new mirror of a tensor of that shape and dtype."""
        return torch.empty(tuple(shape), dtype=self.stores["h"].mirror_dtype(dtype), device=device)

    def forget(self, key: Key) -> None:
        """Drop what every slot holds of a key; within a step, from its commit on."""
        for slot in SLOTS:
            if self.staged is None:
                self.stores[slot].forget(key)
            else:
                self.staged[slot, key] = None

    def begin(self) -> None:
        """Open a step: writes are staged from now on."""
        if self.staged is not None:
            raise RuntimeError("a step is open already: commit or roll it back first")
        self.staged = {}

    def commit(self) -> None:
        """Keep what was staged.

        Mirrors go first, since only their store can fail (a full disk). Where it does, mirrors that were written
        already are forgotten, everything else is as it was at `begin`, and the error goes to the caller, who has to
        roll back.
        """
        staged = self._open()
        written: list[Key] = []
        try:
            for slot, key in sorted(staged, key=lambda place: place[0] != "h"):
                entry = staged[slot, key]
                if entry is None:
                    self.stores[slot].forget(key)
                else:
                    written += [key] if slot == "h" else []
                    self.stores[slot].put(key, entry)
        except BaseException:
            for key in written:
                self.stores["h"].forget(key)
            self.staged = {}
            raise
        self.staged = None

    def rollback(self) -> None:
        """Drop what was staged."""
        self._open()
        self.staged = None

    def _open(self) -> dict[tuple[str, Key], Entry | None]:
        if self.staged is None:
            raise RuntimeError("no step is open: begin() one first")
        return self.staged

    def state_dict(self, without: Sequence[str] = ()) -> dict[str, Tensor]:
        """Tensors only: "h/i:42" → data, "h.shape/i:42" → shape. without: slots that are left out."""
        if self.staged is not None:
            raise RuntimeError("a step is open: commit or roll it back before taking the state")
        out = {}
        for slot, key, entry in self._entries(without):
            out[f"{slot}/{key_name(key)}"] = entry.data.clone()
            out[f"{slot}.shape/{key_name(key)}"] = torch.tensor(entry.shape, dtype=torch.int64)
        return out

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Replace everything by what `state_dict` gave."""
        for slot in SLOTS:
            for key in list(self.stores[slot]):
                self.stores[slot].forget(key)
        for name, data in state.items():
            slot, _, text = name.partition("/")
            if slot in SLOTS:
                shape = tuple(int(n) for n in state[f"{slot}.shape/{text}"])
                self.stores[slot].put(parse_key(text), Entry(data.clone(), shape))

    def _entries(self, without: Sequence[str]) -> Iterator[tuple[str, Key, Entry]]:
        for slot in (s for s in SLOTS if s not in without):
            for key in list(self.stores[slot]):
                entry = self.stores[slot].at_rest(key)
                if entry is not None:  # a file may have been changed by somebody else
                    yield slot, key, entry


def check_key(key: object) -> Key:
    """A text or a whole number (NumPy's too), as Python has it: what a checkpoint can name. Else UsageError."""
    if isinstance(key, str):
        return str(key)
    if isinstance(key, Integral) and not isinstance(key, bool):
        return int(key)
    said = " ".join(repr(key).split())
    raise UsageError(f"key {said:.60}: must be a text or a whole number, or in a message a list of them, one per row")


def key_name(key: Key) -> str:
    """A key as text for a checkpoint: "i:42" for a whole number, "s:weight" for a text."""
    return f"i:{key}" if isinstance(key, int) else f"s:{key}"


def parse_key(text: str) -> Key:
    """The inverse of `key_name`."""
    return int(text[2:]) if text.startswith("i:") else text[2:]
