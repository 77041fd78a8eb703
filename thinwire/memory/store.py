"""Keyed values between messages, in RAM; in a file: file_store.py, in pinned host memory: host.py.

A value is rounded to the store's dtype once, when it is put (`pack`); sender and receiver run the same code, so
their copies are bitwise equal.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.quantize import Quantize
from thinwire.errors import UsageError
from thinwire.kernels.random import derive

Key = str | int  # of a value: a parameter's name, a boundary, a sample's id
MessageKey = Key | Sequence[Key]  # of a message: one key, or one per row
PACKED = {f"int{bits}": Quantize(bits, block=64, scale="absmax" if bits == 8 else "full") for bits in range(2, 9)}
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass
class Entry:
    """A packed value: its bytes as a tensor, and the shape they stand for."""

    data: Tensor
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self.data.numel() * self.data.element_size()


class RamStore:
    """Entries in a dictionary.

    dtype: what values are rounded to: native (float32, or float64 as given), fp32, bf16, or int8 … int2 (blocks of 64).
    capacity: the share of keys kept (float), or bytes (int, "2GB").
    """

    def __init__(self, dtype: str = "native", capacity: float | int | str = 1.0) -> None:
        self.dtype = dtype
        self.share, self.limit = parse_capacity(capacity)
        self.used = 0
        self.lost = 0  # values that were not as they had been put, and are forgotten
        self.entries: dict[Key, Entry] = {}

    def pack(self, value: Tensor) -> Entry:
        """Round to the storage dtype."""
        shape = tuple(value.shape)
        if self.dtype in PACKED:
            return Entry(PACKED[self.dtype].encode_flagged(value.float())[0], shape)
        return Entry(value.to(self.mirror_dtype(value.dtype)), shape)

    def unpack(self, entry: Entry) -> Tensor:
        """The value of an entry, in the dtype of `mirror_dtype`."""
        if self.dtype in PACKED:
            return PACKED[self.dtype].decode(entry.data, entry.shape, torch.float32)
        return entry.data.view(entry.shape)

    def mirror_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a value of `dtype` is worked on: what `unpack` gives."""
        if self.dtype == "native":
            return torch.promote_types(dtype, torch.float32)
        return torch.bfloat16 if self.dtype == "bf16" else torch.float32

    def admits(self, key: Key, size: int) -> bool:
        """Is this key kept? By the hash of the id, or while there is room; a key once kept stays kept."""
        if key in self:
            return True
        if self.limit is not None:
            return self.used + size <= self.limit
        return self.share >= 1 or derive("pin", key) < self.share * 2**63

    def get(self, key: Key) -> Entry | None:
        """What is kept of a key, on the device where it is used; None where nothing is."""
        return self.entries.get(key)

    def at_rest(self, key: Key) -> Entry | None:
        """The same, where it is kept: for a checkpoint."""
        return self.get(key)

    def put(self, key: Key, entry: Entry) -> bool:
        """Keep it, if the key is admitted; a row of a larger tensor is copied, so that the rest can be freed."""
        self.forget_if_reshaped(key, entry)
        if not self.admits(key, entry.nbytes):
            return False
        if key not in self.entries:
            self.used += entry.nbytes
        part = entry.data.untyped_storage().nbytes() > entry.nbytes
        self.entries[key] = Entry(entry.data.clone(), entry.shape) if part else entry
        return True

    def forget_if_reshaped(self, key: Key, entry: Entry) -> None:
        """Forget a key whose kept value is of another size than its next one."""
        if key in self and self.size_of(key) != entry.nbytes:
            self.forget(key)

    def size_of(self, key: Key) -> int:
        """Bytes that a kept key takes."""
        return self.entries[key].nbytes

    def shape_of(self, key: Key) -> tuple[int, ...] | None:
        """The shape of a key's value, without reading it; None where nothing is kept."""
        return self.entries[key].shape if key in self.entries else None

    def forget(self, key: Key) -> None:
        """Drop a key, if it is kept."""
        if key in self.entries:
            self.used -= self.entries.pop(key).nbytes

    def __contains__(self, key: object) -> bool:
        return key in self.entries

    def __iter__(self) -> Iterator[Key]:
        return iter(self.entries)

    def load(self, keys: Iterable[Key]) -> None:
        """These keys are about to be read."""

    def prefetch(self, keys: Iterable[Key]) -> None:
        """These keys will be read in the next step. May run beside readers, never beside writers."""

    def close(self) -> None:
        """Forget everything."""
        self.entries.clear()
        self.used = 0


def parse_capacity(capacity: float | int | str) -> tuple[float, int | None]:
    """(share of ids, None) or (1, bytes). 0.5 is a share; 2_000_000_000 and "2GB" are sizes."""
    if isinstance(capacity, float) or capacity == 1:
        if not 0 < capacity <= 1:
            raise UsageError(f"capacity as a share must lie in (0, 1], not {capacity!r}")
        return float(capacity), None
    if isinstance(capacity, int) and not isinstance(capacity, bool) and capacity > 0:
        return 1.0, capacity
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(capacity))
    if not match or match[2].upper() not in UNITS or not isinstance(capacity, str):
        raise UsageError(f'capacity must be a share such as 0.5, or a size such as "2GB", not {capacity!r}')
    return 1.0, int(float(match[1]) * UNITS[match[2].upper()])
