"""What a wire makes of a unit, for all sites in one process: x[sites, n] → (mean[n], own[sites, n]).

The same values as thinwire's collectives between processes have, bit for bit (tests/local_stacked_cases.py): its
codecs, its kernels, and its order of adding. Only packing into bytes and the network are left out where a codec's
values can be had without; the bytes are those that the codec says it would send. Rounding must not be random.
"""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch import Tensor

from thinwire.codecs import BinMeans, Codec, TileTopK, TwoLevels
from thinwire.codecs.levels import BINS
from thinwire.codecs.tiles import _matrix
from thinwire.collectives import AlternatingLowRank, Collective, Dense, Gather, TwoHop
from thinwire.collectives.alternating import Turn
from thinwire.collectives.base import State
from thinwire.kernels.levels import two_means
from thinwire.kernels.scales import decode_scale, nearest_scale
from thinwire.kernels.tiles import top_rows

Shapes = tuple[tuple[int, ...], ...]


def exchange(collective: Collective, shapes: Shapes, u: Tensor, state: State) -> tuple[Tensor, Tensor]:
    """(mean, own). u: float32[sites, values] of tensors of these shapes. state: the collective's own, of all sites."""
    if isinstance(collective, Dense):
        return _added(u) / u.shape[0], u
    if isinstance(collective, AlternatingLowRank):
        turn = Turn(collective.for_shapes(shapes), u, state)
        mean, own = exchange(collective.factors, (), turn.message, {})
        turn.keep(mean, state)
        return turn.values(mean[None])[0], turn.values(own)
    if isinstance(collective, Gather):
        return _gathered(collective.codec, u, shapes or ((u.shape[1],),))
    if isinstance(collective, TwoHop):
        return _two_hops(collective, u)
    raise NotImplementedError(f"{collective}: not among the wires that are computed for all sites at once")


def sent_bytes(collective: Collective, shapes: Shapes, sites: int, turn: int = 0) -> int:
    """What the busiest site sends, which is what it receives: payload. turn: the exchange's number."""
    numel = sum(map(math.prod, shapes))
    if isinstance(collective, Dense):
        return 2 * 4 * numel * (sites - 1) // sites
    if isinstance(collective, AlternatingLowRank):
        return sent_bytes(collective.factors, ((collective.sends(shapes, turn),),), sites)
    if isinstance(collective, Gather) or sites == 2:
        codec = collective.for_shapes(shapes).codec  # type: ignore[attr-defined]
        return (sites - 1) * codec.nbytes((numel,), torch.float32)
    assert isinstance(collective, TwoHop)
    sizes = [collective.codec.nbytes((n,), torch.float32) for n in collective.lengths(numel, sites)]
    return max(sum(sizes) - own + (sites - 1) * own for own in sizes)


def _added(x: Tensor) -> Tensor:
    """Row after row, in order."""
    total = x[0].clone()
    for row in x[1:]:
        total += row
    return total


def _gathered(codec: Codec, u: Tensor, shapes: Shapes) -> tuple[Tensor, Tensor]:
    own = round_trip(codec, u, shapes)
    return _added(own) / u.shape[0], own


def _two_hops(collective: TwoHop, u: Tensor) -> tuple[Tensor, Tensor]:
    sites, n = u.shape
    if sites == 2:
        return _gathered(collective.codec, u, ((n,),))
    lengths = collective.lengths(n, sites)
    own = _by_chunks(collective.codec, u, lengths)
    total = _added(own)
    mean = _by_chunks(collective.codec, (total / sites)[None], lengths)[0]
    left, start = sites * mean - total, 0
    for site, length in enumerate(lengths):
        own[site, start : start + length] += left[start : start + length]
        start += length
    return mean, own


def _by_chunks(codec: Codec, x: Tensor, lengths: list[int]) -> Tensor:
    """Every row of x in chunks of these lengths, each coded on its own."""
    if len(set(lengths)) == 1:
        return round_trip(codec, x.reshape(-1, lengths[0]), ((lengths[0],),)).view(x.shape)
    parts = [round_trip(codec, part, ((part.shape[1],),)) for part in x.split(lengths, 1) if part.shape[1]]
    return torch.cat(parts, 1)


