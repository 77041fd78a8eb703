"""Transform coding: a basis in which values differ much in variance, and bits for each component by its variance.

    sender     r = rms of a row ;  y = Vᵀx/r ;  q = ⌊y/Δ⌋, clipped to 2^b codes           Δ, b: per component
    receiver   x̂ = s·V·(q + ½)·Δ/(1 − E(b))              E(b): the error of b bits, 1 for none

V, Δ and b are a *book* that both ends hold. Without one V is a random Hadamard rotation, another for every message, and
all components get as many bits: a fraction of a bit by giving some of them one more. After a rotation values are nearly
normal, and Δ is the best equal step for a normal distribution (Max 1960). With a book, which the sender of a pipeline's
boundary makes from what it has sent (transform_fit.py) and sends along (memory/fitted.py), V is a Karhunen–Loève basis
and b follows by reverse water-filling: a component of little variance gets no bits. Rows differ too: they are put in
order by their scales, which both ends know, and each quarter of them has bits of its own, more where scales are large.

**Why not the least error.** The nearest code draws a value to zero: of a normal y it leaves (1 − E)·y and noise. What
trains behind it then learns on smaller values than it meets without the link. Divided by 1 − E what arrives is y and
noise (docs/from-scratch.md has losses). Rows that are not quite normal, whose large values are clipped, would still be
drawn a little, by the more the less alike a row's blocks are. So without a book s is what makes x̂ as long as x along x,
⟨x̂, x⟩ = ‖x‖² but for the rounding of s: over rotations such a code has no bias (EDEN, arXiv 2108.08842). A bias of 1 %
is enough to end a training whose gradients are coded beside means, because they nearly cancel and the means are not
made smaller (docs/log.md). With a book s is r, by which rows are put in order.

The message: int16 scale per row, in parts of octaves | one bit stream, class after class: of each of its rows the
lowest bit of all components that have one, then of each the second bit of those that have two, ….
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, from_raw, raw_bytes
from thinwire.codecs.lowrank import matrix_shape
from thinwire.codecs.transform_book import MOST_BITS, Book
from thinwire.errors import UsageError
from thinwire.kernels import bits as bitpack
from thinwire.kernels import hadamard
from thinwire.kernels.random import derive

ERROR = (1.0, 0.3634, 0.1188, 0.03744, 0.01154, 0.003495, 0.001041, 0.000304, 0.0000877)  # mean square, with STEP
OCTAVE, FINER = 16, 128  # scales per power of two: with a book, or of float64, whose range is large; without one
EMPTY = -(2**15)  # the scale of a row of zeros
MOST_GROWTH = 256.0  # by which a scale may differ from its row's rms


@dataclass(frozen=True)
class Transform(Codec):
    """Transform coding of the last dimension.

    bits: per value on average, 0.25 to 8, fractions too.
    every: between the stages of a pipeline, steps after which the basis is learnt anew from what was sent (more often
        at first); 0: never, and every message is rotated at random.
    early_bits: between the stages of a pipeline, instead of `bits` in its first `early_steps` steps: few bits do most
        harm there. 0: none.
    """

    revision: ClassVar[int] = 3  # 2: scales were the rows' rms; 1: what arrived was not divided by 1 − E either
    bits: float
    every: int = 0
    early_bits: float = 0
    early_steps: int = 0
    book: Book | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("bits", "early_bits") if self.early_bits else ("bits",):
            bits = getattr(self, name)
            if isinstance(bits, bool) or not isinstance(bits, (int, float)) or not 0.25 <= bits <= MOST_BITS:
                raise UsageError(f"Transform: {name} must lie in 0.25 to {MOST_BITS}, not {bits!r}")
        for name in ("every", "early_steps"):
            number = getattr(self, name)
            if not isinstance(number, int) or isinstance(number, bool) or number < 0:
                raise UsageError(f"Transform: {name} must be an integer, 0 or more, not {number!r}")
        if bool(self.early_bits) != bool(self.early_steps):
            raise UsageError("Transform: early_bits and early_steps go together")
        if self.book is not None and not isinstance(self.book, Book):
            raise UsageError("Transform: book is learnt, and not for configuration")

    @property
    def learns(self) -> bool:
        return self.every > 0 or self.early_steps > 0

    def at(self, step: int) -> Transform:
        """With the bits of that step, counted from 0; those that follow are forgotten."""
        bits = self.early_bits if step < self.early_steps else self.bits
        return replace(self, bits=bits, early_bits=0, early_steps=0)

    @property
    def never_syncs(self) -> bool:
        return True

    def with_book(self, book: Book | None) -> Transform:
        """This codec in that basis; None: before there is one."""
        return replace(self, book=book)

    def row_bits(self, width: int) -> int:
        """Of a row of that width."""
        return min(max(1, int(self.bits * width)), MOST_BITS * width)

    def _encode(self, x: Tensor, seed: int) -> Tensor:
        width = matrix_shape(tuple(x.shape))[1]
        book = self._book(width, x.device)
        rows = x.to(torch.promote_types(x.dtype, torch.float32)).reshape(-1, width)
        if book.basis is None:
            rows = hadamard.rotate(rows.reshape(-1), block_of(width), derive("rotate", seed)).view(-1, width)
        largest = rows.abs().amax(1, keepdim=True)
        unit = rows / largest.clamp_min(_tiny(rows))
        rms = unit.square().mean(1, keepdim=True).sqrt().clamp_min(_tiny(rows))
        power = torch.log2(largest.clamp_min(_tiny(rows)))
        log = torch.log2(rms) + power
        if book.basis is None:
            unit = unit / rms
            codes = to_codes(unit[None], book)
            log = log + torch.log2(longer(unit, from_codes(codes, book, unit.dtype)[0]))
        octave = octave_of(book, rows.dtype)
        scale = torch.where(largest > 0, torch.round(octave * log), EMPTY).to(torch.int16)
        if book.basis is not None:
            scaled = unit * torch.exp2(power - torch.round(octave * log) / octave) @ book.basis.to(unit.dtype)
            codes = to_codes(scaled[in_order(scale, book)], book)
        part = book.classes(len(rows))
        stream = [
            ((columns(own, plane) >> p) & 1).view(-1)
            for own, planes in zip(codes, book.planes[part])
            for p, plane in enumerate(planes)
        ]
        return torch.cat((raw_bytes(scale), bitpack.pack(torch.cat(stream), 1)))

    def _decode(self, wire: Tensor, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
        count, width = matrix_shape(shape)
        book, work = self._book(width, wire.device), torch.promote_types(dtype, torch.float32)
        scale = from_raw(wire[: 2 * count], torch.int16).view(-1, 1)
        stream = bitpack.unpack(wire[2 * count :], self.row_bits(width) * count, 1)
        order = in_order(scale, book)
        codes = torch.zeros(*order.shape, width, dtype=torch.uint8, device=wire.device)
        for own, planes in zip(codes, book.planes[book.classes(count)]):
            for p, plane in enumerate(planes):
                size = len(own) * len(plane)
                part = stream[:size].view(len(own), len(plane)) << p
                if len(plane) == width:
                    own |= part
                else:
                    own[:, plane] |= part
                stream = stream[size:]
        y = from_codes(codes, book, work).view(count, width)
        if len(order) > 1:
            y = torch.empty_like(y).index_copy_(0, order.view(-1), y)
        if book.basis is not None:
            y = y @ book.basis.to(work).T
        factor = torch.exp2(
            scale.to(work) / (2 * octave_of(book, work))
        )  # twice, so that the ends of the range are reached
        y = torch.where(scale == EMPTY, 0, y * factor * factor)
        limit = torch.finfo(dtype).max
        if book.basis is None:
            y = hadamard.rotate(y.reshape(-1), block_of(width), derive("rotate", seed), inverse=True)
        return torch.nan_to_num(y, nan=0.0).clamp(-limit, limit)

    def _nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        count, width = matrix_shape(shape)
        return 2 * count + bitpack.packed_bytes(self.row_bits(width) * count, 1)  # a book has as many

    def _book(self, width: int, device: torch.device) -> Book:
        """The book for rows of that width; equal bits for all where none was made."""
        if self.book is not None and self.book.bits.shape[1] == width:
            return self.book
        return Book.even(self.row_bits(width), width, device)


def in_order(scale: Tensor, book: Book) -> Tensor:
    """int64[classes, rows of a class]: the numbers of rows, from the smallest scale to the largest; equal ones as they
    come. One class: as they come.

    scale: of rows, [rows, 1].
    """
    rows = scale.view(-1)
    classes = len(book.steps[book.classes(len(rows))])
    order = rows.argsort(stable=True) if classes > 1 else torch.arange(len(rows), device=rows.device)
    return order.view(classes, -1)


def columns(rows: Tensor, plane: Tensor) -> Tensor:
    """Those of these numbers; without a copy where that is all of them."""
    return rows if len(plane) == rows.shape[1] else rows[:, plane]


def to_codes(y: Tensor, book: Book) -> Tensor:
    """uint8[classes, rows, d] of rows in order, [classes, rows, d]."""
    part = book.classes(y.shape[0] * y.shape[1])
    bits, steps = book.bits[part, None].to(y.dtype), book.steps[part, None].to(y.dtype)
    parts = torch.where(bits > 0, 1 / steps.clamp_min(_tiny(y)), 0)
    half = torch.exp2(bits - 1).floor()
    return (y * parts).floor_().add_(half).clamp_(torch.zeros_like(bits), torch.exp2(bits) - 1).to(torch.uint8)


def from_codes(codes: Tensor, book: Book, dtype: torch.dtype) -> Tensor:
    """The inverse: rows of the middles of each code's interval, over 1 − E."""
    part = book.classes(codes.shape[0] * codes.shape[1])
    bits, steps = book.bits[part, None].to(dtype), (book.steps * gain(book.bits))[part, None].to(dtype)
    steps = torch.where(bits > 0, steps, 0)
    return codes.to(dtype).sub_(torch.exp2(bits - 1).floor() - 0.5).mul_(steps)


