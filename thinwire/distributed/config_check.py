"""Do all ranks mean the same? Asked once, when an adapter is attached: later a difference would hang or corrupt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.collectives.groups import world
from thinwire.errors import UsageError


def describe(value: Any, name: str) -> dict[str, str]:
    """A configuration as flat {dotted field: text}."""
    if is_dataclass(value) and not isinstance(value, type):
        out = {name: type(value).__name__}
        for field in fields(value):
            out |= describe(getattr(value, field.name), f"{name}.{field.name}")
        return out
    return {name: repr(value)}


def by_name(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, nn.Parameter]:
    """Of model.named_parameters(), or a list like it, those that train; names key the state, so each is one's own."""
    out: dict[str, nn.Parameter] = {}
    for one in named_parameters:
        if not isinstance(one, tuple) or len(one) != 2 or not isinstance(one[0], str):
            raise UsageError(f"pairs of a name and a parameter are wanted (model.named_parameters()), not {type(one)}")
        name, parameter = one
        if name in out:
            raise UsageError(f"two parameters are called {name!r}: names key the state")
        if parameter.requires_grad:
            out[name] = parameter
    return out


def describe_parameters(parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """Shape and type of each, as fields to agree on. What is averaged are real numbers: complex ones are refused.

    (DDP's buckets show half of a complex gradient: the other half would be averaged by nobody.)
    """
    for name, p in parameters.items():
        if not p.is_floating_point():
            hint = "; hold it as torch.view_as_real(…)" if p.is_complex() else ""
            raise UsageError(f"{name} is of {p.dtype}: allowed are real floating types{hint}")
    return {f"parameter {name}": f"{tuple(p.shape)} {p.dtype}" for name, p in parameters.items()}


def dense(name: str, gradient: Tensor) -> Tensor:
    """The gradient itself; one of rows alone, as an embedding with sparse=True gives, nothing here averages."""
    if gradient.layout != torch.strided:
        raise UsageError(f"{name} has a gradient of {gradient.layout}: only dense ones are averaged (sparse=False)")
    return gradient


def check_agreement(what: str, mine: dict[str, str], group: Any) -> None:
    """All ranks of the group give the same fields, or all raise one error that names rank, field and both values."""
    size, _ = world(group)
    if size == 1:
        return
    everyone: list[dict[str, str]] = [{} for _ in range(size)]
    dist.all_gather_object(everyone, mine, group=group)
    first = everyone[0]
    for rank, other in enumerate(everyone):
        for name in [*first, *(n for n in other if n not in first)]:
            a, b = first.get(name, "nothing"), other.get(name, "nothing")
            if a != b:
                raise UsageError(f"{what}: rank {rank} differs from rank 0 in {name}: {_short(b)} against {_short(a)}")


def _short(text: str) -> str:
    return text if len(text) < 80 else f"{text[:60]} … ({len(text)} characters)"
