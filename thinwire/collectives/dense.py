"""Collectives without selection: exact, by gathering coded tensors, and in two coded hops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs import Codec, Quantize
from thinwire.collectives.base import Collective, State
from thinwire.collectives.groups import all_reduce, gather, swap, world
from thinwire.errors import UsageError
from thinwire.kernels.random import derive


@dataclass(frozen=True)
class Dense(Collective):
    """The exact mean, by the backend's all-reduce. 2n(P−1)/P words."""

    def exchange(
        self, u: Tensor, group: Any = None, *, state: State, key: object = "", step: int = 0, seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        return all_reduce(u, group) / world(group)[0], u


@dataclass(frozen=True)
class Gather(Collective):
    """Everybody's coded tensor to everybody.

    1. encode u with this member's own seed; 2. all-gather the messages (one size, known); 3. decode all, add in rank
    order (bitwise the same everywhere), divide by P. own = what this member's message decodes to.
    """

    codec: Codec

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Codec):
            raise UsageError(f"Gather wants a codec, not {self.codec!r}")

    def exchange(
        self, u: Tensor, group: Any = None, *, state: State, key: object = "", step: int = 0, seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        size, rank = world(group)
        messages = gather(self.codec.encode(u, derive(seed, rank)), group)
        parts = [self.codec.decode(w, u.shape, u.dtype, derive(seed, r)) for r, w in enumerate(messages)]
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total / size, parts[rank]


@dataclass(frozen=True)
class TwoHop(Collective):
    """Reduce-scatter and all-gather, both coded: 2·(coded n)(P−1)/P bytes.

    1. cut u into P chunks (whole blocks), encode each, send chunk j to its owner j; 2. the owner decodes and adds in
    rank order; 3. it encodes the mean of its chunk and sends it to all. The second hop's error, P·(mean sent − mean),
    is charged to the owner's own, so Σ own = P·mean holds and error feedback repays both hops.
    """

    codec: Codec

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Codec):
            raise UsageError(f"TwoHop wants a codec, not {self.codec!r}")

    def exchange(
        self, u: Tensor, group: Any = None, *, state: State, key: object = "", step: int = 0, seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        size, rank = world(group)
        flat = u.reshape(-1)
        chunks = list(flat.split(self.lengths(flat.numel(), size)))
        coded = [self.codec.encode_flagged(c, derive(seed, rank, j)) for j, c in enumerate(chunks)]
        first, mine = [wire for wire, _ in coded], chunks[rank]
        arrived = swap(first, [self.codec.nbytes(mine.shape, u.dtype)] * size, group)
        total = torch.zeros_like(mine)
        for r, wire in enumerate(arrived):
            total += self.codec.decode(wire, mine.shape, u.dtype, derive(seed, r, rank))
        second, finite = self.codec.encode_flagged(total / size, derive(seed, "mean", rank))
        sizes = [self.codec.nbytes(c.shape, u.dtype) for c in chunks]
        means = swap([second] * size, sizes, group)
        mean = [
            self.codec.decode(w, c.shape, u.dtype, derive(seed, "mean", j))
            for j, (w, c) in enumerate(zip(means, chunks))
        ]
        own = [
            self.codec.decode(w, c.shape, u.dtype, derive(seed, rank, j)) for j, (w, c) in enumerate(zip(first, chunks))
        ]
        own[rank] = own[rank] + (size * mean[rank] - total)
        if not bool(torch.stack([finite, *(flag for _, flag in coded)]).all()):  # one look, at the end: it waits
            raise ValueError(f"cannot exchange {key!r}: values, or their mean, are NaN or Inf")
        return torch.cat(mean).view(u.shape), torch.cat(own).view(u.shape)

    def lengths(self, n: int, size: int) -> list[int]:
        """P chunk lengths, all but the last few of whole blocks; a chunk may be empty."""
        block = self.codec.gate_block
        per = -(-n // (size * block)) * block
        return [max(0, min(per, n - j * per)) for j in range(size)]


def Quantized(bits: int) -> TwoHop:
    """TwoHop(Quantize): both hops in `bits` bits."""
    return TwoHop(Quantize(bits))
