"""Keyed state of a card's tensors in pinned host memory: copied out when it is put, and back before it is read.

All copies take one stream beside the computation, in order. What a step is about to read comes back at its start
(`load`), or during the step before (`prefetch`); whoever reads it waits for that copy on the card, never on the host.
Tensors that are in host memory already are kept as they are.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from thinwire.memory.store import Entry, Key, RamStore

Coming = tuple[Entry, torch.cuda.Event]  # on the card once the event has happened


class HostStore(RamStore):
    """RamStore with the values of CUDA tensors in pinned host memory. dtype, capacity: as RamStore's."""

    def __init__(self, dtype: str = "bf16", capacity: float | int | str = 1.0) -> None:
        super().__init__(dtype, capacity)
        self.streams: dict[Key, torch.cuda.Stream] = {}  # of the keys that belong to a card
        self.stream: torch.cuda.Stream | None = None
        self.held: dict[Key, Coming] = {}
        self.coming: dict[Key, Coming] = {}

    def put(self, key: Key, entry: Entry) -> bool:
        device = entry.data.device
        self.forget_if_reshaped(key, entry)
        if device.type != "cuda" or not self.admits(key, entry.nbytes):
            return super().put(key, entry)
        self._drop_copies(key)
        if key not in self.streams:
            self.forget(key)
            self.used += entry.nbytes
            self.entries[key] = Entry(torch.empty_like(entry.data, device="cpu", pin_memory=True), entry.shape)
            self.stream = self.stream or torch.cuda.Stream(device)
            self.streams[key] = self.stream
        stream = self.streams[key]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self.entries[key].data.copy_(entry.data, non_blocking=True)
        entry.data.record_stream(stream)
        return True

    def load(self, keys: Iterable[Key]) -> None:
        self.held = {key: self.coming.get(key) or self._bring(key) for key in keys if key in self.streams}
        self.coming = {}

    def prefetch(self, keys: Iterable[Key]) -> None:
        self.coming = {key: self._bring(key) for key in keys if key in self.streams}

    def get(self, key: Key) -> Entry | None:
        if key not in self.streams:
            return super().get(key)
        if key not in self.held:
            self.held[key] = self._bring(key)
        entry, there = self.held[key]
        reader = torch.cuda.current_stream(entry.data.device)
        reader.wait_event(there)
        entry.data.record_stream(reader)
        return entry

    def at_rest(self, key: Key) -> Entry | None:
        if key in self.streams:
            self.streams[key].synchronize()
        return super().get(key)

    def _bring(self, key: Key) -> Coming:
        stream, there, kept = self.streams[key], torch.cuda.Event(), self.entries[key]
        with torch.cuda.stream(stream):
            data = kept.data.to(stream.device, non_blocking=True)
            there.record(stream)
        return Entry(data, kept.shape), there

    def _drop_copies(self, key: Key) -> None:
        self.held.pop(key, None)
        self.coming.pop(key, None)

    def forget(self, key: Key) -> None:
        """The stream may still be writing to the memory that is let go: torch keeps it until then."""
        self._drop_copies(key)
        self.streams.pop(key, None)
        super().forget(key)

    def close(self) -> None:
        self.held, self.coming, self.streams = {}, {}, {}
        super().close()
