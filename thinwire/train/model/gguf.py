"""`[model] path` may be a GGUF file: transformers reads it once, and the model is kept as a plain folder of the run.

GGUF stores no checksum. So its header is checked here before a reader follows its lengths, every weight of the model
must be in the file, and the folder is named by the file's own checksum: another file is never taken for this one.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from thinwire.errors import UsageError
from thinwire.installed import check_installed
from thinwire.train.config.families import names_for

MAGIC, VERSIONS = b"GGUF", (2, 3)
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of a value, by its type
TEXT, ARRAY = 8, 9
DENSEST = 8  # no format stores more values in a byte
FOLDER = "converted"  # in [run] out


def is_gguf(path: str | None) -> bool:
    """Is `[model] path` a file in this format, by name or by content?"""
    if path is None or not Path(path).is_file():
        return False
    if path.lower().endswith(".gguf"):
        return True
    with open(path, "rb") as file:
        return file.read(4) == MAGIC


def as_folder(path: str, out: str, say: Callable[[str], None]) -> str:
    """The model in the GGUF file `path` as a folder with safetensors; made where `[run] out` has none of this file.

    Ranks of one machine may call it at once: one converts, the others wait. say: called with a line for the user.
    """
    check_installed(f"{path}: a GGUF file", ("gguf",), "gguf")
    check_header(path)
    kept = Path(out) / FOLDER
    kept.mkdir(parents=True, exist_ok=True)
    target = kept / f"{Path(path).stem}-{_checksum(path)}"
    with (kept / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            say(f"{path}: a GGUF file, converted once to {target}")
            partial = target.with_name(target.name + ".partial")
            shutil.rmtree(partial, ignore_errors=True)  # of a conversion that was killed
            _convert(Path(path), partial)
            os.rename(partial, target)
    return str(target)


def _checksum(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _convert(path: Path, target: Path) -> None:
    """Through transformers, into float32."""
    read, tokenizer, lacking = _read(path)
    wrong = [f"{what.replace('_', ' ')}: {sorted(map(str, names))[0]}" for what, names in lacking.items() if names]
    if wrong:
        raise UsageError(f"{path}: the GGUF file is not the whole model ({wrong[0]})")
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = type(read)(config)  # a model that was read quantised cannot be saved as it is
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _read(path: Path) -> tuple[Any, Any, dict[str, Any]]:
    """Model, tokenizer, and which weights the file lacks; what is wrong with it is one line."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    models: Any = AutoModelForCausalLM
    given: Any = {"gguf_file": path.name, "local_files_only": True}
    try:
        kind = AutoConfig.from_pretrained(path.parent, **given).model_type
        if kind not in names_for("causal"):
            raise UsageError(f"{path}: model_type {kind!r} cannot be cut; allowed are {', '.join(names_for('causal'))}")
        read, lacking = models.from_pretrained(path.parent, output_loading_info=True, dtype="float32", **given)
        return read, AutoTokenizer.from_pretrained(path.parent, **given), lacking
    except (UsageError, MemoryError):
        raise
    except Exception as error:  # whatever the readers of a foreign format trip over is a fault of the file
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(f"{path}: transformers cannot read this GGUF file: {line}") from error


def check_header(path: str | Path) -> None:
    """UsageError where the header's counts, lengths and places do not fit into the file: a reader that believed them
    would run on for hours, or out of memory."""
    with open(path, "rb") as file:
        header = _Header(file, os.fstat(file.fileno()).st_size)
        try:
            header.check()
        except (ValueError, struct.error) as error:
            raise UsageError(f"{path}: not a sound GGUF file: {error} (byte {file.tell()})") from None


class _Header:
    """The header of an open file of `size` bytes, walked through."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file = file
        self.size = size

    def check(self) -> None:
        if self._take(4) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._number(4)
        if version not in VERSIONS:
            raise ValueError(f"version {version}; known are {', '.join(map(str, VERSIONS))}")
        tensors, values = self._number(8), self._number(8)
        names = [self._value_named() for _ in range(self._count(values, 13))]
        places = [self._tensor() for _ in range(self._count(tensors, 25))]
        for what, found in (("value", names), ("tensor", [name for name, _ in places])):
            if len({*found}) < len(found):
                raise ValueError(f"a {what} occurs twice")
        room = self.size - self.file.tell()
        if any(offset + least > room for _, (offset, least) in places):
            raise ValueError("a tensor lies behind the end of the file")

    def _value_named(self) -> bytes:
        name = self._text()
        self._skip_value(self._number(4))
        return name

    def _skip_value(self, kind: int) -> None:
        if kind == TEXT:
            self._text()
        elif kind == ARRAY:
            inner, count = self._number(4), self._number(8)
            if inner in SIZES:
                self._take(self._count(count, SIZES[inner]) * SIZES[inner])
            elif inner == TEXT:
                for _ in range(self._count(count, 8)):
                    self._text()
            else:
                raise ValueError(f"an array of type {inner}")
        elif kind in SIZES:
            self._take(SIZES[kind])
        else:
            raise ValueError(f"a value of type {kind}")

    def _tensor(self) -> tuple[bytes, tuple[int, int]]:
        """Its name, its place, and how many bytes it takes at least."""
        name = self._text()
        numel = 1
        for _ in range(self._count(self._number(4), 8, most=4)):
            numel *= self._number(8)
        self._number(4)
        return name, (self._number(8), numel // DENSEST)

    def _text(self) -> bytes:
        text = self._take(self._count(self._number(8), 1))
        text.decode()  # a UnicodeDecodeError is a ValueError
        return text

    def _count(self, count: int, least: int, most: int | None = None) -> int:
        """A count of things of at least so many bytes each, which must fit into the rest of the file."""
        if count * least > self.size - self.file.tell() or (most is not None and count > most):
            raise ValueError(f"{count} entries do not fit")
        return count

    def _number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _take(self, size: int) -> bytes:
        taken = self.file.read(size)
        if len(taken) < size:
            raise ValueError("it ends too early")
        return taken
