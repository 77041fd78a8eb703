"""Checkpoints of torch.distributed.checkpoint, read without running what a stranger wrote, and checked for damage.

Reading. torch's `.metadata` is a pickle, and a pickle can call anything. Here it is read by an unpickler that knows
only what such a file needs: the classes of torch's metadata, types and plain containers. Anything else is refused in
one line.

Checking. Beside the files of a checkpoint stands one list of checksums per writing rank,
`checksums-<rank>of<ranks>.json` (file → BLAKE2b), written last. `find_damage` says what is missing, left over or
changed before anything is loaded. A checksum finds accidents. It is no signature: whoever can write the files can write
the list.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from thinwire.errors import UsageError

METADATA = ".metadata"
LIST = re.compile(r"checksums-(\d+)of(\d+)\.json")
CLASSES = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("torch", "device"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"), ("pathlib", "PurePosixPath"), ("pathlib", "WindowsPath"), ("pathlib._local", "PosixPath"),
}  # fmt: skip


class CheckpointReader(dcp.FileSystemReader):
    """torch's reader of a checkpoint's folder, whose metadata is read by an unpickler that knows metadata only."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata of the checkpoint. UsageError where it holds anything else, or names files elsewhere."""
        path = Path(self.path) / METADATA
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file, path).load()
        if not isinstance(metadata, Metadata):
            raise UsageError(f"{path} holds no checkpoint's metadata")
        for place in (metadata.storage_data or {}).values():
            if Path(place.relative_path).name != place.relative_path:
                raise UsageError(f"{path} names a file outside of the checkpoint: {place.relative_path!r}")
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(file)
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in CLASSES:
            return super().find_class(module, name)
        raise UsageError(
            f"{self.path} asks for {module}.{name}, which no checkpoint needs: it may run code, and is not read"
        )


def write_checksums(folder: Path, files: Iterable[Path], rank: int, ranks: int) -> None:
    """List the checksums of `files`, those that this one of so many ranks has written into the folder."""
    listed = {file.name: _checksum(file) for file in files}
    target = folder / f"checksums-{rank}of{ranks}.json"
    target.write_text(json.dumps(listed, indent=1) + "\n")


def lists_of(folder: Path) -> list[Path]:
    """The checkpoint's lists of checksums, one per rank that wrote it; none in a version before 0.2."""
    return sorted(file for file in folder.iterdir() if LIST.fullmatch(file.name))


def find_damage(folder: Path, part: int = 0, parts: int = 1) -> str | None:
    """What is wrong with the checkpoint in the folder; None where nothing is.

    part, parts: of several processes that look together, each compares the contents of every `parts`-th file only.
    A checkpoint without any list is not compared: whoever takes it says so.
    """
    listed: dict[str, str] = {}
    lists = lists_of(folder)
    if not lists:
        return None
    ranks = {int(_named(file)[2]) for file in lists}
    if len(ranks) != 1 or len(lists) != ranks.pop():
        return f"{len(lists)} lists of checksums, which is not one per rank"
    for file in lists:
        try:
            listed |= {str(name): str(value) for name, value in json.loads(file.read_text()).items()}
        except (OSError, ValueError, AttributeError) as error:
            return f"{file.name} cannot be read ({error})"
    there = {file.name for file in folder.iterdir() if file.is_file() and not LIST.fullmatch(file.name)}
    if there != listed.keys():
        odd = sorted(there ^ listed.keys())[0]
        return f"{odd} is {'missing' if odd in listed else 'on no list'}"
    for name in sorted(listed)[part::parts]:
        if _checksum(folder / name) != listed[name]:
            return f"{name} has changed since it was written"
    return None


def _named(file: Path) -> re.Match[str]:
    match = LIST.fullmatch(file.name)
    assert match is not None, file
    return match


def _checksum(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
