"""Collectives without selection: exact, by gathering coded tensors, and in two coded hops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs import Cast, Codec, Quantize
from thinwire.codecs.base import is_finite
from thinwire.collectives.base import Collective, State
from thinwire.collectives.groups import Group, world
from thinwire.collectives.messages import Swap, all_reduce_steps, gather_steps
from thinwire.collectives.sums import exact_mean_steps, large_unit
from thinwire.errors import InvalidExchange, UsageError
from thinwire.kernels.random import derive
from thinwire.steps import Steps


@dataclass(frozen=True)
class Dense(Collective):
    """The exact mean of n values, by an all-reduce. 2n(P−1)/P words."""

    fixed_sizes = True

    def steps(
        self, u: Tensor, group: Group = None, *, state: State, key: object = "", step: int = 0, seed: int = 0
    ) -> Steps[tuple[Tensor, Tensor]]:
        return (yield from exact_mean_steps(u, group)), u


@dataclass(frozen=True)
class Gather(Collective):
    """Everybody's coded tensor to everybody.

    1. encode u with this member's own seed; 2. all-gather the messages (one size, known); 3. decode all, add in rank
    order (bitwise the same everywhere), divide by P. own = what this member's message decodes to.

    codec: of the messages.
    """

    codec: Codec
    fixed_sizes = True

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Codec):
            raise UsageError(f"Gather wants a codec, not {self.codec!r}")

    def for_shapes(self, shapes: Sequence[tuple[int, ...]]) -> Collective:
        codec = self.codec.for_shapes(shapes)
        return self if codec is self.codec else Gather(codec)

    def steps(
        self, u: Tensor, group: Group = None, *, state: State, key: object = "", step: int = 0, seed: int = 0
    ) -> Steps[tuple[Tensor, Tensor]]:
        size, rank = world(group)
        message, finite = self.codec.encode_flagged(u, derive(seed, rank))
        messages = yield from gather_steps(message, group)
        parts = [self.codec.decode(w, u.shape, u.dtype, derive(seed, r)) for r, w in enumerate(messages)]
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        unit = large_unit(size)  # everybody sees the same
        mean = _where(
            is_finite(total),
            lambda: total / size,
            lambda: torch.stack([part / unit for part in parts]).sum(0) / (size / unit),
        )
        return _checked(mean, finite, key), parts[rank]


@dataclass(frozen=True)
class TwoHop(Collective):
    """Reduce-scatter and all-gather, both coded: 2·(coded n)(P−1)/P bytes.

    1. cut u into P chunks (whole blocks), encode each, send chunk j to its owner j
    2. the owner decodes what arrived and adds it in rank order
    3. it encodes the mean of its chunk and sends it to all; everybody decodes all means
    own = what the first hop sent, and at the owner the second hop's error, P·(mean sent − mean), so that Σ own = P·mean
    holds and error feedback repays both hops.

    Between two members one hop is enough: each sends all of its own to the other (`Gather`), which is as many bytes,
    half of the latency, and leaves out the second coding. Between more it is P/2 times the bytes, and pays over long
    links where there are few of them (planner/hops.py).

    codec: of both hops' messages. hops: 1 or 2; 0: one between two members, two between more.
    """

    codec: Codec
    hops: int = 0
    fixed_sizes = True

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Codec):
            raise UsageError(f"TwoHop wants a codec, not {self.codec!r}")
        if isinstance(self.hops, bool) or self.hops not in (0, 1, 2):
            raise UsageError(f"hops {self.hops!r}: allowed are 1, 2, and 0: one between two members, two between more")

    def steps(
        self, u: Tensor, group: Group = None, *, state: State, key: object = "", step: int = 0, seed: int = 0
    ) -> Steps[tuple[Tensor, Tensor]]:
        size, rank = world(group)
        if self.hops == 1 or (size == 2 and not self.hops):
            whole = Gather(self.codec)
            return (yield from whole.steps(u, group, state=state, key=key, step=step, seed=seed))
        codec, dtype = self.codec, u.dtype
        chunks = u.reshape(-1).split(self.lengths(u.numel(), size))
        shapes = [chunk.shape for chunk in chunks]
        sizes = [codec.nbytes(shape, dtype) for shape in shapes]
        # 1. every chunk to its owner
        coded = [codec.encode_flagged(chunk, derive(seed, rank, j)) for j, chunk in enumerate(chunks)]
        sent = [wire for wire, _ in coded]
        first_hop = Swap(sent, [sizes[rank]] * size, group)
        yield
        arrived = first_hop.wait()
        # 2. the owner adds in rank order
        total, average, fits = self._added(arrived, chunks[rank], rank, seed)
        # 3. the owner's mean to all
        message, finite = codec.encode_flagged(average, derive(seed, "mean", rank))
        second_hop = Swap([message] * size, sizes, group)
        yield
        means = second_hop.wait()
        mean = [codec.decode(wire, shapes[j], dtype, derive(seed, "mean", j)) for j, wire in enumerate(means)]
        own = [codec.decode(wire, shapes[j], dtype, derive(seed, rank, j)) for j, wire in enumerate(sent)]
        own[rank] = own[rank] + _where(fits, lambda: size * mean[rank] - total, lambda: size * (mean[rank] - average))
        good = torch.stack([finite, *(flag for _, flag in coded)]).all()
        return _checked(torch.cat(mean).view(u.shape), good, key), torch.cat(own).view(u.shape)

    def mean_steps(self, u: Tensor, group: Group = None) -> Steps[Tensor] | None:
        """The mean alone, where the backend can add what the codec makes of values: a card's ring over bf16 or fp16,
        which takes half of the time of two hops, as torch's hooks do. What rounding did belongs to nobody then."""
        if not (u.is_cuda and isinstance(self.codec, Cast) and self.codec.adds):
            return None
        return cast_mean_steps(u, self.codec, group)

    def _added(self, arrived: list[Tensor], chunk: Tensor, rank: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """(sum, mean, 0-d bool: is the sum finite) of what arrived for the chunk. The sum may leave the range of its
        type, the mean not."""
        size = len(arrived)
        parts = [
            self.codec.decode(wire, chunk.shape, chunk.dtype, derive(seed, r, rank)) for r, wire in enumerate(arrived)
        ]
        total, unit = _sum_in_order(parts), large_unit(size)
        fits = is_finite(total)
        average = _where(
            fits, lambda: total / size, lambda: _sum_in_order([part / unit for part in parts]) / (size / unit)
        )
        return total, average, fits

    def lengths(self, n: int, size: int) -> list[int]:
        """The lengths of `size` chunks of n values, all but the last few of whole blocks; a chunk may be empty."""
        block = self.codec.gate_block
        per = -(-n // (size * block)) * block
        return [max(0, min(per, n - j * per)) for j in range(size)]


def cast_mean_steps(u: Tensor, codec: Cast, group: Group = None) -> Steps[Tensor]:
    """The mean by an all-reduce in the cast's type. Not finite: where values leave its range."""
    size, _ = world(group)
    total = yield from all_reduce_steps((u / size).to(codec.dtype), group, in_place=True)
    return total.to(u.dtype)


def _sum_in_order(parts: list[Tensor]) -> Tensor:
    """0 + first + second + …, so that −0 becomes 0."""
    total = parts[0] + 0.0
    for part in parts[1:]:
        total += part
    return total


def _checked(mean: Tensor, good: Tensor, key: object) -> Tensor:
    """The mean; InvalidExchange where it is not finite or not `good`, 0-d. On a card it is NaN then, and the caller
    looks whether it is finite: to raise would be to wait."""
    if mean.is_cuda:
        return mean.masked_fill_(~good, float("nan"))
    if not bool(good & is_finite(mean)):
        raise InvalidExchange(f"cannot exchange {key!r}: values, or their mean, are NaN or Inf")
    return mean


def _where(fits: Tensor, usual: Callable[[], Tensor], otherwise: Callable[[], Tensor]) -> Tensor:
    """usual() where 0-d `fits` is true, otherwise() where not. A card computes both, and is not waited for."""
    if fits.is_cuda:
        return torch.where(fits, usual(), otherwise())
    return usual() if bool(fits) else otherwise()


def Quantized(bits: int, hops: int = 0) -> TwoHop:
    """TwoHop(Quantize(bits), hops): all hops in so many bits per value, 2–8."""
    return TwoHop(Quantize(bits), hops)
