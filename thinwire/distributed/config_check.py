"""Do all ranks mean the same? Asked once, when an adapter is attached: later a difference would hang or corrupt."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

from thinwire.codecs.base import Codec
from thinwire.collectives.groups import Group, without_meter, world
from thinwire.distributed.values import gather_json
from thinwire.errors import UsageError

REVISION = ", revision "  # behind the name of a codec whose messages have meant something else before


def describe(value: object, name: str) -> dict[str, str]:
    """A configuration as flat {dotted field: text}.

    value: a dataclass, whose fields are followed, or anything else. name: what the first field is called.
    """
    behind = f"{REVISION}{value.revision}" if isinstance(value, Codec) and value.revision > 1 else ""
    if is_dataclass(value) and not isinstance(value, type):
        out = {name: f"{type(value).__name__}{behind}"}
        for field in fields(value):
            out |= describe(getattr(value, field.name), f"{name}.{field.name}")
        return out
    return {name: f"{value!r}{behind}"}


def opposed(a: str, b: str) -> tuple[str, str]:
    """Two unlike texts of one field, as an error gives them: a codec that says no revision is of its first."""
    first, second = (f"{x}{REVISION}1" if y.startswith(f"{x}{REVISION}") else x for x, y in ((a, b), (b, a)))
    return _short(first), _short(second)


def revisions(value: object, name: str) -> dict[str, int]:
    """{dotted field/codec: revision} of all codecs in a configuration; arguments as of `describe`."""
    out = {f"{name}/{type(value).__name__}": value.revision} if isinstance(value, Codec) else {}
    if is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            out |= revisions(getattr(value, field.name), f"{name}.{field.name}")
    return out


def check_agreement(what: str, mine: dict[str, str], group: Group) -> None:
    """All ranks of the group give the same fields, or all raise one UsageError that names rank, field and both values.

    what: the adapter, named in the error. mine: this rank's {field: text}, as `describe` gives it.
    """
    size, _ = world(group)
    if size == 1:
        return
    everyone: list[dict[str, str]] = [dict(said) for said in gather_json(mine, without_meter(group))]
    first = everyone[0]
    for rank, other in enumerate(everyone):
        for name in [*first, *(n for n in other if n not in first)]:
            a, b = first.get(name, "nothing"), other.get(name, "nothing")
            if a != b:
                a, b = opposed(a, b)
                raise UsageError(f"{what}: rank {rank} differs from rank 0 in {name}: {b} against {a}")


def _short(text: str) -> str:
    return text if len(text) < 80 else f"{text[:60]} … ({len(text)} characters)"
