"""Where documents come from: text files, JSONL, data sets on disk, or the source of Python's own library.

The order is fixed by file names, so every rank and every run reads the same documents in the same order.
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.errors import UsageError
from thinwire.train.config.sections import DataConfig
from thinwire.train.data.tokenizer import Coded, Tokenizer, Turns

MARKS = ("dataset_info.json", "dataset_dict.json")  # of a data set on disk
JSON_LINES = (".jsonl", ".ndjson")
LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}  # of Python's library


@dataclass(frozen=True)
class Document:
    """A text, or chat turns, and where it stands (for error lines)."""

    where: str
    text: str | None = None
    turns: Turns = ()

    def coded(self, tokenizer: Tokenizer) -> Coded:
        """Its tokens and where loss is taken; a mistake in it names the place."""
        try:
            for text in (self.text or "", *(turn["content"] for turn in self.turns)):
                text.encode()  # JSON can hold half a surrogate pair, which is no text
            return tokenizer.chat(self.turns) if self.text is None else tokenizer.text(self.text)
        except UnicodeEncodeError as error:
            raise UsageError(f"{self.where}: not Unicode text (character {error.start})") from None
        except UsageError as error:
            raise UsageError(f"{self.where}: {error}") from None


def read_documents(config: DataConfig) -> Iterator[Document]:
    """Every document of `[data] paths`, in order; without paths, of Python's standard library."""
    if not config.paths:
        yield from _standard_library(config.corpus_bytes)
    for name in config.paths:
        path = Path(name)
        if not path.exists():
            raise UsageError(f"[data] paths = {name!r}: no such file or folder")
        if is_data_set(path, config.format):
            for where, row in data_set_rows(path):
                yield _record(where, row, config)
            continue
        for file in files_of(path):
            yield from _file(file, config)


def files_of(path: Path) -> list[Path]:
    """A file itself; of a folder every file below it, sorted, but those whose name (or folder's) begins with a dot."""
    if path.is_file():
        return [path]
    names = []
    for parent, inner, files in os.walk(path, onerror=_unreadable, followlinks=True):
        inner[:] = [name for name in inner if not name.startswith(".")]
        names += [(Path(parent) / name).relative_to(path).as_posix() for name in files if not name.startswith(".")]
    names.sort()
    if not names:
        raise UsageError(f"[data] paths = {str(path)!r}: the folder holds no file")
    return [path / name for name in names]


def _unreadable(error: OSError) -> None:
    """A folder that cannot be read is not passed over: its samples would be missing without a word."""
    raise UsageError(f"cannot read {error.filename}: {error.strerror}") from None


def _file(file: Path, config: DataConfig) -> Iterator[Document]:
    if config.format == "jsonl" or (config.format == "auto" and file.suffix in JSON_LINES):
        for where, record in json_lines(file):
            yield _record(where, record, config)
    elif text := text_of(file):
        yield Document(str(file), text)


def text_of(file: Path) -> str:
    """The whole file; UsageError where it is no UTF-8 text."""
    try:
        return file.read_bytes().decode()  # not read_text: line ends are content
    except UnicodeDecodeError as error:
        raise UsageError(f"{file}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from None


def json_lines(file: Path) -> Iterator[tuple[str, Any]]:
    """Every record of a JSONL file, with its place; empty lines are left out."""
    for number, line in enumerate(text_of(file).split("\n"), start=1):
        where = f"{file}:{number}"
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise UsageError(f"{where}: not JSON: {error.msg}") from None
        yield where, record


def _record(where: str, record: Any, config: DataConfig) -> Document:
    """A JSONL record or a row of a data set: its text field, or its chat turns."""
    if not isinstance(record, Mapping):
        raise UsageError(f"{where}: must be an object with {config.field!r} or {config.chat_field!r}")
    if isinstance(record.get(config.field), str):
        return Document(where, record[config.field])
    turns = record.get(config.chat_field)
    if turns is None:
        have = ", ".join(map(repr, record)) or "nothing"
        raise UsageError(f"{where}: neither text {config.field!r} nor turns {config.chat_field!r}; it has {have}")
    if not isinstance(turns, list) or not turns or not all(_is_turn(turn) for turn in turns):
        raise UsageError(f'{where}: {config.chat_field!r} must be a list of {{"role": "…", "content": "…"}}')
    return Document(where, turns=turns)


def _is_turn(turn: Any) -> bool:
    return isinstance(turn, Mapping) and all(isinstance(turn.get(name), str) for name in ("role", "content"))


def is_data_set(path: Path, how: str) -> bool:
    """Is it a folder that Hugging Face's `save_to_disk` wrote, or said to be one? how: `[data] format`."""
    return how == "datasets" or (how == "auto" and any((path / mark).exists() for mark in MARKS))


def data_set_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The rows of a folder that Hugging Face's `save_to_disk` wrote, with their places; of several splits, train's.
    The numbers of a column of class labels are given as their names."""
    if not any((path / mark).exists() for mark in MARKS):
        raise UsageError(f"{path}: nothing that save_to_disk of datasets wrote; scripts of data sets are not run")
    try:
        import datasets
    except ImportError:
        raise UsageError(f"{path}: a data set of Hugging Face; needs the package datasets, or JSONL instead") from None
    try:
        rows = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: not a data set on disk: {error}") from None
    if isinstance(rows, Mapping):
        if "train" not in rows:
            raise UsageError(f"{path}: no split named train; it has {', '.join(rows)}")
        rows = rows["train"]
    named = {name: about.names for name, about in rows.features.items() if hasattr(about, "names")}
    for number, row in enumerate(rows):
        said = {name: names[row[name]] for name, names in named.items() if row[name] in range(len(names))}
        yield f"{path}:{number}", {**row, **said}


def _standard_library(limit: int) -> Iterator[Document]:
    """The .py files of Python's library, sorted by name, until `limit` bytes; tests and installed packages left out."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    names = []
    for parent, inner, files in os.walk(folder, onerror=_unreadable):
        inner[:] = sorted(set(inner) - LEFT_OUT)  # not even looked into: installed packages can be many
        names += [(Path(parent) / file).relative_to(folder).as_posix() for file in files if file.endswith(".py")]
    for name in sorted(names):
        source = (folder / name).read_bytes()[:limit]
        limit -= len(source)
        if source:
            yield Document(name, source.decode(errors="replace"))
        if limit <= 0:
            return
