"""State as bytes without pickles: a JSON header that says what is where, then the tensors' bytes.

    "thinwire" | header's length, 8 bytes | header | tensors, one after the other

The header has the tree (tables, lists, texts, numbers) with tensors by number, and of every tensor type, shape,
checksum and lengths. Nothing in it is executed, and sizes are checked before anything is allocated.

A tensor travels as its *planes*: the first byte of every value, then the second byte of every value, and so on. A plane
that zlib makes shorter is sent so. That is the one with the exponents: float32 weights and moments of Adam take 0.82 of
their bytes. Differences from a checkpoint of 30 steps before take 0.81, so they are not worth a second copy.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from thinwire.errors import UsageError

MAGIC = b"thinwire"
PREFIX = len(MAGIC) + 8  # bytes before the header
LONGEST_HEADER = 64 << 20  # bytes
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool,
    )
}  # fmt: skip
TRIAL = 1 << 16  # bytes of a plane by which it is decided
WORTH = 0.95  # of a plane's length that must be left at most


def pack(state: object) -> list[memoryview]:
    """The pieces of a message that holds a state: tables, lists, texts, numbers, and tensors, which are copied."""
    tensors: list[Tensor] = []
    tree = _encode(state, tensors, "state")
    about: list[list[object]] = []
    pieces: list[memoryview] = []
    for tensor in tensors:
        held = tensor.detach().cpu().contiguous()
        raw = _raw(held)
        planes = [_shorter(plane) for plane in raw.reshape(-1, held.itemsize).T]
        lengths = [plane.nbytes for plane in planes]
        about.append([str(held.dtype).removeprefix("torch."), list(held.shape), zlib.crc32(raw.data), lengths])
        pieces += [plane for plane in planes if plane.nbytes]
    header = json.dumps({"tree": tree, "tensors": about}).encode()
    return [memoryview(MAGIC + len(header).to_bytes(8, "little") + header), *pieces]


def unpack(read: Callable[[memoryview], None], limit: int) -> object:
    """The inverse. read: fills a buffer with the next bytes. limit: bytes that all tensors may have.

    ValueError where the bytes are no state, are damaged, or announce more than `limit`.
    """
    prefix = _bytes(read, PREFIX)
    length = int.from_bytes(prefix[len(MAGIC) :], "little")
    if prefix[: len(MAGIC)] != MAGIC or not 0 < length <= LONGEST_HEADER:
        raise ValueError(f"no state of thinwire, or one with a header of {length} bytes")
    try:
        header = json.loads(_bytes(read, length))
        listed = [_Listed(*entry) for entry in header["tensors"]]
        total = sum(one.checked_nbytes() for one in listed)
        tree = header["tree"]
    except (KeyError, RecursionError, TypeError) as error:
        raise ValueError(f"a header that is no state's: {error}") from None
    if total > limit:
        raise ValueError(f"a state of {total} bytes is announced, and at most {limit} are expected")
    tensors = [_receive(one, read) for one in listed]
    try:
        return _decode(tree, tensors)
    except (AssertionError, AttributeError, IndexError, RecursionError, TypeError) as error:
        raise ValueError(f"a header that is no state's: {error}") from None


@dataclass(frozen=True)
class _Listed:
    """A tensor as the header has it. lengths: of its planes, as they are sent."""

    kind: str
    shape: list[int]
    check: int
    lengths: list[int]

    def checked_nbytes(self) -> int:
        """What it takes. ValueError where that cannot be."""
        whole = [self.check, *self.shape, *self.lengths]
        if self.kind not in DTYPES or any(not isinstance(n, int) or n < 0 for n in whole):
            raise ValueError(f"a tensor of type {self.kind} and shape {self.shape} is announced")
        values = math.prod(self.shape)
        if len(self.lengths) != DTYPES[self.kind].itemsize or any(length > values for length in self.lengths):
            raise ValueError(f"planes of {self.lengths} bytes are announced for {values} values")
        return values * DTYPES[self.kind].itemsize


def _receive(listed: _Listed, read: Callable[[memoryview], None]) -> Tensor:
    try:
        tensor = torch.empty(listed.shape, dtype=DTYPES[listed.kind])
    except (RuntimeError, TypeError) as error:  # no memory, or no shape of torch's
        raise ValueError(f"no place for a tensor of shape {listed.shape}: {error}") from None
    raw = _raw(tensor)
    for plane, length in zip(raw.reshape(-1, tensor.itemsize).T, listed.lengths):
        sent = _bytes(read, length) if length else b""
        if length < plane.size:
            try:
                sent = zlib.decompressobj().decompress(sent, plane.size)  # no more than it may have
            except zlib.error:
                sent = b""
        if len(sent) != plane.size:
            raise ValueError("a tensor of the state was damaged on its way")
        plane[:] = np.frombuffer(sent, np.uint8)
    if zlib.crc32(raw.data) != listed.check:
        raise ValueError("a tensor of the state was damaged on its way")
    return tensor


def _raw(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """Its bytes, in its own memory."""
    raw: npt.NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    return raw


def _shorter(plane: npt.NDArray[np.uint8]) -> memoryview:
    """A copy of the plane, by zlib where that is clearly shorter: tried on its beginning."""
    whole = plane.tobytes()
    trial = whole[:TRIAL]
    if len(zlib.compress(trial, 1)) > WORTH * len(trial):
        return memoryview(whole)
    short = zlib.compress(whole, 1)
    return memoryview(short if len(short) < len(whole) else whole)


def nbytes(state: object) -> int:
    """What its tensors take."""
    tensors: list[Tensor] = []
    _encode(state, tensors, "state")
    return sum(tensor.nbytes for tensor in tensors)


def _bytes(read: Callable[[memoryview], None], length: int) -> bytes:
    buffer = bytearray(length)
    read(memoryview(buffer))
    return bytes(buffer)


def _encode(value: object, tensors: list[Tensor], place: str) -> dict[str, object]:
    """One entry, named by its kind. Tensors go into the list."""
    if isinstance(value, Tensor):
        if str(value.dtype).removeprefix("torch.") not in DTYPES:
            raise UsageError(f"{place} is of type {value.dtype}, which a newcomer cannot be sent")
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, Mapping):
        wrong = next((key for key in value if not isinstance(key, (str, int))), None)
        if wrong is not None:
            raise UsageError(f"{place} has the key {wrong!r}: a newcomer can be sent texts and whole numbers as keys")
        return {"table": [[key, _encode(one, tensors, f"{place}[{key!r}]")] for key, one in value.items()]}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_encode(one, tensors, f"{place}[{i}]") for i, one in enumerate(value)]}
    if value is None or isinstance(value, (str, int, float, bool)):
        return {"value": value}
    raise UsageError(f"{place} is a {type(value).__name__}: a newcomer can be sent tensors, texts, numbers, and tables")


def _decode(entry: Mapping[str, object], tensors: list[Tensor]) -> object:
    ((kind, value),) = entry.items()
    if kind == "tensor":
        assert isinstance(value, int)
        return tensors[value]
    if kind == "value":
        return value
    assert isinstance(value, list)
    if kind == "table":
        return {key: _decode(one, tensors) for key, one in value}
    parts = [_decode(one, tensors) for one in value]
    return parts if kind == "list" else tuple(parts)
