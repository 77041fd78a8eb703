"""What a boundary does to values, without messages: the formulas of codecs and fitted channels, fit for a CUDA graph.

A lane makes frames, sums and seeds on the host, which a graph cannot hold. Here a code is a function of tensors: the
same scales, steps and codes as the codec's, of random signs that the device draws itself. tests/test_bench_scratch.py
compares both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs import Cast, Codec, Identity, Quantize, Rotated, make
from thinwire.codecs.transform import CLASSES, OCTAVE, Book, Transform, block_of, in_order
from thinwire.codecs.transform_fit import LOOKED_AT, Moments, energies_of, fit
from thinwire.kernels.quantize import choose_scales, round_codes, spare_level
from thinwire.memory.fitted import LOOKED, due

TINY = torch.finfo(torch.float32).tiny
SAMPLED = 8  # of so many rows one is looked at for errors


class Code:
    """One direction over one boundary. codec: what is sent. Call it with values, float[…, d], and the rows' tokens."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec

    def __call__(self, x: Tensor, tokens: Tensor) -> Tensor:
        """What the other end has of x."""
        return coded(x, self.codec)

    def set_bits(self, bits: float) -> None:
        """Other bits from the next step on."""
        raise NotImplementedError(f"{self.codec}: its bits cannot change")

    def before(self, step: int) -> bool:
        """Called before a step, from 0, outside of a graph; True: what was captured no longer holds."""
        return False


def coded(x: Tensor, codec: Codec) -> Tensor:
    """What a codec without state leaves of x, with signs drawn anew."""
    if isinstance(codec, Identity):
        return x
    if isinstance(codec, Cast):
        return x.to(torch.bfloat16).to(x.dtype)
    if isinstance(codec, Rotated):
        signs = random_signs(x.reshape(-1, codec.block))
        return rotated(coded(rotated(x.reshape(-1, codec.block), signs), codec.inner), signs, back=True).view(x.shape)
    if isinstance(codec, Quantize) and codec.rounding == "nearest":
        blocks, mse, full = x.reshape(-1, codec.block).float(), codec.scale == "mse", codec.scale == "full"
        scale = choose_scales(blocks, codec.bits, mse, torch.float32, full)[0]
        codes = round_codes(blocks, scale, codec.bits, spare_level(blocks, torch.float32, mse, full), None)
        return (codes * scale[:, None]).view(x.shape).to(x.dtype)
    raise NotImplementedError(f"{codec}: has no formula here")


def random_signs(like: Tensor) -> Tensor:
    """±1 of every value."""
    return torch.randint(0, 2, like.shape, device=like.device, dtype=torch.int8).mul_(2).sub_(1)


def rotated(x: Tensor, signs: Tensor, back: bool = False) -> Tensor:
    """A Hadamard transform of rows after signs; back: undone."""
    matrix = hadamard_matrix(x.shape[-1], x.device).to(x.dtype)
    return (x @ matrix) * signs if back else (x * signs) @ matrix


def hadamard_matrix(size: int, device: torch.device) -> Tensor:
    """float32[size, size], orthonormal and symmetric."""
    key = size, device
    if key not in _MATRICES:
        matrix = torch.ones(1, 1)
        while len(matrix) < size:
            matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
        _MATRICES[key] = (matrix / size**0.5).to(device)
    return _MATRICES[key]


_MATRICES: dict[tuple[int, torch.device], Tensor] = {}


