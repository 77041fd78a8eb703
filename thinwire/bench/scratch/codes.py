"""What a boundary does to values, without messages: the formulas of codecs and fitted channels, fit for a CUDA graph.

A lane makes frames, sums and seeds on the host, which a graph cannot hold. Here a code is a function of tensors: the
same scales, steps and codes as the codec's, of random signs that the device draws itself. tests/test_scratch_formulas.py
compares both. On a card products are of bfloat16, and what `fused` marks is one kernel each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire.codecs import Cast, Codec, Identity, Quantize, Rotated, make
from thinwire.codecs.transform import CLASSES, MOST_BITS, OCTAVE, Book, Transform, block_of
from thinwire.codecs.transform_fit import LOOKED_AT, Moments, allotted, eigenvectors, energies_of, spread
from thinwire.kernels.quantize import SHRINKS, choose_scales, qmax, round_codes, spare_level
from thinwire.kernels.scales import decode_scale, encode_scale
from thinwire.memory.fitted import LOOKED, due

TINY = torch.finfo(torch.float32).tiny
SAMPLED = 8  # of so many rows one is looked at for errors
LARGEST = torch.finfo(torch.float32).max
COMPILED = {"cuda"}  # devices for which torch compiles formulas
Formula = Callable[..., Any]


def fused(formula: Formula) -> Formula:
    """A function of tensors that torch compiles where the first of them is on a card."""
    quick: list[Formula] = []

    @wraps(formula)
    def call(x: Tensor, *more: Any) -> Any:
        if x.device.type not in COMPILED:
            return formula(x, *more)
        if not quick:
            quick.append(torch.compile(formula, dynamic=False))
        return quick[0](x, *more)

    return call


class Tokens(NamedTuple):
    """Of a step. ids: int64[…]. counts: float32[vocabulary], how often each is among them."""

    ids: Tensor
    counts: Tensor

    @staticmethod
    def of(ids: Tensor, vocabulary: int) -> Tokens:
        """Those of ids."""
        ones = torch.ones(ids.numel(), device=ids.device)
        return Tokens(ids, torch.zeros(vocabulary, device=ids.device).index_add_(0, ids.reshape(-1), ones))


class Code:
    """One direction over one boundary. codec: what is sent. Call it with values, float[…, d], and the rows' tokens."""

    looking = True  # does it add up what books are made of, and errors, in this step?

    def __init__(self, codec: Codec) -> None:
        self.codec = codec

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
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
        blocks = x.reshape(-1, codec.block).float()
        mode = least_squares if codec.scale == "mse" else by_magnitude
        return mode(blocks, codec.bits, codec.scale == "full").view(x.shape).to(x.dtype)
    raise NotImplementedError(f"{codec}: has no formula here")


@fused
def by_magnitude(blocks: Tensor, bits: int, full: bool) -> Tensor:
    """What a Quantize leaves of blocks, float32[B, block], whose scales are their largest magnitudes'."""
    scale = choose_scales(blocks, bits, False, torch.float32, full)[0]
    return round_codes(blocks, scale, bits, spare_level(blocks, torch.float32, False, full), None) * scale[:, None]


@fused
def least_squares(blocks: Tensor, bits: int, full: bool = False) -> Tensor:
    """The same where scales are those of least squared error, compared in float32 instead of in integers."""
    most = qmax(bits)
    absmax = blocks.abs().amax(1, keepdim=True)
    sign = torch.where(blocks.amax(1, keepdim=True) < absmax, -1.0, 1.0)
    unit = blocks / absmax.clamp_min(TINY) * sign
    best = torch.full_like(absmax, LARGEST)
    shrink = torch.ones_like(absmax)
    for part in (1 - number / 20 for number in range(SHRINKS)):
        step = part / most
        error = (unit - (unit / step).round().clamp(-most, most + 1) * step).square().sum(1, keepdim=True)
        shrink = torch.where(error < best, part, shrink)
        best = torch.minimum(best, error)
    scale = decode_scale(encode_scale(absmax * shrink, most, LARGEST)) * sign
    inverse = torch.where(scale == 0, 0, 1 / scale)
    return (blocks * inverse).round().clamp(-most, most + 1) * scale


def random_signs(like: Tensor) -> Tensor:
    """±1 of every value."""
    return torch.randint(0, 2, like.shape, device=like.device, dtype=torch.int8).mul_(2).sub_(1)


