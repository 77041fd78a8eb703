"""Value codes with few levels that lie where the values are: for the large values that a sparse codec picks, which are
nowhere near zero, and for outer gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, from_raw, raw_bytes
from thinwire.codecs.quantize import Blockwise
from thinwire.kernels import bits as bitpack
from thinwire.kernels.levels import two_means
from thinwire.kernels.quantize import as_blocks
from thinwire.kernels.scales import decode_scale, encode_scale, from_bytes, nearest_scale, to_bytes

BINS = 4  # SparseLoCo's, of 6σ in all
TABLE = 4 * BINS  # bytes: a float32 per bin


@dataclass(frozen=True)
class TwoLevels(Blockwise):
    """Two bits per value: a sign, and the nearer of two magnitudes, those of least squared error in their block.

    The magnitudes of a block are sorted; of all ways to cut them in two, the one is taken whose halves' means are the
    nearest to them (1-D two-means, exactly). Each mean is a 16-bit scale. block: values that share their magnitudes.
    """

    block: int = 512

    def _encode(self, x: Tensor, seed: int) -> Tensor:
        flat = x.view(-1)
        low, high = two_means(flat, self.block)
        limit = _limit(x.dtype)
        codes = [nearest_scale(level.clamp(max=limit), limit) for level in (low, high)]
        low, high = (decode_scale(code).double() for code in codes)
        upper = as_blocks(flat, self.block).abs().double() > ((low + high) / 2)[:, None]
        coded = upper.to(torch.uint8).view(-1)[: flat.numel()] | ((flat < 0).to(torch.uint8) << 1)
        return torch.cat((bitpack.pack(coded, 2), *(to_bytes(code) for code in codes)))

    def _decode(self, wire: Tensor, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
        n = math.prod(shape)
        blocks = -(-n // self.block)
        cut = bitpack.packed_bytes(n, 2)
        codes = bitpack.unpack(wire[:cut], n, 2)
        low, high = decode_scale(from_bytes(wire[cut:])).view(2, blocks).repeat_interleave(self.block, 1)[:, :n]
        magnitude = torch.where((codes & 1) > 0, high, low)
        return torch.where(codes > 1, -magnitude, magnitude).to(dtype)

    def _nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        n = math.prod(shape)
        return bitpack.packed_bytes(n, 2) + 4 * -(-n // self.block)

    def delta(self, numel: int) -> float | None:
        """No worse than one magnitude, the mean, as ScaledSign has it."""
        return (1 - 2.0**-12) / min(self.block, max(numel, 1))


@dataclass(frozen=True)
class BinMeans(Codec):
    """SparseLoCo's two bits: subtract the mean, four bins of 6σ/4 each, decoded to the means of what fell into them."""

    never_syncs = True

    def _encode(self, x: Tensor, seed: int) -> Tensor:
        flat = x.view(-1).double()
        mean = flat.mean()
        centred = flat - mean
        sigma = centred.square().sum().div(max(1, flat.numel() - 1)).sqrt()
        width = torch.where(sigma > 0, 6 * sigma / BINS, 1.0)
        codes = (centred / width + BINS // 2).round().clamp(0, BINS - 1).long()
        own = torch.nn.functional.one_hot(codes, BINS).double()
        table = (own * centred[:, None]).sum(0) / own.sum(0).clamp(min=1) + mean
        limit = _limit(x.dtype)
        return torch.cat((bitpack.pack(codes.to(torch.uint8), 2), raw_bytes(table.clamp(-limit, limit).float())))

    def _decode(self, wire: Tensor, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
        table = from_raw(wire[-TABLE:], torch.float32)
        return table[bitpack.unpack(wire[:-TABLE], math.prod(shape), 2).long()].to(dtype)

    def _nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return bitpack.packed_bytes(math.prod(shape), 2) + TABLE


@dataclass(frozen=True)
class PowerOfTwo(Blockwise):
    """A sign and an exponent: zero, or s·2^−j, the nearest, s the block's largest magnitude. Four bits are fp4 (E3M0).

    bits: per value, 2–8; all but one are the exponent's. block: values per scale, a multiple of 8.
    """

    bits: int = 4
    block: int = 128

    def _encode(self, x: Tensor, seed: int) -> Tensor:
        flat = x.view(-1)
        largest = 2 ** (self.bits - 1) - 1  # the code of s
        magnitudes = as_blocks(flat, self.block).abs()
        scales = encode_scale(magnitudes.amax(1).float(), 1.0, _limit(x.dtype))
        scale = decode_scale(scales).double()[:, None]
        share = magnitudes.double() / torch.where(scale > 0, scale, 1.0)
        mantissa, exponent = torch.frexp(share)
        power = exponent - (mantissa < 0.75).to(exponent.dtype)  # of two, the nearest in value
        nearest = (largest + power).clamp(1, largest)
        code = torch.where(share >= 2.0**-largest, nearest, 0)  # half of the smallest is nearer to it than to zero
        code = code.to(torch.uint8).view(-1)[: flat.numel()]
        coded = code | ((flat < 0).to(torch.uint8) << (self.bits - 1))
        return torch.cat((bitpack.pack(coded, self.bits), to_bytes(scales)))

    def _decode(self, wire: Tensor, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
        n = math.prod(shape)
        cut = bitpack.packed_bytes(n, self.bits)
        largest = 2 ** (self.bits - 1) - 1
        coded = bitpack.unpack(wire[:cut], n, self.bits).long()
        scale = decode_scale(from_bytes(wire[cut:])).repeat_interleave(self.block)[:n].double()
        code = coded & largest
        magnitude = torch.where(code > 0, torch.ldexp(scale, code - largest), 0.0)
        return torch.where(coded > largest, -magnitude, magnitude).to(dtype)

    def _nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        n = math.prod(shape)
        return bitpack.packed_bytes(n, self.bits) + 2 * -(-n // self.block)


def _limit(dtype: torch.dtype) -> float:
    """The largest level of values of that type: scales and tables are float32 at most."""
    return min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