def octave_of(book: Book, work: torch.dtype) -> int:
    """Scales per power of two."""
    return OCTAVE if book.basis is not None or work == torch.float64 else FINER


def longer(y: Tensor, left: Tensor) -> Tensor:
    """By what rows are multiplied so that what is left of them has their length along them, [rows, 1]; 1 of rows of
    which nothing is left.

    y: rows. left: what their codes stand for. Both [rows, d].
    """
    along, whole = (y * left).sum(1, keepdim=True), y.square().sum(1, keepdim=True)
    return torch.where(along > 0, whole / along.clamp_min(_tiny(y)), 1).clamp(1 / MOST_GROWTH, MOST_GROWTH)


def gain(bits: Tensor) -> Tensor:
    """1/(1 − E) of so many bits, int64[…]; 1 of none."""
    return _gains(bits.device)[bits]


@cache
def _gains(device: torch.device) -> Tensor:
    return torch.tensor([1.0, *(1 / (1 - error) for error in ERROR[1:])], device=device)


def _tiny(x: Tensor) -> float:
    return torch.finfo(x.dtype).tiny


def block_of(width: int) -> int:
    """Of the rotation: the largest power of two in a row's width, so that no block reaches over a row's end; at most
    1,024, and 128 where it would be small."""
    part = math.gcd(width, 1024)
    return part if part >= 64 else 128
