"""Constructors by name, as in configuration files: {"codec": "quantize", "bits": 4} is Quantize(bits=4)."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from thinwire.errors import UsageError

T = TypeVar("T")


def plain_name(name: str) -> str:
    """The name in lower case without dashes and underscores, by which constructors are matched: ok_topk is OkTopk."""
    return name.lower().replace("_", "").replace("-", "")


class Constructors(Mapping[str, Callable[..., T]]):
    """Constructors by plain name, taken from a module when they are asked for: what is not used is not imported.

    module: where they are found. names: as they are written there.
    """

    def __init__(self, module: str, names: Iterable[str]) -> None:
        self._module = module
        self._names = {plain_name(name): name for name in names}

    def __getitem__(self, plain: str) -> Callable[..., T]:
        found: Callable[..., T] = getattr(importlib.import_module(self._module), self._names[plain])
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, plain: object) -> bool:
        return plain in self._names


def construct(kind: str, registry: Mapping[str, Callable[..., T]], name: object, arguments: Mapping[str, Any]) -> T:
    """registry[name](**arguments); UsageError where the name or an argument is unknown or an argument is missing.

    kind: what is constructed, for the error, such as "codec". registry: constructors by `plain_name`.
    """
    plain = plain_name(str(name))
    if plain not in registry:
        raise UsageError(f"{kind} {name!r} is unknown: one of {', '.join(registry)}")
    allowed = inspect.signature(registry[plain]).parameters
    for key in arguments:
        if key not in allowed:
            raise UsageError(f"{plain} has no setting {key!r}: it takes {', '.join(allowed) or 'none'}")
    missing = [k for k, p in allowed.items() if p.default is p.empty and k not in arguments]
    if missing:
        raise UsageError(f"{plain} needs {', '.join(missing)}")
    return registry[plain](**arguments)
