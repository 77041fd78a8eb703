"""Codecs that send some of the values: the largest (indices travel, coded) or random ones (indices follow the seed)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, from_raw, raw_bytes
from thinwire.errors import UsageError
from thinwire.kernels import indices, random
from thinwire.kernels import select as kernel


@dataclass(frozen=True)
class _Sparse(Codec):
    """k = density·n of n values. `pick` chooses them, `place` puts decoded ones back: Chain codes what lies between.

    density: the share of values sent, in (0, 1].
    """

    density: float

    def __post_init__(self) -> None:
        if not isinstance(self.density, (int, float)) or not 0 < self.density <= 1:
            raise UsageError(f"density must lie in (0, 1], not {self.density!r}")

    def count(self, n: int) -> int:
        """k, how many of n values are sent: at least one."""
        return min(n, max(1, round(self.density * n)))

    def pick(self, x: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """x: float[n] → (values float[k], index bytes)."""
        raise NotImplementedError

    def place(self, values: Tensor, coded: Tensor, n: int, seed: int) -> Tensor:
        """The inverse: float[n] with the values in their places."""
        raise NotImplementedError

    def index_bytes(self, n: int) -> int:
        """How many bytes the indices of n values' choice take."""
        raise NotImplementedError

    def _encode(self, x: Tensor, seed: int) -> Tensor:
        values, coded = self.pick(x.view(-1), seed)
        return torch.cat((raw_bytes(values), coded))

    def _decode(self, wire: Tensor, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
        n = math.prod(shape)
        cut = self.count(n) * dtype.itemsize
        return self.place(from_raw(wire[:cut], dtype), wire[cut:], n, seed)

    def _nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        n = math.prod(shape)
        return self.count(n) * dtype.itemsize + self.index_bytes(n)


@dataclass(frozen=True)
class TopK(_Sparse):
    """The k largest magnitudes, exactly, ties by index. δ = k/n. Indices are Elias–Fano or a bitmap.

    density: the share of values sent, k = density·n, in (0, 1].
    """

    never_syncs = True

    def pick(self, x: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        index, values = kernel.top(x, self.count(x.numel()))
        return values, indices.encode_indices(index, x.numel())

    def place(self, values: Tensor, coded: Tensor, n: int, seed: int) -> Tensor:
        """Indices that are none: ValueError; on a card, where to raise would be to wait for it, NaN."""
        if not values.is_cuda:
            return kernel.scatter_add(values.new_zeros(n), indices.decode_indices(coded, n, values.numel()), values)
        index, good = indices.decode_flagged(coded, n, values.numel())
        return kernel.scatter_add(values.new_zeros(n), index, torch.where(good, values, torch.nan))

    def index_bytes(self, n: int) -> int:
        return indices.index_bytes(n, self.count(n))

    def delta(self, numel: int) -> float | None:
        return self.count(max(numel, 1)) / max(numel, 1)

    def rows(self, x: Tensor, seeds: Sequence[int] | Tensor) -> Tensor:
        flat = x.reshape(x.shape[0], -1)
        k = self.count(flat.shape[1])
        order = torch.sort(flat.abs(), dim=1, descending=True, stable=True).indices[:, :k]
        return torch.zeros_like(flat).scatter_(1, order, flat.gather(1, order)).reshape(x.shape)


@dataclass(frozen=True)
class RandK(_Sparse):
    """k random values times n/k: unbiased, ω = n/k − 1. Both ends draw the indices from the seed: none are sent.

    density: the share of values sent, k = density·n, in (0, 1].
    """

    def pick(self, x: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        index = random.sample_rows(x.numel(), self.count(x.numel()), [seed], x)[0]
        return x[index], torch.empty(0, dtype=torch.uint8, device=x.device)

    def place(self, values: Tensor, coded: Tensor, n: int, seed: int) -> Tensor:
        index = random.sample_rows(n, values.numel(), [seed], values)[0]
        return _amplify(values.new_zeros(n).index_copy_(0, index, values), n / values.numel())

    def index_bytes(self, n: int) -> int:
        return 0

    def omega(self, numel: int) -> float | None:
        return max(numel, 1) / self.count(max(numel, 1)) - 1

    def rows(self, x: Tensor, seeds: Sequence[int] | Tensor) -> Tensor:
        flat = x.reshape(x.shape[0], -1)
        n, k = flat.shape[1], self.count(flat.shape[1])
        index = random.sample_rows(n, k, seeds, flat)
        out = torch.zeros_like(flat).scatter_(1, index, flat.gather(1, index))
        return _amplify(out, n / k).reshape(x.shape)


@dataclass(frozen=True)
class Chain(Codec):
    """A sparse codec whose values are coded by another: TopK then 4 bits, RandK then Natural …

    sparse: TopK or RandK. values: the codec of the values that it picks.
    """

    sparse: _Sparse
    values: Codec

    def __post_init__(self) -> None:
        if not isinstance(self.sparse, _Sparse):
            raise UsageError(f"Chain wants TopK or RandK first, not {self.sparse!r}")
        if not isinstance(self.values, Codec):
            raise UsageError(f"Chain wants a codec for the values, not {self.values!r}")

    @property
    def never_syncs(self) -> bool:
        return self.sparse.never_syncs and self.values.never_syncs

    def _encode(self, x: Tensor, seed: int) -> Tensor:
        values, coded = self.sparse.pick(x.view(-1), seed)
        body, _ = self.values.encode_flagged(values, random.derive("values", seed))  # x is finite, and so are they
        return torch.cat((body, coded))

    def _decode(self, wire: Tensor, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
        n = math.prod(shape)
        k = self.sparse.count(n)
        cut = self.values.nbytes((k,), dtype)
        values = self.values.decode(wire[:cut], (k,), dtype, random.derive("values", seed))
        return self.sparse.place(values, wire[cut:], n, seed)

    def _nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        n = math.prod(shape)
        return self.values.nbytes((self.sparse.count(n),), dtype) + self.sparse.index_bytes(n)

    def omega(self, numel: int) -> float | None:
        """(1 + ω₁)(1 + ω₂) − 1 of two unbiased codecs."""
        first, second = self.sparse.omega(numel), self.values.omega(self.sparse.count(max(numel, 1)))
        return None if first is None or second is None else (1 + first) * (1 + second) - 1

    def delta(self, numel: int) -> float | None:
        """δ₁δ₂, or δ₁(1 − ω₂) where the values are unbiased with ω₂ < 1."""
        k = self.sparse.count(max(numel, 1))
        first, second, omega = self.sparse.delta(numel), self.values.delta(k), self.values.omega(k)
        if first is None:
            return None
        if second is not None:
            return first * second
        return first * (1 - omega) if omega is not None and omega < 1 else None


def _amplify(x: Tensor, factor: float) -> Tensor:
    """x·factor without leaving the range of a 16-bit float."""
    if factor == 1 or x.dtype in (torch.float32, torch.float64):
        return x * factor
    limit = torch.finfo(x.dtype).max
    return (x.float() * factor).clamp(-limit, limit).to(x.dtype)
