"""A section of run.toml as a frozen dataclass: each key is declared once, with default, check and comment.

The reader, the error lines and the text of `--init` all come from that declaration.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from thinwire.errors import UsageError

Check = tuple[str, Callable[[Any], bool]]  # what is allowed, in words; whether a value is allowed
T = TypeVar("T")


def key(default: Any, check: Check, comment: str, example: Any = None) -> Any:
    """A key of a section.

    default: None means "not given"; `--init` then shows `example`, commented out.
    check: which values are allowed. comment: what the key means, for `--init`.
    """
    metadata = {"check": check, "comment": comment, "example": example}
    if isinstance(default, list):
        raise TypeError("defaults are immutable: give a tuple")
    return dataclasses.field(default=default, metadata=metadata)


def table(cls: type, comment: str) -> Mapping[str, Any]:
    """The metadata of a field that is a table inside its section, read as the dataclass `cls`; absent by default."""
    return {"table": cls, "comment": comment}


def whole(least: int) -> Check:
    """Integers from `least` on."""
    return f"a whole number, {least} or more", lambda v: type(v) is int and v >= least


def number(low: float, high: float, *, open_low: bool = False) -> Check:
    """A finite number in [low, high], or (low, high] where `open_low`."""
    words = f"a number above {low:g}" if open_low else f"a number of at least {low:g}"
    words += "" if math.isinf(high) else f" and at most {high:g}"

    def allowed(value: Any) -> bool:
        if type(value) not in (int, float) or not math.isfinite(value):
            return False
        return (low < value if open_low else low <= value) and value <= high

    return words, allowed


def one_of(*choices: Any) -> Check:
    """One of these values, of the same type."""
    return ", ".join(map(str, choices)), lambda v: any(type(v) is type(c) and v == c for c in choices)


def flag() -> Check:
    """true or false."""
    return "true or false", lambda v: isinstance(v, bool)


def text() -> Check:
    """A string that is not empty."""
    return "a text that is not empty", lambda v: isinstance(v, str) and bool(v)


def column() -> Check:
    """A column's name, or its number from 0."""
    return (
        "a column's name, or its number from 0",
        lambda v: v != "" and (isinstance(v, str) or (type(v) is int and v >= 0)),
    )


def list_of(item: Check, length: int | None = None) -> Check:
    """A list whose values all pass `item`; `length` values, or any number of them where it is None."""
    words, allowed = item
    count = f"{length} values" if length else "values"

    def check(value: Any) -> bool:
        return isinstance(value, tuple) and length in (None, len(value)) and all(map(allowed, value))

    return f"a list of {count}, each {words}", check


def read(cls: type[T], section: str, given: Any) -> T:
    """The dataclass `cls` from a TOML table; a wrong key or value is one line that names it and what is allowed."""
    if not isinstance(given, Mapping):
        raise UsageError(f"{section} = {given!r}: must be a table, [{section}]")
    known = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    values = {}
    for name, value in given.items():
        if name not in known:
            raise UsageError(f"[{section}] {name}: no such key; allowed are {', '.join(known)}")
        inner = known[name].metadata.get("table")
        values[name] = read(inner, f"{section}.{name}", value) if inner else _checked(section, known[name], value)
    return cls(**values)


def _checked(section: str, field: dataclasses.Field[Any], value: Any) -> Any:
    words, allowed = field.metadata["check"]
    fixed: Any = tuple(value) if isinstance(value, list) else value
    if not allowed(fixed):
        raise UsageError(f"[{section}] {field.name} = {value!r}: allowed is {words}")
    return float(fixed) if isinstance(field.default, float) else fixed


def template(cls: type, section: str, start: Mapping[str, Any] = MappingProxyType({})) -> str:
    """The section as commented TOML that parses to its defaults; what is absent by default is commented out. Keys in
    `start` get that value instead."""
    lines = [f"[{section}]"]
    inner = []
    for field in dataclasses.fields(cls):
        if "table" in field.metadata:
            block = template(field.metadata["table"], f"{section}.{field.name}").splitlines()
            inner += ["", f"# {field.metadata['comment']}", *(f"# {line}" for line in block)]
            continue
        value = start.get(field.name, field.default)
        absent = value is None
        line = f"{'# ' * absent}{field.name} = {_toml(field.metadata['example'] if absent else value)}"
        lines.append(f"{line:<28} # {field.metadata['comment']}")
    return "\n".join(lines + inner) + "\n"


def _toml(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)
