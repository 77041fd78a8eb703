"""Averages of all workers at once, a row each: dense, quantised, DIANA, EF21, gTopk. Ok-Topk is in oktopk_fast.py.

Between members of a group in one process, a thread each, most of the time goes to threads that wait for each other. The
rule of a memory takes rows as it takes one tensor, so only the exchange of each collective is said anew. Means, shifts,
residuals and bytes are the collectives' (tests/test_benchmarks_oktopk.py compares both over many steps).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from thinwire.codecs import TopK
from thinwire.codecs.entries import Entries
from thinwire.collectives import Dense, Gather, GTopk, TopkAllgather
from thinwire.collectives.dense import TwoHop
from thinwire.collectives.regions import put
from thinwire.collectives.sums import large_unit
from thinwire.config.wire import Reduction, warmup_steps
from thinwire.data_parallel.gradient_units import make_units
from thinwire.kernels import select
from thinwire.kernels.random import derive

Exchange = Callable[[Tensor, int], tuple[Tensor, Tensor, list[float]]]  # rows, seed → mean, own rows, bytes


class Rows:
    """Channels of all workers: what `Workers` of oktopk_train.py does, without groups.

    size: workers. shapes: of the parameters, by name, in the order of the gradient. reduction: how. seed: the run's.
    """

    def __init__(self, size: int, shapes: dict[str, tuple[int, ...]], reduction: Reduction, seed: int) -> None:
        self.size, self.seed, self.steps = size, seed, 0
        self.memory, self.warmup = reduction.memory, warmup_steps("gradient", reduction)
        units = make_units(shapes, reduction)
        self.unit = None if units[0].exact else units[0]
        assert sum(not unit.exact for unit in units) <= 1, "the compressed part is one unit"
        collective = reduction.collective if self.unit is None else reduction.collective.for_shapes(self.unit.shapes)
        self.codec = getattr(collective, "codec", None)
        self.exchange = exchange_of(collective)
        self.e: Tensor | None = None
        self.h: Tensor | None = None
        self.center: Tensor | None = None
        self.total = [0.0] * size

    def average(self, gradients: Tensor) -> list[Tensor]:
        """The mean that every worker gets."""
        cut = 0 if self.unit is None or self.steps < self.warmup else self.unit.numel
        parts = [self._coded(gradients[:, :cut])] if cut else []
        if cut < gradients.shape[1]:
            parts.append(self._exact(gradients[:, cut:]))
        self.steps += 1
        return [parts[0] if len(parts) == 1 else torch.cat(parts)]

    def residual(self, rank: int) -> Tensor | None:
        """Before the next step."""
        return None if self.e is None else self.e[rank]

    def sent(self) -> list[float]:
        """Bytes per worker so far."""
        return self.total

    def _exact(self, rows: Tensor) -> Tensor:
        each = 2 * rows[0].nbytes * (self.size - 1) / self.size  # as a ring
        self.total = [nbytes + each for nbytes in self.total]
        return added(rows) / self.size

    def _coded(self, x: Tensor) -> Tensor:
        """The rule of memory/group_reduce.py, with a row per worker."""
        memory, seed = self.memory, derive(self.seed, self.steps, self.unit.name if self.unit else "", 0)
        mean, own, sent = self.exchange(memory.outgoing(x, self.e, self.h), seed)
        self.total = [a + b for a, b in zip(self.total, sent)]
        y = mean if self.center is None else self.center + mean
        if memory.beta is not None:
            self.e = memory.residual(x, self.e, self.h, own)
        if memory.mirrored:
            fresh = memory.refreshes(seed)
            moved = self._moved(self.h, own, x.clone() if fresh else None)
            self.center = self._moved(self.center, mean, self._exact(x) if fresh else None)
            self.h = moved
        return y

    def _moved(self, h: Tensor | None, d: Tensor, fresh: Tensor | None) -> Tensor | None:
        if fresh is not None:
            return fresh
        if self.memory.refresh:
            return h
        alpha = self.memory.alpha_for(self.codec, d.shape[-1])
        return self.memory.shifted(torch.zeros_like(d) if h is None else h, d, alpha)


def added(rows: Tensor) -> Tensor:
    """In rank order."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def exchange_of(collective: object) -> Exchange:
    """How rows are exchanged; KeyError: this collective is not one of those that are known here."""
    kinds: dict[type, Callable[..., Exchange]] = {
        Dense: lambda one: whole, Gather: gathered, TwoHop: two_hops, TopkAllgather: everybody, GTopk: tree,
    }  # fmt: skip
    return kinds[type(collective)](collective)


