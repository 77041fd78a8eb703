"""Every keyed state of a channel in one book: what is committed, what this step has staged, what a checkpoint holds.

Slots: e residual · h mirror · m mean mirror of a group · q right factor of low rank. Within a transaction writes are
staged, and read back as they will be stored; `commit` keeps them, `rollback` drops them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from thinwire.memory.host import HostStore
from thinwire.memory.rule import Memory
from thinwire.memory.store import Entry, FileStore, Key, RamStore

SLOTS = ("e", "h", "m", "q")


class KeyedState:
    def __init__(self, memory: Memory) -> None:
        self.stores: dict[str, RamStore] = {slot: RamStore() for slot in SLOTS}
        if memory.path is not None:
            self.stores["h"] = FileStore(memory.path, memory.store, memory.capacity)
        else:
            self.stores["h"] = (HostStore if memory.host else RamStore)(memory.store, memory.capacity)
        self.staged: dict[tuple[str, Key], Entry | None] | None = None

    def read(self, slot: str, key: Key) -> Tensor | None:
        """The value as stored (rounded), or None. Do not write into it."""
        staged = self.staged or {}
        entry = staged[slot, key] if (slot, key) in staged else self.stores[slot].get(key)
        return None if entry is None else self.stores[slot].unpack(entry)

    def shape(self, slot: str, key: Key) -> tuple[int, ...] | None:
        """The shape of a value, without reading it; None where there is none."""
        if self.staged and (slot, key) in self.staged:
            entry = self.staged[slot, key]
            return None if entry is None else entry.shape
        return self.stores[slot].shape_of(key)

    def write(self, slot: str, key: Key, value: Tensor) -> None:
        """Stage or store a value; the book takes the tensor over."""
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
        for slot in SLOTS:
            if self.staged is None:
                self.stores[slot].forget(key)
            else:
                self.staged[slot, key] = None

    def begin(self) -> None:
        if self.staged is not None:
            raise RuntimeError("a step is open already: commit or roll it back first")
        self.staged = {}

    def commit(self) -> None:
        """Keep what was staged. A write that fails (a full disk) leaves the rest staged and the error to the caller."""
        staged = self._open()
        for slot, key in list(staged):
            entry = staged[slot, key]
            if entry is None:
                self.stores[slot].forget(key)
            else:
                self.stores[slot].put(key, entry)
            del staged[slot, key]
        self.staged = None

    def rollback(self) -> None:
        self._open()
        self.staged = None

    def _open(self) -> dict[tuple[str, Key], Entry | None]:
        if self.staged is None:
            raise RuntimeError("no step is open: begin() one first")
        return self.staged

    def state_dict(self, without: Sequence[str] = ()) -> dict[str, Tensor]:
        """Tensors only: "h/i:42" → data, "h.shape/i:42" → shape; slots may be left out."""
        if self.staged is not None:
            raise RuntimeError("a step is open: commit or roll it back before taking the state")
        out = {}
        for slot, key, entry in self._entries(without):
            out[f"{slot}/{key_name(key)}"] = entry.data.clone()
            out[f"{slot}.shape/{key_name(key)}"] = torch.tensor(entry.shape, dtype=torch.int64)
        return out

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
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
            for key in self.stores[slot]:
                entry = self.stores[slot].at_rest(key)
                assert entry is not None
                yield slot, key, entry


def key_name(key: Key) -> str:
    return f"i:{key}" if isinstance(key, int) else f"s:{key}"


def parse_key(text: str) -> Key:
    return int(text[2:]) if text.startswith("i:") else text[2:]