def round_trip(codec: Codec, x: Tensor, shapes: Shapes) -> Tensor:
    """What every row of x[rows, n] is decoded to; a row is the concatenation of tensors of these shapes."""
    if isinstance(codec, TileTopK):
        return _tiles(codec, x, shapes)
    if isinstance(codec, BinMeans):
        return _bin_means(x)
    if isinstance(codec, TwoLevels):
        whole = x.shape[1] // codec.block * codec.block
        parts = [_two_levels(x[:, :whole], codec.block)] if whole else []
        if whole < x.shape[1]:
            parts.append(_two_levels(x[:, whole:], x.shape[1] - whole))
        return torch.cat(parts, 1)
    span = codec.span
    if span is not None and x.shape[1] % span == 0:  # rows can be coded as one
        wire, _ = codec.encode_flagged(x)
        return codec.decode(wire, x.shape, x.dtype)
    return codec.rows(x, [0] * x.shape[0])


def _tiles(codec: TileTopK, x: Tensor, shapes: Shapes) -> Tensor:
    """Tensors of one shape, of all rows, at once."""
    places: dict[tuple[int, ...], list[slice]] = defaultdict(list)
    start = 0
    for shape in shapes:
        places[shape].append(slice(start, start + math.prod(shape)))
        start += math.prod(shape)
    out = torch.empty_like(x)
    for shape, spans in places.items():
        matrices = torch.stack([x[:, span] for span in spans]).view(-1, *_matrix(shape))
        coded = _matrices(codec, matrices, shape).view(len(spans), x.shape[0], -1)
        for span, tensors in zip(spans, coded):
            out[:, span] = tensors
    return out


def _matrices(codec: TileTopK, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """x: [tensors, rows, columns]."""
    count, chosen = x.shape[0], []
    kinds = codec._tilings(shape)
    for kind in kinds:
        part = x[:, kind.top : kind.bottom, kind.left : kind.right]
        cut = part.unflatten(1, (-1, kind.high)).unflatten(3, (-1, kind.wide)).transpose(2, 3)
        tiles = cut.reshape(-1, kind.length)
        index = top_rows(tiles, codec.picked(kind.length))
        chosen.append((tiles.gather(1, index).view(count, -1), index))
    values = torch.cat([some for some, _ in chosen], 1)
    if codec.values is not None:
        values = round_trip(codec.values, values, ((values.shape[1],),))
    out = torch.empty_like(x)
    for kind, part, (_, index) in zip(kinds, values.split([v.shape[1] for v, _ in chosen], 1), chosen):
        flat = part.new_zeros(index.shape[0], kind.length).scatter_(1, index, part.reshape(index.shape))
        high, wide = kind.bottom - kind.top, kind.right - kind.left
        grid = flat.view(count, high // kind.high, wide // kind.wide, kind.high, kind.wide).transpose(2, 3)
        out[:, kind.top : kind.bottom, kind.left : kind.right] = grid.reshape(count, high, wide)
    return out


def _two_levels(x: Tensor, block: int) -> Tensor:
    """TwoLevels of rows of whole blocks, without packing."""
    limit = torch.finfo(torch.float32).max
    levels = torch.stack(two_means(x.reshape(-1), block)).clamp(max=limit)
    low, high = decode_scale(nearest_scale(levels, limit))[:, :, None]
    blocks = x.reshape(-1, block)
    middle = (low.double() + high.double()) / 2
    magnitude = torch.where(blocks.abs().double() > middle, high, low)
    return torch.where(blocks < 0, -magnitude, magnitude).view(x.shape)


def _bin_means(x: Tensor) -> Tensor:
    """BinMeans row by row."""
    values = x.double()
    mean = values.mean(1, keepdim=True)
    centred = values - mean
    sigma = centred.square().sum(1, keepdim=True).div(max(1, x.shape[1] - 1)).sqrt()
    width = torch.where(sigma > 0, 6 * sigma / BINS, 1.0)
    codes = (centred / width + BINS // 2).round().clamp(0, BINS - 1).long()
    inside = [codes == code for code in range(BINS)]
    sums = torch.stack([torch.where(some, centred, 0.0).sum(1) for some in inside], 1)
    counts = torch.stack([some.sum(1) for some in inside], 1)
    limit = torch.finfo(x.dtype).max
    table = (sums / counts.clamp(min=1) + mean).clamp(-limit, limit).float()
    return table.gather(1, codes).to(x.dtype)
