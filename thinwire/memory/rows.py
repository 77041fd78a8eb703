"""A message whose rows have a key each: a sample's activation, coded against what both ends remember of that sample.

    body = the warm rows, changes against their mirrors | the cold rows, by the cold codec | bitmap of the warm rows

Rows of a whole number of coding blocks go through one kernel call a group, others one by one; either way a row's
values do not depend on its neighbours, since no block reaches over a row's end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from thinwire.codecs import frame as framing
from thinwire.codecs.base import Codec, is_finite
from thinwire.memory.store import Key
from thinwire.memory.visit import EXACT, Visits

SeedOf = Callable[[Key], int]


class Rows:
    """The per-row form of `Visits`, on the same state."""

    def __init__(self, visits: Visits) -> None:
        self.visits = visits

    def encode(
        self, keys: Sequence[Key], x: Tensor, seed_of: SeedOf, into: Tensor, later: bool = False
    ) -> Tensor | bool:
        """x: float[rows, …] → its body in `into`, uint8[nbytes], and whether all is finite; see Visits.encode."""
        shape, warm = tuple(x.shape[1:]), self.warm(keys, tuple(x.shape[1:]))
        groups = list(_groups(warm))
        alone = not all(self._together(flag, shape) for flag, _ in groups)
        if alone and not later and not bool(is_finite(x)):
            return False
        mirrors, flags, place = [], [], 0
        for flag, at in groups:
            part, named = (x if len(at) == len(keys) else x[at]), [keys[i] for i in at]
            if not self._together(flag, shape):
                for key, row, size in zip(named, part, self._row_bytes(flag, named, shape, x.dtype, seed_of)):
                    with _aligned(into[place : place + size]) as room:
                        flags.append(self.visits.encode(key, row, seed_of(key), room, later)[1])
                    place += size
                continue
            size = self._group_bytes(flag, named, shape, x.dtype, seed_of)
            with _aligned(into[place : place + size]) as room:
                new, good = self._encode_group(flag, named, part, seed_of(named[0]), room, later)
            place += size
            mirrors.append((named, part, new, flag))
            flags.append(good)
        finite = _all(flags)
        for named, part, new, flag in mirrors if later or finite else ():
            self._keep(named, new, flag)
            self.visits.measure(part, new)
        framing.write_warm(warm, into)
        return finite

    def decode(
        self, keys: Sequence[Key], body: Tensor, shape: tuple[int, ...], dtype: torch.dtype, seed_of: SeedOf,
        later: bool = False,
    ) -> tuple[Tensor, Tensor | bool]:  # fmt: skip
        """(float[rows, …], is it what was expected). Anything unexpected raises ValueError before the state is touched;
        `later`: a bitmap of other rows than those this end holds is for whoever reads the flag."""
        row = shape[1:]
        good: Tensor | bool = True
        if later:
            warm = self.warm(keys, row)
            good, rest = framing.warm_as(body, warm)
        else:
            warm, rest = framing.warm_rows(body, len(keys))
        groups = list(_groups(warm))
        sizes = [self._group_bytes(flag, [keys[i] for i in at], row, dtype, seed_of) for flag, at in groups]
        if sum(sizes) != rest.numel():
            raise ValueError(f"rows of {rest.numel()} bytes arrived, {sum(sizes)} were expected")
        absent = [k for k, w, have in zip(keys, warm, self.warm(keys, row)) if w and not have]
        if absent and self.visits.memory.cold_start:
            raise ValueError(f"a change for {absent[0]!r} arrived, but this end remembers no such sample")
        out = torch.zeros(shape, dtype=dtype, device=body.device) if len(groups) != 1 else None
        for (flag, at), part in zip(groups, rest.split(sizes)):
            y = self._decode_group(flag, [keys[i] for i in at], part, row, dtype, seed_of)
            if out is None:
                return y, good
            out[at] = y
        assert out is not None
        return out, good

    def nbytes(
        self, keys: Sequence[Key], shape: tuple[int, ...], dtype: torch.dtype, seed_of: SeedOf, warm: list[bool] | None
    ) -> int:
        """Exactly how long a body of rows of that shape is; `warm` as this end sees it unless given."""
        flags = self.warm(keys, shape) if warm is None else warm
        parts = [self._group_bytes(f, [keys[i] for i in at], shape, dtype, seed_of) for f, at in _groups(flags)]
        return framing.bitmap_bytes(len(keys)) + sum(parts)

    def warm(self, keys: Sequence[Key], shape: tuple[int, ...]) -> list[bool]:
        """Which keys this end holds a mirror of that shape for."""
        return [self.visits.is_warm(key, shape) for key in keys]

    def _codec(self, warm: bool) -> Codec:
        memory = self.visits.memory
        return (memory.cold or EXACT) if memory.cold_start and not warm else self.visits.codec

    def _together(self, warm: bool, shape: tuple[int, ...]) -> bool:
        """May these rows be coded in one call? A memory with a cold start, and rows of whole blocks."""
        codec = self._codec(warm)
        if not self.visits.memory.cold_start or codec.span is None or not math.prod(shape):
            return False
        return math.prod(shape) % (math.lcm(codec.span, codec.gate_block) if warm else codec.span) == 0

    def _group_bytes(
        self, warm: bool, keys: Sequence[Key], shape: tuple[int, ...], dtype: torch.dtype, seed_of: SeedOf
    ) -> int:
        if self._together(warm, shape):
            return self.visits.body_bytes((len(keys), *shape), dtype, 0, warm)
        if not self.visits.memory.refresh:
            return len(keys) * self.visits.body_bytes(shape, dtype, 0, warm)
        return sum(self.visits.body_bytes(shape, dtype, seed_of(key), warm) for key in keys)

    def _encode_group(
        self, warm: bool, keys: Sequence[Key], x: Tensor, seed: int, into: Tensor, later: bool
    ) -> tuple[Tensor, Tensor | bool]:
        """(new mirrors [rows, …], finite); the message goes into `into`."""
        visits, codec = self.visits, self._codec(warm)
        if not warm:
            body, flag = codec.encode_flagged(x, seed, into)
            finite = flag if later else bool(flag)
            return codec.decode(body, x.shape, x.dtype, seed) if later or finite else x, finite
        visits.memory.check(codec, x[0].numel())
        new = visits.state.empty_mirror(x.shape, x.dtype, x.device)
        _, flag = codec.encode_onto_flagged(x, self._mirrors(keys, x.device), seed, visits.memory.gate, new, into)
        return new, flag if later else bool(flag)

    def _decode_group(
        self, warm: bool, keys: Sequence[Key], body: Tensor, shape: tuple[int, ...], dtype: torch.dtype, seed_of: SeedOf
    ) -> Tensor:
        visits, codec, whole = self.visits, self._codec(warm), (len(keys), *shape)
        if not self._together(warm, shape):
            kind, parts = framing.WARM if warm else 0, body.split(self._row_bytes(warm, keys, shape, dtype, seed_of))
            rows = [visits.decode(k, kind, p, shape, dtype, seed_of(k)) for k, p in zip(keys, parts)]
            return torch.stack(rows)
        if not warm:
            y = codec.decode(body, whole, dtype, seed_of(keys[0]))
            self._keep(keys, y.clone(), warm)
            return y
        new = visits.state.empty_mirror(whole, dtype, body.device)
        y = codec.decode_onto(body, self._mirrors(keys, body.device), dtype, seed_of(keys[0]), visits.memory.gate, new)
        self._keep(keys, new, warm)
        return y

    def _row_bytes(
        self, warm: bool, keys: Sequence[Key], shape: tuple[int, ...], dtype: torch.dtype, seed_of: SeedOf
    ) -> list[int]:
        if not self.visits.memory.refresh:
            return [self.visits.body_bytes(shape, dtype, 0, warm)] * len(keys)
        return [self.visits.body_bytes(shape, dtype, seed_of(key), warm) for key in keys]

    def _mirrors(self, keys: Sequence[Key], device: torch.device) -> Tensor:
        """float[rows, …]; a file store gives them on the CPU."""
        found = [h for h in (self.visits.state.read("h", key) for key in keys) if h is not None]
        return (found[0][None] if len(found) == 1 else torch.stack(found)).to(device)

    def _keep(self, keys: Sequence[Key], new: Tensor, warm: bool) -> None:
        for key, row in zip(keys, new):
            self.visits.state.write("h", key, row)
            self.visits.stats.visit(warm)


@contextmanager
def _aligned(place: Tensor) -> Iterator[Tensor]:
    """The place itself, or one from an address that kernels can write words to, copied there afterwards."""
    if place.data_ptr() % 4 == 0:
        yield place
        return
    other = torch.empty_like(place)
    yield other
    place.copy_(other)


def _all(flags: Sequence[Tensor | bool]) -> Tensor | bool:
    tensors = [flag for flag in flags if isinstance(flag, Tensor)]
    if len(tensors) == 1:
        return tensors[0]
    return torch.stack(tensors).all() if tensors else all(flags)


def _groups(warm: Sequence[bool]) -> Iterator[tuple[bool, list[int]]]:
    """(flag, row numbers): the warm rows, then the cold ones; a group without rows is left out."""
    for flag in (True, False):
        at = [i for i, w in enumerate(warm) if w == flag]
        if at:
            yield flag, at
