"""Labelled texts for classification: rows of TSV, CSV and JSONL files and of data sets on disk."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.errors import UsageError
from thinwire.train.config.sections import DataConfig
from thinwire.train.config.task import TABLES
from thinwire.train.data.documents import JSON_LINES, data_set_rows, files_of, is_data_set, json_lines, text_of

Row = tuple[str, Any]  # where it stands, and its values by column


@dataclass(frozen=True)
class Record:
    """One text or two, their label, and where they stand (for error lines)."""

    where: str
    texts: tuple[str, ...]
    label: str


def read_records(config: DataConfig) -> Iterator[Record]:
    """Every record of `[data] paths`, in order."""
    for name in config.paths:
        path = Path(name)
        if not path.exists():
            raise UsageError(f"[data] paths = {name!r}: no such file or folder")
        if is_data_set(path, config.format):
            yield from (_record(where, row, config) for where, row in data_set_rows(path))
            continue
        for file in files_of(path):
            yield from (_record(where, row, config) for where, row in _rows(file, config))


def columns_of(config: DataConfig) -> tuple[str | int, ...]:
    """The columns of the texts: `[data] columns`, or `field`."""
    return config.columns or (config.field,)


def _rows(file: Path, config: DataConfig) -> Iterator[Row]:
    form = config.format
    if form == "auto":
        form = "jsonl" if file.suffix in JSON_LINES else file.suffix.removeprefix(".")
    if form == "jsonl":
        return json_lines(file)
    if form not in TABLES:
        raise UsageError(f"{file}: tsv, csv or jsonl? its suffix does not say; give [data] format")
    return _table(file, form, by_number=isinstance(columns_of(config)[0], int))


def _table(file: Path, form: str, by_number: bool) -> Iterator[Row]:
    """Rows of a table: by the names of its first line, or by number where it has no such line.

    A TSV has one row per line and no quotes, as GLUE's files; a CSV has quotes. A byte order mark, with which
    spreadsheets begin, is no part of the first name.
    """
    text = text_of(file).removeprefix("\ufeff")
    if form == "tsv":
        lines: Any = (line.removesuffix("\r").split("\t") for line in text.split("\n") if line.strip())
    else:
        lines = (row for row in csv.reader(io.StringIO(text, newline="")) if row)
    names: Sequence[str] | None = None
    try:
        for number, row in enumerate(lines, start=1):
            if names is None and not by_number:
                names = row
                continue
            if names is not None and len(row) != len(names):
                raise UsageError(f"{file}: row {number} has {len(row)} values, the first line has {len(names)} names")
            yield f"{file}: row {number}", dict(enumerate(row)) if names is None else dict(zip(names, row))
    except csv.Error as error:
        raise UsageError(f"{file}: not CSV: {error}") from None


def _record(where: str, row: Any, config: DataConfig) -> Record:
    columns = columns_of(config)
    if not isinstance(row, Mapping):
        raise UsageError(f"{where}: must be an object with {', '.join(map(repr, (*columns, config.label)))}")
    for column in (*columns, config.label):
        if column not in row:
            have = ", ".join(map(repr, row)) or "nothing"
            raise UsageError(f"{where}: no column {column!r} ([data] columns, label); it has {have}")
    texts = tuple(_text(where, column, row[column]) for column in columns)
    return Record(where, texts, _label(where, config.label, row[config.label]))


def _text(where: str, column: str | int, value: Any) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{where}: {column!r} is {value!r:.40}, and no text")
    try:
        value.encode()  # JSON can hold half a surrogate pair, which is no text
    except UnicodeEncodeError as error:
        raise UsageError(f"{where}: not Unicode text (character {error.start})") from None
    return value


def _label(where: str, column: str | int, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, (str, int)) or value == "":
        raise UsageError(f"{where}: the label {column!r} is {value!r:.40}: allowed is a text or a whole number")
    return str(value)
