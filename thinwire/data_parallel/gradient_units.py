"""Fixed pieces of a model's gradients: whole parameters in declaration order, cut at about 25 MB.

State is keyed by parameter name and units never change with DDP's buckets, which are rebuilt after the first step.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from thinwire.config.wire import Reduction

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Unit:
    """Some parameters that are exchanged together, flattened one after the other.

    parameters: their names. shapes: theirs, in the same order. exact: never compressed.
    """

    parameters: tuple[str, ...]
    shapes: tuple[Shape, ...]
    exact: bool = False

    @cached_property
    def name(self) -> str:
        """Stable while its parameters are: the key of its state."""
        kind = "exact" if self.exact else "unit"
        return f"{kind} {self.parameters[0]}…{self.parameters[-1]}, {self.numel}"

    @cached_property
    def numel(self) -> int:
        """How many values it holds."""
        return sum(map(math.prod, self.shapes))

    def spans(self) -> list[tuple[str, slice, Shape]]:
        """(parameter, its place in the flat unit, its shape)."""
        ends = list(accumulate(map(math.prod, self.shapes), initial=0))
        return [(p, slice(a, b), s) for p, a, b, s in zip(self.parameters, ends, ends[1:], self.shapes)]


def make_units(shapes: Mapping[str, Shape], reduction: Reduction) -> list[Unit]:
    """Every parameter in one unit, compressed ones and exact ones apart, in the order in which their first parameters
    are declared: backward completes a unit with its first one, and units are sent last first.

    shapes: of the parameters, by name. reduction: says which are exact, and how large a unit may be (unit_mb, in
    megabytes of float32).
    """
    units = []
    for exact in (False, True):
        names: list[str] = []
        size = 0
        for name, shape in shapes.items():
            if is_exact(name, shape, reduction) is not exact:
                continue
            nbytes = 4 * math.prod(shape)
            if names and size + nbytes > reduction.unit_mb * 1e6:
                units.append(Unit(tuple(names), tuple(shapes[n] for n in names), exact))
                names, size = [], 0
            names.append(name)
            size += nbytes
        if names:
            units.append(Unit(tuple(names), tuple(shapes[n] for n in names), exact))
    declared = {name: place for place, name in enumerate(shapes)}
    return sorted(units, key=lambda unit: declared[unit.parameters[0]])


def is_exact(name: str, shape: Shape, reduction: Reduction) -> bool:
    """Is a parameter of that name and shape excluded, by name or by dimension, or is nothing compressed at all?"""
    excluded = any(fnmatch.fnmatchcase(name, pattern) for pattern in reduction.exclude)
    return reduction.is_exact or excluded or len(shape) <= reduction.exact_dims