def rotated(x: Tensor, signs: Tensor, back: bool = False) -> Tensor:
    """A Hadamard transform of rows after signs; back: undone."""
    x = x.to(work(x))
    matrix = hadamard_matrix(x.shape[-1], x.device).to(x.dtype)
    return (x @ matrix) * signs if back else (x * signs) @ matrix


def work(x: Tensor) -> torch.dtype:
    """Of products."""
    return torch.bfloat16 if x.is_cuda else torch.float32


@cache
def hadamard_matrix(size: int, device: torch.device) -> Tensor:
    """float32[size, size], orthonormal and symmetric."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return (matrix / size**0.5).to(device)


@fused
def beside_means(x: Tensor, means: Tensor | None) -> tuple[Tensor, Tensor]:
    """x beside the means of its tokens, and the scale of each row, in sixteenths of octaves."""
    rows = x.float() if means is None else x.float() - means
    rms = (rows.square().mean(1, keepdim=True)).sqrt().clamp_min(TINY)
    return rows.to(work(x)), torch.exp2(torch.round(OCTAVE * torch.log2(rms)) / OCTAVE)


@fused
def quantised(y: Tensor, scale: Tensor, classes: Tensor, steps: Tensor, bits: Tensor) -> Tensor:
    """What to_codes and from_codes leave of rows. y: float[N, d]. scale: [N, 1]. classes: int64[N], of each row.
    steps, bits: of each class, [c, d]."""
    step, number = steps[classes], bits[classes].float()
    half = torch.exp2(number - 1).floor()
    codes = torch.floor(y.float() / scale / step.clamp_min(TINY))
    codes = torch.minimum(torch.maximum(codes, -half), torch.exp2(number) - 1 - half)
    return (torch.where(number > 0, (codes + 0.5) * step, 0) * scale).to(y.dtype)


@fused
def blurred(y: Tensor, scale: Tensor, classes: Tensor, steps: Tensor, bits: Tensor) -> Tensor:
    """What the best code of normal values would leave: (1 − D)·y + √(D·(1 − D))·σ·noise, D = 4^(−bits). σ: steps."""
    error = torch.exp2(-2 * bits[classes])
    noise = torch.randn(y.shape, device=y.device) * scale * steps[classes]
    return ((1 - error) * y.float() + (error * (1 - error)).sqrt() * noise).to(y.dtype)


class TransformCode(Code):
    """Of a Transform: by rotation, or in a learnt basis; with token means before it where `tokens` is not 0.

    codec: as configured. width: of rows. vocabulary: of tokens. tokens: rate of their means. ideal: as the best code of
    so many bits in the same basis would err, by the rate-distortion bound; it cannot be had. Books and means follow
    the rules of memory/fitted.py.
    """

    codec: Transform

    def __init__(
        self, codec: Transform, width: int, vocabulary: int, tokens: float, device: torch.device, ideal: bool = False
    ) -> None:
        super().__init__(codec)
        self.width, self.rate, self.ideal = width, tokens, ideal
        room = 1 + CLASSES if codec.learns else 1
        self.basis = torch.zeros(width, width, device=device) if codec.learns else None
        self.steps, self.bits = (torch.zeros(room, width, device=device) for _ in range(2))
        self.made = False  # is there a book?
        shapes = (width, width), (CLASSES,), ()
        self.seen = Moments(*(torch.zeros(shape, device=device) for shape in shapes))
        self.coming: Moments | None = None  # what the book that this step brings is made of
        self.last: tuple[Moments, Tensor] | None = None  # what the book in use was made of, and its basis
        self.table = torch.zeros(vocabulary if tokens else 0, width, device=device)
        self.visits = torch.zeros(len(self.table), device=device)
        self.errors = torch.zeros(2, device=device)  # energy of errors and of values
        self.set_bits(codec.bits)

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        rows, flat = x.reshape(-1, self.width), tokens.ids.reshape(-1)
        means = self.table[flat] if self.rate else None
        z, scale = beside_means(rows, means)
        if self.codec.learns and self.looking:
            self._look(z)
        decoded = self._through(z, scale).float()
        if self.rate:
            self._follow(flat, tokens.counts, decoded)
        out = decoded if means is None else means + decoded
        if self.looking:
            some, left = rows[::SAMPLED].float(), out[::SAMPLED]
            self.errors += torch.stack(((some - left).square().sum(), (some - some.mean(0)).square().sum()))
        return out.view(x.shape).to(x.dtype)

    def _through(self, z: Tensor, scale: Tensor) -> Tensor:
        """Of Transform's two ends what becomes of rows."""
        code = blurred if self.ideal else quantised
        if self.made and self.basis is not None:
            basis = self.basis.to(z.dtype)
            room = slice(1, None) if len(z) % CLASSES == 0 else slice(0, 1)
            classes = class_of(scale, CLASSES if room.start else 1)
            return code(z @ basis, scale, classes, self.steps[room], self.bits[room]) @ basis.T
        blocks = z.view(-1, block_of(self.width))
        signs = random_signs(blocks)
        y = rotated(blocks, signs).view(z.shape)
        values = code(y, scale, class_of(scale, 1), self.steps[:1], self.bits[:1])
        return rotated(values.view(blocks.shape), signs, back=True).view(z.shape)

    def _look(self, z: Tensor) -> None:
        rows = z[:: max(1, -(-len(z) // LOOKED_AT))].float()
        unit = rows / rows.square().mean(1, keepdim=True).sqrt().clamp_min(TINY)
        self.seen.products += unit.T @ unit / len(unit)
        self.seen.energies += energies_of(rows.square().mean(1))
        self.seen.count += 1

    def _follow(self, ids: Tensor, counts: Tensor, decoded: Tensor) -> None:
        total = torch.zeros_like(self.table).index_add_(0, ids, decoded)
        self.visits += counts > 0
        moved(self.table, total, self.visits, counts, self.rate)

    def set_bits(self, bits: float) -> None:
        self.codec = Transform(bits, self.codec.every)
        if self.last is not None:
            self.take(*self.last)
        elif self.ideal:
            self.steps.fill_(1)
            self.bits.fill_(bits)
        else:
            even = Book.even(self.codec.row_bits(self.width), self.width, self.steps.device)
            self.steps.copy_(even.steps.expand_as(self.steps))
            self.bits.copy_(even.bits.expand_as(self.bits))

    def take(self, moments: Moments, basis: Tensor) -> None:
        """Use the book of what was seen, in that basis, from now on."""
        assert self.basis is not None
        steps, bits = (filled if self.ideal else allotted)(self.codec, moments, basis)
        self.basis.copy_(basis)
        self.steps.copy_(steps)
        self.bits.copy_(bits)
        self.last, self.made = (moments, basis), True

    def before(self, step: int) -> bool:
        """A book is sent with the message of a step, and holds from the next one on."""
        if not self.codec.learns:
            return False
        first = books([self])
        if due(step, self.codec.every):
            self.coming = Moments.read(self.seen.tensors())
        if self.coming is not None or not looked_at(step - 1, self.codec.every):
            for total in self.seen.tensors().values():
                total.zero_()
        return first


def filled(codec: Transform, moments: Moments, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Deviations, and bits by reverse water-filling: what the best code of so many bits would give each component."""
    variances, energies = spread(moments, basis)
    every = torch.cat((variances[None], energies[:, None] * variances))
    logs = every.log2() / 2
    low, high = logs.amin() - MOST_BITS, logs.amax()
    for _ in range(30):
        middle = (low + high) / 2
        over = (logs - middle).clamp_min(0)[1:].mean() > codec.bits
        low, high = torch.where(over, middle, low), torch.where(over, high, middle)
    return variances.sqrt().expand_as(logs), (logs - low).clamp_min(0)


def moved(table: Tensor, total: Tensor, visits: Tensor, counts: Tensor, least: float) -> None:
    """Means after a step, in place. total: of what was decoded, by token."""
    rate = (1 / visits.clamp_min(1)).clamp_min(least)
    table += (rate / counts.clamp_min(1))[:, None] * total


def class_of(scale: Tensor, classes: int) -> Tensor:
    """int64[N]: the class of each row by its scale, [N, 1], as `in_order` cuts them."""
    rows = scale.view(-1)
    if classes == 1:
        return torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    ranks = torch.arange(len(rows), device=rows.device)
    return torch.empty_like(ranks).index_copy_(0, rows.argsort(stable=True), ranks) // (len(rows) // classes)


def looked_at(step: int, every: int) -> bool:
    """Are messages of that step among those that the next book is made of?"""
    return any(due(step + ahead, every) for ahead in range(1, LOOKED + 1))


def books(codes: Sequence[Code]) -> bool:
    """Give codes the books that the last step brought, all at once; True: the first ones."""
    new = [code for code in codes if isinstance(code, TransformCode) and code.coming is not None]
    if not new:
        return False
    first = not new[0].made
    found = [code.coming for code in new if code.coming is not None]
    bases = eigenvectors(torch.stack([moments.products / moments.count for moments in found]))
    for code, moments, basis in zip(new, found, bases):
        code.take(moments, basis)
        code.coming = None
    return first
