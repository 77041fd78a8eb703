"""Do all ranks mean the same? Asked once, when an adapter is attached: later a difference would hang or corrupt."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

from thinwire.collectives.groups import Group, without_meter, world
from thinwire.distributed.values import gather_json
from thinwire.errors import UsageError


def describe(value: object, name: str) -> dict[str, str]:
    """A configuration as flat {dotted field: text}.

    value: a dataclass, whose fields are followed, or anything else. name: what the first field is called.
    """
    if is_dataclass(value) and not isinstance(value, type):
        out = {name: type(value).__name__}
        for field in fields(value):
            out |= describe(getattr(value, field.name), f"{name}.{field.name}")
        return out
    return {name: repr(value)}


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
                raise UsageError(f"{what}: rank {rank} differs from rank 0 in {name}: {_short(b)} against {_short(a)}")


def _short(text: str) -> str:
    return text if len(text) < 80 else f"{text[:60]} … ({len(text)} characters)"
