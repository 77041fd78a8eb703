"""The sparse rivals of Ok-Topk, done fairly: exact selection, coded entries, no staging."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs import TopK
from thinwire.codecs.base import is_finite
from thinwire.codecs.entries import Entries
from thinwire.codecs.exact import Identity
from thinwire.collectives.base import Collective, State
from thinwire.collectives.groups import Group, world
from thinwire.collectives.messages import gather, swap
from thinwire.collectives.regions import put, region_bounds, split_and_reduce, zeros
from thinwire.collectives.sums import large_unit
from thinwire.kernels import select

EXACT = Identity()


@dataclass(frozen=True)
class _Selecting(Collective):
    """What the three have in common: how many entries, and how they are coded.

    density: k/n, the share of values that a member selects, in (0, 1]. values: how values travel, "fp32", "bf16" or
    "int8". indices: how indices travel, "int32" or "coded" (Elias–Fano or a bitmap).
    """

    density: float
    values: str = "fp32"
    indices: str = "int32"

    def __post_init__(self) -> None:
        TopK(self.density), Entries(self.values, self.indices)  # they refuse bad settings


@dataclass(frozen=True)
class TopkAllgather(_Selecting):
    """Gather(TopK) with a choice of coding, and without P dense tensors: everybody's entries to everybody.

    1. exact top-k; 2. all-gather the coded entries (one size, known); 3. add them in rank order. 2k(P−1) words.

    density: k/n, in (0, 1]. values: "fp32", "bf16" or "int8". indices: "int32" or "coded".
    """

    indices: str = "coded"

    def exchange(
        self, u: Tensor, group: Group = None, *, state: State, key: object = "", step: int = 0, seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        size, rank = world(group)
        code, flat = Entries(self.values, self.indices, later=True), u.reshape(-1)
        n = flat.numel()
        if n == 0:
            return u.clone(), u.clone()
        k = TopK(self.density).count(n)
        messages = gather(code.encode(*select.top(flat, k), n), group)
        total = zeros(n, flat)
        for wire in messages:
            select.scatter_add(total, *code.decode(wire, n, k, u.dtype))
        unit = 1.0
        if not bool(is_finite(total)):  # everybody sees the same
            total, unit = zeros(n, flat), large_unit(size)
            for index, values in (code.decode(wire, n, k, u.dtype) for wire in messages):
                select.scatter_add(total, index, values / unit)
        own = put(n, *code.decode(messages[rank], n, k, u.dtype))
        code.raise_if_damaged()
        return total.div_(size / unit).view(u.shape), own.view(u.shape)


@dataclass(frozen=True)
class TopkDSA(_Selecting):
    """SparCML's dynamic sparse all-reduce: static equal regions, no second selection.

    1. exact top-k; 2. exchange counts; 3. entries to the owner of their region, who adds them in rank order; 4. owners
    send the non-zeros of their region to all, as entries, or whole where more than a third is filled.
    4k(P−1)/P words when supports coincide, (2k+n)(P−1)/P when they fill up.

    density: k/n, in (0, 1]. values: "fp32", "bf16" or "int8". indices: "int32" or "coded".
    """

    def exchange(
        self, u: Tensor, group: Group = None, *, state: State, key: object = "", step: int = 0, seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        size, rank = world(group)
        code, flat = Entries(self.values, self.indices, later=True), u.reshape(-1)
        n, bounds = flat.numel(), region_bounds(flat.numel(), size)
        if n == 0:
            return u.clone(), u.clone()
        picked = select.top(flat, TopK(self.density).count(n))
        region, _, sent, unit = split_and_reduce(picked, bounds, 0, code, group)
        own = put(n, *sent)
        index = torch.nonzero(region).reshape(-1)
        counts = [int(c) for c in gather(torch.tensor([index.numel()], device=u.device), group)]
        full = [3 * c > b - a for c, a, b in zip(counts, bounds, bounds[1:])]
        sizes = [
            EXACT.nbytes((b - a,), u.dtype) if whole else code.nbytes(b - a, c, u.dtype)
            for whole, c, a, b in zip(full, counts, bounds, bounds[1:])
        ]
        if full[rank]:
            message, finite = EXACT.encode_flagged(region)
            code.check("cannot encode the sums of a region: they are NaN or Inf", finite)
        else:
            message = code.encode(index, region[index], region.numel())
        mean = zeros(n, flat)
        for j, wire in enumerate(swap([message] * size, sizes, group)):
            length = bounds[j + 1] - bounds[j]
            whole = EXACT.decode(wire, (length,), u.dtype) if full[j] else None
            part = whole if whole is not None else put(length, *code.decode(wire, length, counts[j], u.dtype))
            mean[bounds[j] : bounds[j + 1]] = part
        mine = slice(bounds[rank], bounds[rank + 1])
        own[mine] += mean[mine] - region  # what coding the sums changed
        own = own if unit == 1 else own * unit
        code.raise_if_damaged()
        return mean.div_(size / unit).view(u.shape), own.view(u.shape)


@dataclass(frozen=True)
class GTopk(_Selecting):
    """gTop-k: a binary tree of merges, each keeping the k largest of two, then a broadcast down the tree.

    1. exact top-k; 2. at level l rank r with bit l set sends its entries to r − 2^l, which adds them and keeps the k
    largest; 3. the root's k entries come back down the tree. What a merge rejects is taken off the merging rank's own,
    so it returns to its residual. 4k·log₂P words at the busiest ranks; any P.

    density: k/n, in (0, 1]. values: "fp32", "bf16" or "int8". indices: "int32" or "coded".
    """

    def exchange(
        self, u: Tensor, group: Group = None, *, state: State, key: object = "", step: int = 0, seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        size, rank = world(group)
        code, flat = Entries(self.values, self.indices, later=True), u.reshape(-1)
        n = flat.numel()
        if n == 0:
            return u.clone(), u.clone()
        k = TopK(self.density).count(n)
        unit = large_unit(size)  # always: nobody knows everybody's values; digits below the type's range stay with own
        index, values = select.top(flat, k)
        wire = code.encode(index, values / unit, n)
        held = code.decode(wire, n, k, u.dtype)
        own, levels = put(n, *held), [1 << level for level in range((size - 1).bit_length())]
        for level in levels:
            if rank % (2 * level) == level:
                _send(wire, rank - level, group)
                break
            if rank + level < size:
                total = _merged(held, code.decode(_receive(wire, rank + level, group), n, k, u.dtype))
                place, values = select.top(total[1], k)
                wire = code.encode(total[0][place], values, n)
                held = code.decode(wire, n, k, u.dtype)
                total[1][place] -= held[1]  # what is left was rejected, or changed by coding
                select.scatter_add(own, total[0], -total[1])
        wire = self._down(wire, levels, size, rank, group)
        mean = put(n, *code.decode(wire, n, k, u.dtype)).div_(size / unit)
        code.raise_if_damaged()
        return mean.view(u.shape), own.mul_(unit).view(u.shape)

    def _down(self, wire: Tensor, levels: list[int], size: int, rank: int, group: Group) -> Tensor:
        """The root's message, passed down the same tree."""
        for level in reversed(levels):
            if rank % (2 * level) == level:
                wire = _receive(wire, rank - level, group)
            elif rank % (2 * level) == 0 and rank + level < size:
                _send(wire, rank + level, group)
        return wire


def _merged(*parts: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Entries of several members added: (indices ascending, sums)."""
    index, place = torch.unique(torch.cat([i for i, _ in parts]), return_inverse=True)
    values = torch.cat([v for _, v in parts])
    return index, values.new_zeros(index.numel()).index_add_(0, place, values)


def _send(wire: Tensor, to: int, group: Group) -> None:
    """To one member."""
    size, _ = world(group)
    swap([wire if j == to else wire[:0] for j in range(size)], [0] * size, group)


def _receive(like: Tensor, source: int, group: Group) -> Tensor:
    """From one member, as many bytes as `like` has."""
    size, _ = world(group)
    return swap([like[:0]] * size, [like.numel() if j == source else 0 for j in range(size)], group)[source]
