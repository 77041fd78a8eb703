"""State as bytes without pickles: a JSON header that says what is where, then the tensors' raw bytes.

    "thinwire" | header's length, 8 bytes | header | tensors, one after the other

The header has the tree (tables, lists, texts, numbers) with tensors by number, and of every tensor type, shape and
checksum. Nothing in it is executed, and sizes are checked before anything is allocated.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Mapping

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
Plain = str | int | float | bool | None


def pack(state: object) -> list[memoryview]:
    """The pieces of a message that holds a state: tables, lists, texts, numbers, and tensors, which are copied."""
    tensors: list[Tensor] = []
    tree = _encode(state, tensors, "state")
    held = [tensor.detach().cpu().contiguous().clone() for tensor in tensors]
    views = [tensor.reshape(-1).view(torch.uint8).numpy().data for tensor in held]
    about = [
        [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), zlib.crc32(view)]
        for tensor, view in zip(held, views)
    ]
    header = json.dumps({"tree": tree, "tensors": about}).encode()
    start = MAGIC + len(header).to_bytes(8, "little") + header
    return [memoryview(start), *(view for view in views if view.nbytes)]


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
        shapes = [(DTYPES[str(kind)], [int(n) for n in shape], int(check)) for kind, shape, check in header["tensors"]]
        tree = header["tree"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"a header that is no state's: {error}") from None
    total = sum(math.prod(shape) * dtype.itemsize for dtype, shape, _ in shapes)
    if any(n < 0 for _, shape, _ in shapes for n in shape) or total > limit:
        raise ValueError(f"a state of {total} bytes is announced, and at most {limit} are expected")
    tensors = []
    for dtype, shape, check in shapes:
        tensor = torch.empty(shape, dtype=dtype)
        view = tensor.reshape(-1).view(torch.uint8).numpy().data
        if view.nbytes:
            read(view)
        if zlib.crc32(view) != check:
            raise ValueError("a tensor of the state was damaged on its way")
        tensors.append(tensor)
    return _decode(tree, tensors)


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