def is_known(reduction: Reduction) -> bool:
    """Can this be computed here?"""
    return type(reduction.collective) in (Dense, Gather, TwoHop, TopkAllgather, GTopk)


def whole(u: Tensor, seed: int) -> tuple[Tensor, Tensor, list[float]]:
    return added(u) / len(u), u, [2 * u[0].nbytes * (len(u) - 1) / len(u)] * len(u)


def gathered(collective: Gather) -> Exchange:
    codec = collective.codec

    def exchange(u: Tensor, seed: int) -> tuple[Tensor, Tensor, list[float]]:
        size, shape = len(u), u[0].shape
        coded = [codec.encode_flagged(row, derive(seed, rank))[0] for rank, row in enumerate(u)]
        own = torch.stack([codec.decode(w, shape, u.dtype, derive(seed, rank)) for rank, w in enumerate(coded)])
        return added(own) / size, own, [(size - 1) * wire.numel() for wire in coded]

    return exchange


def two_hops(collective: TwoHop) -> Exchange:
    """Chunks are whole blocks, so a codec that takes blocks one by one codes a row as it codes its chunks."""
    codec = collective.codec

    def exchange(u: Tensor, seed: int) -> tuple[Tensor, Tensor, list[float]]:
        size, n = u.shape

        def through(row: Tensor) -> Tensor:
            return codec.decode(codec.encode_flagged(row, 0)[0], row.shape, row.dtype, 0)

        own = torch.stack([through(row) for row in u])
        total = torch.zeros_like(own[0])  # as the owner begins
        for row in own:
            total += row
        mean = through(total / size)
        lengths, start = collective.lengths(n, size), 0
        error = size * mean - total
        for rank, length in enumerate(lengths):
            own[rank, start : start + length] += error[start : start + length]
            start += length
        sizes = [codec.nbytes((length,), u.dtype) for length in lengths]
        return mean, own, [sum(sizes) - sizes[rank] + (size - 1) * sizes[rank] for rank in range(size)]

    return exchange


def everybody(collective: TopkAllgather) -> Exchange:
    code = Entries(collective.values, collective.indices)

    def exchange(u: Tensor, seed: int) -> tuple[Tensor, Tensor, list[float]]:
        size, n = u.shape
        k = TopK(collective.density).count(n)
        own = torch.stack([put(n, *select.top(row, k)) for row in u])
        return added(own) / size, own, [(size - 1) * code.nbytes(n, k, u.dtype)] * size

    return exchange


def tree(collective: GTopk) -> Exchange:
    code = Entries(collective.values, collective.indices)

    def exchange(u: Tensor, seed: int) -> tuple[Tensor, Tensor, list[float]]:
        size, n = u.shape
        k, unit = TopK(collective.density).count(n), large_unit(size)
        held = [put(n, *select.top(row, k)) / unit for row in u]
        own, sent = torch.stack(held), [0] * size
        for level in [1 << level for level in range((size - 1).bit_length())]:
            for rank in range(0, size - level, 2 * level):
                sent[rank + level] += 1
                sent[rank] += 1  # on the way down
                total = held[rank] + held[rank + level]
                kept = put(n, *select.top(total, k))
                own[rank] -= total - kept
                held[rank] = kept
        mean = held[0] / (size / unit)
        return mean, own * unit, [count * code.nbytes(n, k, u.dtype) for count in sent]

    return exchange