class TransformCode(Code):
    """Of a Transform: by rotation, or in a learnt basis; with token means before it where `tokens` is not 0.

    codec: as configured. width: of rows. vocabulary: of tokens. tokens: rate of their means. Books and means follow the
    rules of memory/fitted.py.
    """

    codec: Transform

    def __init__(self, codec: Transform, width: int, vocabulary: int, tokens: float, device: torch.device) -> None:
        super().__init__(codec)
        self.width, self.rate = width, tokens
        even = Book.even(codec.row_bits(width), width, device)
        basis = torch.zeros(width, width, device=device) if codec.learns else None
        room = 1 + CLASSES if codec.learns else 1
        self.book = Book(basis, even.steps.repeat(room, 1), even.bits.repeat(room, 1), ())
        self.made = False  # is there a book?
        shapes = (width, width), (CLASSES,), ()
        self.seen = Moments(*(torch.zeros(shape, device=device) for shape in shapes))
        self.coming: Moments | None = None  # what the book that this step brings is made of
        self.last: Moments | None = None  # what the book in use was made of
        self.table = torch.zeros(vocabulary if tokens else 0, width, device=device)
        self.visits = torch.zeros(len(self.table), device=device)
        self.errors = torch.zeros(2, device=device)  # energy of errors and of values

    def __call__(self, x: Tensor, tokens: Tensor) -> Tensor:
        rows, flat = x.reshape(-1, self.width).float(), tokens.reshape(-1)
        means = self.table[flat] if self.rate else torch.zeros((), device=x.device)
        z = rows - means
        if self.codec.learns:
            self._look(z)
        decoded = self._through(z)
        if self.rate:
            self._follow(flat, decoded)
        out = means + decoded
        some, left = rows[::SAMPLED], out[::SAMPLED]
        self.errors += torch.stack(((some - left).square().sum(), (some - some.mean(0)).square().sum()))
        return out.view(x.shape).to(x.dtype)

    def _through(self, z: Tensor) -> Tensor:
        """Of Transform's two ends what becomes of rows."""
        signs, block = None, block_of(self.width)
        y = z
        if not self.made:
            signs = random_signs(z.view(-1, block))
            y = rotated(z.view(-1, block), signs).view(z.shape)
        rms = torch.linalg.vector_norm(y, dim=1, keepdim=True).div_(self.width**0.5).clamp_min_(TINY)
        scale = torch.exp2(torch.round(OCTAVE * torch.log2(rms)) / OCTAVE)
        book = self.book if self.made else Book(None, self.book.steps[:1], self.book.bits[:1], ())
        order = in_order(scale, book)
        ordered = scale[order]
        values = quantised(y[order].div_(ordered), book).mul_(ordered)
        y = torch.empty_like(y).index_copy_(0, order.view(-1), values.view(y.shape))
        return y if signs is None else rotated(y.view(-1, block), signs, back=True).view(z.shape)

    def _look(self, z: Tensor) -> None:
        rows = z[:: max(1, -(-len(z) // LOOKED_AT))]
        unit = rows / rows.square().mean(1, keepdim=True).sqrt().clamp_min(TINY)
        self.seen.products += unit.T @ unit / len(unit)
        self.seen.energies += energies_of(rows.square().mean(1))
        self.seen.count += 1

    def _follow(self, tokens: Tensor, decoded: Tensor) -> None:
        count = torch.zeros_like(self.visits).index_add_(0, tokens, torch.ones_like(decoded[:, 0]))
        total = torch.zeros_like(self.table).index_add_(0, tokens, decoded)
        self.visits += count > 0
        rate = (1 / self.visits.clamp_min(1)).clamp_min(self.rate)
        self.table += (rate / count.clamp_min(1))[:, None] * total

    def set_bits(self, bits: float) -> None:
        self.codec = Transform(bits, self.codec.every)
        if self.last is not None:
            self._take(fit(self.codec, self.last))
        else:
            self._take(Book.even(self.codec.row_bits(self.width), self.width, self.book.steps.device))

    def _take(self, book: Book) -> None:
        self.book.steps.copy_(book.steps)
        self.book.bits.copy_(book.bits)
        if book.basis is not None and self.book.basis is not None:
            self.book.basis.copy_(book.basis)

    def before(self, step: int) -> bool:
        """A book is sent with the message of a step, and holds from the next one on."""
        if not self.codec.learns:
            return False
        first = self.coming is not None and not self.made
        if self.coming is not None:
            self._take(fit(self.codec, self.coming))
            self.last, self.coming, self.made = self.coming, None, True
        if due(step, self.codec.every):
            self.coming = Moments.read(self.seen.tensors())
        if self.coming is not None or not any(
            due(step - 1 + ahead, self.codec.every) for ahead in range(1, LOOKED + 1)
        ):
            for total in self.seen.tensors().values():
                total.zero_()
        return first


def quantised(unit: Tensor, book: Book) -> Tensor:
    """What to_codes and from_codes leave of unit rows in order, float32[classes, rows, d], in few passes."""
    part = book.classes(unit.shape[0] * unit.shape[1])
    bits, steps = book.bits[part, None].float(), book.steps[part, None]
    half = torch.exp2(bits - 1).floor()
    y = unit if book.basis is None else unit @ book.basis
    y = y.div_(steps.clamp_min(TINY)).floor_()
    y = torch.minimum(torch.maximum(y, -half, out=y), torch.exp2(bits) - 1 - half, out=y)
    y.add_(0.5).mul_(torch.where(bits > 0, steps, 0))
    return y if book.basis is None else y @ book.basis.T


class IdealCode(Code):
    """What the best code of so many bits per value would leave of rotated, normal values: the rate-distortion bound.

    x̂ = (1 − D)·x + √(D·(1 − D))·rms·noise, D = 4^(−bits): no code does better, and this one cannot be had.
    """

    def __init__(self, bits: float, device: torch.device) -> None:
        self.error = torch.tensor(4.0**-bits, device=device)

    def __call__(self, x: Tensor, tokens: Tensor) -> Tensor:
        rms = x.float().square().mean(-1, keepdim=True).sqrt()
        noise = torch.randn_like(x, dtype=torch.float32) * rms
        return ((1 - self.error) * x + (self.error * (1 - self.error)).sqrt() * noise).to(x.dtype)

    def set_bits(self, bits: float) -> None:
        self.error.fill_(4.0**-bits)


def code_of(way: Mapping[str, Any], width: int, vocabulary: int, tokens: float, device: torch.device) -> Code:
    """The code of one direction, as a `[wire]` table has it; {"ideal": bits} is the bound."""
    if "ideal" in way:
        return IdealCode(way["ideal"], device)
    codec = make(**way)
    return TransformCode(codec, width, vocabulary, tokens, device) if isinstance(codec, Transform) else Code(codec)
