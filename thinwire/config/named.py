"""What names in a `[wire]` table mean: codecs, memories and collectives of their arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from thinwire import codecs, memory
from thinwire.codecs.base import Codec
from thinwire.collectives import COLLECTIVES, Collective
from thinwire.errors import UsageError
from thinwire.memory import Memory
from thinwire.registry import construct, plain_name

MEMORIES: dict[str, Callable[..., Memory]] = {
    plain_name(f.__name__): f
    for f in (
        memory.Plain, memory.FixedShift, memory.StarShift, memory.Diana, memory.RandDiana, memory.EF21,
        memory.ErrorFeedback, memory.EControl, memory.Delta,
    )
}  # fmt: skip


def make_collective(collective: str, **arguments: Any) -> Collective:
    """The collective of that name; arguments that are codecs or collectives are tables of their own."""
    built = {key: nested(value) for key, value in arguments.items()}
    return construct("collective", COLLECTIVES, collective, built)


def nested(value: Any) -> Any:
    """A codec or a collective, where the value is a table of one; else the value."""
    if not isinstance(value, Mapping):
        return value
    return make_collective(**value) if "collective" in value else codecs.make(**value)


def make_memory(given: str | Mapping[str, Any]) -> Memory:
    """A memory from its name, or from a table {"memory": name, …}."""
    if not isinstance(given, (str, Mapping)):
        raise UsageError(f"memory = {given!r}: must be a name or a table")
    table = {"memory": given} if isinstance(given, str) else dict(given)
    built = {key: nested(value) for key, value in table.items() if key != "memory"}
    return construct("memory", MEMORIES, table.get("memory"), built)


def read_table(section: str, given: Any, wanted: str, needed: bool = True) -> dict[str, Any]:
    """A section's table, to take from. wanted: the key that names what it is. needed: must it be there?"""
    if not isinstance(given, Mapping):
        more = hint(given) if wanted == "collective" else ""
        raise UsageError(f"[wire] {section} = {given!r}: must be a {wanted}, a pair with its memory, or a table{more}")
    if given and needed and not isinstance(given.get(wanted), str):
        raise UsageError(f"[wire.{section}] {wanted}: its name is needed")
    return dict(given)


def build_named(section: str, build: Callable[[], Any]) -> Any:
    """What `build` makes; its errors name the section."""
    try:
        return build()
    except UsageError as error:
        raise UsageError(f"[wire.{section}] {error}") from error


def hint(given: Any) -> str:
    """The end of an error where a codec is given and a collective is needed."""
    return "; collectives.TwoHop(codec) makes a collective of a codec" if isinstance(given, Codec) else ""
