"""Unbiased rounding of every value to few levels: powers of two, equal steps, powers of two of a norm, trits.

Codecs of the theory bench: written for float64 and many rows at once, not for speed; imported when first named.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, from_raw, raw_bytes
from thinwire.errors import UsageError
from thinwire.kernels import bits as bitpack
from thinwire.kernels import ternary
from thinwire.kernels.random import uniform_rows

WINDOW = 254  # exponents below the largest that Natural keeps
HEADER = 8  # bytes of a norm (float64)


class _RowCodec(Codec):
    """A codec written for float[R, n] and noise float32[R, n]; one message is the case R = 1.

    `_codes(x, noise) → (codes uint8[R, n], header float64[R])`, `_values(codes, header) → float64-exact values`.
    """

    def _codes(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def _values(self, codes: Tensor, header: Tensor, dtype: torch.dtype) -> Tensor:
        raise NotImplementedError

    def _pack(self, codes: Tensor) -> Tensor:
        raise NotImplementedError

    def _unpack(self, wire: Tensor, n: int) -> Tensor:
        raise NotImplementedError

    def _body_bytes(self, n: int) -> int:
        raise NotImplementedError

    def _encode(self, x: Tensor, seed: int) -> Tensor:
        row = x.reshape(1, -1)
        codes, header = self._codes(row, uniform_rows(row.shape[1], [seed], row))
        return torch.cat((raw_bytes(header), self._pack(codes[0])))

    def _decode(self, wire: Tensor, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
        header = from_raw(wire[:HEADER], torch.float64)
        if not bool(torch.isfinite(header)):
            raise ValueError(f"{self}: the message's norm is not finite")
        return self._values(self._unpack(wire[HEADER:], math.prod(shape))[None], header, dtype)[0]

    def _nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return HEADER + self._body_bytes(math.prod(shape))

    def rows(self, x: Tensor, seeds: Sequence[int] | Tensor) -> Tensor:
        flat = x.reshape(x.shape[0], -1)
        codes, header = self._codes(flat, uniform_rows(flat.shape[1], seeds, flat))
        return self._values(codes, header, x.dtype).reshape(x.shape)


@dataclass(frozen=True)
class Natural(_RowCodec):
    """Natural compression (MSML 2022): round to a neighbouring power of two, up with probability equal to the mantissa
    (less one). ω = 1/8, 9 bits per value.

    A byte holds the exponent relative to the tensor's largest; what is 2²⁵⁴ times smaller is rounded to that or zero.
    """

    def _codes(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        work = x.double()
        mantissa, exponent = torch.frexp(work.abs())
        exponent = exponent - 1 + (noise < 2 * mantissa - 1).to(torch.int32)
        exponent = exponent.clamp(max=_top_exponent(x.dtype))
        top = torch.where(work != 0, exponent, -2000).amax(dim=1, keepdim=True)
        code = exponent - top + WINDOW + 1
        faint = noise < torch.ldexp(work.abs(), WINDOW - top)
        code = torch.where(code >= 1, code, faint.to(code.dtype))
        code = torch.where(work != 0, code, 0)
        sign = (work < 0).to(torch.int32) * 256
        return (code + sign).to(torch.int16), top[:, 0].double()

    def _values(self, codes: Tensor, header: Tensor, dtype: torch.dtype) -> Tensor:
        level = (codes & 255).double()
        value = torch.ldexp(torch.ones_like(level), level - (WINDOW + 1) + header[:, None])
        value = torch.where(level == 0, 0.0, value)
        return torch.where(codes >= 256, -value, value).to(dtype)

    def _pack(self, codes: Tensor) -> Tensor:
        return torch.cat(((codes & 255).to(torch.uint8), bitpack.pack((codes >> 8).to(torch.uint8), 1)))

    def _unpack(self, wire: Tensor, n: int) -> Tensor:
        return wire[:n].to(torch.int16) | (bitpack.unpack(wire[n:], n, 1).to(torch.int16) << 8)

    def _body_bytes(self, n: int) -> int:
        return n + bitpack.packed_bytes(n, 1)

    def omega(self, numel: int) -> float | None:
        return 1 / 8


@dataclass(frozen=True)
class _Levels(_RowCodec):
    """Signed levels 0 … `levels` of a norm, each value rounded to a neighbouring level without bias.

    levels: how many above zero, 1 … 127. norm: of the whole tensor, 2 or "inf".
    """

    levels: int
    norm: float | str = 2

    def __post_init__(self) -> None:
        if not isinstance(self.levels, int) or not 1 <= self.levels <= 127:
            raise UsageError(f"levels must be 1 … 127, not {self.levels!r}")
        if self.norm not in (2, "inf"):
            raise UsageError(f'norm must be 2 or "inf", not {self.norm!r}')

    def _norm(self, x: Tensor) -> Tensor:
        """float64[R], a hair above the true norm so that no value lies beyond it."""
        order = 2 if self.norm == 2 else float("inf")
        return torch.linalg.vector_norm(x.double(), ord=order, dim=1) * (1 + 1e-12)

    def _ratio(self, x: Tensor) -> tuple[Tensor, Tensor]:
        norm = self._norm(x)
        return x.double().abs() / torch.where(norm > 0, norm, 1.0)[:, None], norm

    def _signed(self, level: Tensor, x: Tensor) -> Tensor:
        return (torch.where(x < 0, -level, level) + self.levels).to(torch.uint8)

    def _pack(self, codes: Tensor) -> Tensor:
        return bitpack.pack(codes, self._bits)

    def _unpack(self, wire: Tensor, n: int) -> Tensor:
        return bitpack.unpack(wire, n, self._bits).clamp(max=2 * self.levels)

    def _body_bytes(self, n: int) -> int:
        return bitpack.packed_bytes(n, self._bits)

    @property
    def _bits(self) -> int:
        return (2 * self.levels).bit_length()


@dataclass(frozen=True)
class Dither(_Levels):
    """QSGD (NeurIPS 2017): equal steps of norm/s. ω = min(d/s², √d/s) for the 2-norm, d values.

    levels: s, the steps from 0 to the norm, 1 … 127. norm: 2 or "inf".
    """

    def _codes(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        ratio, norm = self._ratio(x)
        t = ratio * self.levels
        low = torch.floor(t)
        return self._signed(low + (noise < t - low), x), norm

    def _values(self, codes: Tensor, header: Tensor, dtype: torch.dtype) -> Tensor:
        return ((codes.double() - self.levels) * (header[:, None] / self.levels)).to(dtype)

    def omega(self, numel: int) -> float | None:
        d, s = max(numel, 1), self.levels
        if self.norm == 2:
            return min(d / s**2, math.sqrt(d) / s)
        return min(d / (4 * s**2), (math.sqrt(d) + 1) / (2 * s))


@dataclass(frozen=True)
class NaturalDither(_Levels):
    """Natural dithering (MSML 2022): levels 0, 2^(1−s), …, ½, 1 of the norm. ω = 1/8 + t·min(1, t), t = √d·2^(1−s).

    levels: s, 1 … 127. norm: 2 or "inf".
    """

    def _codes(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        ratio, norm = self._ratio(x)
        mantissa, exponent = torch.frexp(ratio)  # ratio = mantissa·2^exponent, mantissa in [½, 1)
        level = (exponent - 1 + (noise < 2 * mantissa - 1) + self.levels).clamp(max=self.levels)
        least = 2.0 ** (1 - self.levels)
        level = torch.where(ratio >= least, level, (noise < ratio / least).to(level.dtype))
        return self._signed(level, x), norm

    def _values(self, codes: Tensor, header: Tensor, dtype: torch.dtype) -> Tensor:
        signed = codes.double() - self.levels
        value = torch.exp2(signed.abs() - self.levels) * torch.sign(signed)
        return (value * header[:, None]).to(dtype)

    def omega(self, numel: int) -> float | None:
        t = math.sqrt(max(numel, 1)) * 2.0 ** (1 - self.levels)
        return 1 / 8 + t * min(1.0, t)


@dataclass(frozen=True)
class Ternary(_RowCodec):
    """TernGrad (NeurIPS 2017): max|x|·{−1, 0, 1}, kept with probability |x|/max|x|. ω = (√d − 1)/2, 1.6 bits per
    value."""

    def _codes(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        top = x.double().abs().amax(dim=1)
        keep = noise < x.double().abs() / torch.where(top > 0, top, 1.0)[:, None]
        return torch.where(keep, torch.sign(x.double()) + 1, 1.0).to(torch.uint8), top

    def _values(self, codes: Tensor, header: Tensor, dtype: torch.dtype) -> Tensor:
        return ((codes.double() - 1) * header[:, None]).to(dtype)

    def _pack(self, codes: Tensor) -> Tensor:
        return ternary.pack_trits(codes)

    def _unpack(self, wire: Tensor, n: int) -> Tensor:
        return ternary.unpack_trits(wire, n)

    def _body_bytes(self, n: int) -> int:
        return ternary.trit_bytes(n)

    def omega(self, numel: int) -> float | None:
        return (math.sqrt(max(numel, 1)) - 1) / 2


def _top_exponent(dtype: torch.dtype) -> int:
    """The largest power of two that the dtype holds: the last binade rounds down, since 2^(e+1) is not a number."""
    return math.frexp(torch.finfo(dtype).max)[1] - 1
