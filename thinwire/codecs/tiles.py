"""The largest values of every tile of a matrix: k exactly in each, so that no threshold has to be found for all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, from_raw, raw_bytes
from thinwire.codecs.lowrank import matrix_shape
from thinwire.errors import UsageError
from thinwire.kernels import indices
from thinwire.kernels.random import derive
from thinwire.kernels.tiles import LONGEST, top_rows

Shape = tuple[int, ...]


@dataclass(frozen=True)
class _Tiling:
    """One kind of tiles of a matrix: all of one size, `high` × `wide`, between these rows and columns."""

    top: int
    bottom: int
    left: int
    right: int
    high: int
    wide: int

    @property
    def length(self) -> int:
        """Values of a tile."""
        return self.high * self.wide

    @property
    def count(self) -> int:
        """How many tiles there are."""
        return (self.bottom - self.top) * (self.right - self.left) // self.length

    def cut(self, matrix: Tensor) -> Tensor:
        """[count, length]: a tile per row."""
        part = matrix[self.top : self.bottom, self.left : self.right]
        down, across = part.shape[0] // self.high, part.shape[1] // self.wide
        return part.reshape(down, self.high, across, self.wide).transpose(1, 2).reshape(self.count, self.length)

    def paste(self, tiles: Tensor, matrix: Tensor) -> None:
        """The inverse of `cut`, into the matrix."""
        down, across = (self.bottom - self.top) // self.high, (self.right - self.left) // self.wide
        part = tiles.reshape(down, across, self.high, self.wide).transpose(1, 2)
        matrix[self.top : self.bottom, self.left : self.right] = part.reshape(down * self.high, across * self.wide)


@dataclass(frozen=True)
class TileTopK(Codec):
    """The k largest magnitudes of every tile of tile × tile values (1-D: tile² in a row). δ = k/tile².

    A tensor is taken as (all leading dimensions) × (last). Tiles at the edges are smaller, and send as large a share,
    rounded up. Indices are coded by Elias–Fano (8 bits each for 64 of 4,096), values by `values`, tensor by tensor.

    k: values per tile. tile: its side. values: the codec of the values; None: as they are. shapes: of the tensors that
    a flat message is made of; empty: x's own shape. `for_shapes` fills it in.
    """

    k: int = 64
    tile: int = 64
    values: Codec | None = None
    shapes: tuple[Shape, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.tile, int) or not 1 <= self.tile**2 <= LONGEST:
            raise UsageError(f"tile = {self.tile!r}: must be an integer from 1 to {math.isqrt(LONGEST)}")
        if not isinstance(self.k, int) or not 1 <= self.k <= self.tile**2:
            raise UsageError(f"k = {self.k!r}: must be an integer from 1 to tile² = {self.tile**2}")
        if self.values is not None and not isinstance(self.values, Codec):
            raise UsageError(f"values = {self.values!r}: must be a codec")

    @property
    def never_syncs(self) -> bool:
        return self.values is None or self.values.never_syncs

    def for_shapes(self, shapes: Sequence[Shape]) -> TileTopK:
        return replace(self, shapes=tuple(tuple(shape) for shape in shapes))

    def delta(self, numel: int) -> float | None:
        return self.k / self.tile**2 if self.values is None else None

    def picked(self, length: int) -> int:
        """How many values of a tile of so many are sent."""
        return min(length, -(-self.k * length // self.tile**2))

    # --- the parts of a message: per tensor its values, then the indices of each kind of its tiles

    def _encode(self, x: Tensor, seed: int) -> Tensor:
        shapes = self._shapes(tuple(x.shape))
        parts: list[Tensor] = []
        for number, (shape, piece) in enumerate(zip(shapes, x.view(-1).split([math.prod(s) for s in shapes]))):
            parts += self._encode_tensor(piece, shape, derive(seed, number))
        return torch.cat(parts)

    def _encode_tensor(self, x: Tensor, shape: Shape, seed: int) -> list[Tensor]:
        values, coded = [], []
        for kind in self._tilings(shape):
            tiles = kind.cut(x.view(_matrix(shape)))
            index = top_rows(tiles, self.picked(kind.length))
            values.append(tiles.gather(1, index).view(-1))
            flat = index + kind.length * torch.arange(kind.count, device=x.device)[:, None]
            coded.append(indices.encode_indices(flat.view(-1), kind.count * kind.length))
        chosen = torch.cat(values) if values else x[:0]
        body = raw_bytes(chosen) if self.values is None else self.values.encode_flagged(chosen, seed)[0]
        return [body, *coded]

    def _decode(self, wire: Tensor, shape: Shape, dtype: torch.dtype, seed: int) -> Tensor:
        out = []
        for number, one in enumerate(self._shapes(shape)):
            length = self._tensor_bytes(one, dtype)
            out.append(self._decode_tensor(wire[:length], one, dtype, derive(seed, number)))
            wire = wire[length:]
        return torch.cat(out)

    def _decode_tensor(self, wire: Tensor, shape: Shape, dtype: torch.dtype, seed: int) -> Tensor:
        kinds = self._tilings(shape)
        counts = [kind.count * self.picked(kind.length) for kind in kinds]
        cut = self._values_bytes(sum(counts), dtype)
        body = wire[:cut]
        values = from_raw(body, dtype) if self.values is None else self.values.decode(body, (sum(counts),), dtype, seed)
        matrix = values.new_zeros(_matrix(shape))
        for kind, count, some in zip(kinds, counts, values.split(counts)):
            n = kind.count * kind.length
            end = cut + indices.index_bytes(n, count)
            tiles = _placed(wire[cut:end], some, n)
            kind.paste(tiles.view(kind.count, kind.length), matrix)
            cut = end
        return matrix.view(-1)

    def _nbytes(self, shape: Shape, dtype: torch.dtype) -> int:
        return sum(self._tensor_bytes(one, dtype) for one in self._shapes(shape))

    def _tensor_bytes(self, shape: Shape, dtype: torch.dtype) -> int:
        counts = [(kind.count * kind.length, kind.count * self.picked(kind.length)) for kind in self._tilings(shape)]
        coded = sum(indices.index_bytes(n, count) for n, count in counts)
        return coded + self._values_bytes(sum(count for _, count in counts), dtype)

    def _values_bytes(self, count: int, dtype: torch.dtype) -> int:
        return count * dtype.itemsize if self.values is None else self.values.nbytes((count,), dtype)

    def _shapes(self, shape: Shape) -> tuple[Shape, ...]:
        if not self.shapes:
            return (shape,)
        if sum(map(math.prod, self.shapes)) != math.prod(shape):
            raise ValueError(f"{self}: a tensor of shape {shape} is not made of {len(self.shapes)} of these shapes")
        return self.shapes

    def _tilings(self, shape: Shape) -> list[_Tiling]:
        """Whole tiles, those at the right, at the bottom, and in the corner, as far as there are any."""
        rows, columns = _matrix(shape)
        high, wide = (1, self.tile**2) if rows == 1 else (self.tile, self.tile)
        downs, acrosses = _bands(rows, high), _bands(columns, wide)
        return [_Tiling(a, b, c, d, h, w) for a, b, h in downs for c, d, w in acrosses]


def _matrix(shape: Shape) -> tuple[int, int]:
    """(1, n) of what has one dimension or none."""
    return matrix_shape(shape) if len(shape) > 1 else (1, math.prod(shape))


def _bands(length: int, size: int) -> list[tuple[int, int, int]]:
    """(from, to, size of a tile): whole ones, and what is left."""
    whole = length // size * size
    bands = [(0, whole, size), (whole, length, length - whole)]
    return [(start, end, size) for start, end, size in bands if end > start]


def _placed(coded: Tensor, values: Tensor, n: int) -> Tensor:
    """[n], the values at their indices. What is no index: ValueError; on a card, which is not waited for, NaN."""
    if not values.is_cuda:
        index = indices.decode_indices(coded, n, values.numel())
        return values.new_zeros(n).index_copy_(0, index, values)
    index, good = indices.decode_flagged(coded, n, values.numel())
    return values.new_zeros(n).index_add_(0, index, torch.where(good, values, torch.nan))
