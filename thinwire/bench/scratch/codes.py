"""What a boundary does to values, without messages: the formulas of codecs and fitted channels, fit for a CUDA graph.

A lane makes frames, sums and seeds on the host, which a graph cannot hold. Here a code is a function of tensors: the
same scales, steps and codes as the codec's, of random signs that the device draws itself.
tests/test_scratch_formulas.py compares both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.bench.scratch.formulas import (
    TINY,
    beside_means,
    blurred,
    class_of,
    coded,
    lengthened,
    quantised,
    random_signs,
    rotated,
)  # fmt: skip
from thinwire.codecs import Codec
from thinwire.codecs.transform import Transform, block_of, gain
from thinwire.codecs.transform_book import CLASSES, MOST_BITS, Book
from thinwire.codecs.transform_fit import LOOKED_AT, Moments, allotted, eigenvectors, energies_of, spread
from thinwire.memory.fitted import LOOKED, due

SAMPLED = 8  # of so many rows one is looked at for errors
Kept = tuple[Tensor, Tensor] | None


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
    keeps = False  # will the gradient pass through the code's scale?

    def __init__(self, codec: Codec) -> None:
        self.codec = codec

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        """What the other end has of x."""
        return self.send(x, tokens)[0]

    def send(self, x: Tensor, tokens: Tokens) -> tuple[Tensor, Kept]:
        """What the other end has of x; with `keeps` also what was coded, and the code's error of that."""
        return coded(x, self.codec), None

    def set_bits(self, bits: float) -> None:
        """Other bits from the next step on."""
        raise NotImplementedError(f"{self.codec}: its bits cannot change")

    def before(self, step: int) -> bool:
        """Called before a step, from 0, outside of a graph; True: what was captured no longer holds."""
        return False


class FittedCode(Code):
    """Of values beside the means of their tokens, where `tokens` is not 0.

    codec: of what is left. width: of rows. vocabulary: of tokens. tokens: rate of their means, by the rules of
    memory/fitted.py.
    """

    def __init__(self, codec: Codec, width: int, vocabulary: int, tokens: float, device: torch.device) -> None:
        super().__init__(codec)
        self.width, self.rate = width, tokens
        self.table = torch.zeros(vocabulary if tokens else 0, width, device=device)
        self.visits = torch.zeros(len(self.table), device=device)
        self.errors = torch.zeros(2, device=device)  # energy of errors and of values

    def send(self, x: Tensor, tokens: Tokens) -> tuple[Tensor, Kept]:
        rows, flat = x.reshape(-1, self.width), tokens.ids.reshape(-1)
        means = self.table[flat] if self.rate else None
        decoded = self._decoded(rows, means).float()
        if self.rate:
            self._follow(flat, tokens.counts, decoded)
        out = decoded if means is None else means + decoded
        if self.looking:
            some, left = rows[::SAMPLED].float(), out[::SAMPLED]
            self.errors += torch.stack(((some - left).square().sum(), (some - some.mean(0)).square().sum()))
        y = out.view(x.shape).to(x.dtype)
        if not self.keeps:
            return y, None
        z = rows.float() if means is None else rows.float() - means
        return y, (z.view(x.shape), (decoded - z).view(x.shape))

    def _decoded(self, rows: Tensor, means: Tensor | None) -> Tensor:
        """What the other end has of rows beside their means."""
        return coded(rows.float() if means is None else rows.float() - means, self.codec)

    def _follow(self, ids: Tensor, counts: Tensor, decoded: Tensor) -> None:
        total = torch.zeros_like(self.table).index_add_(0, ids, decoded)
        self.visits += counts > 0
        moved(self.table, total, self.visits, counts, self.rate)


class TransformCode(FittedCode):
    """Of a Transform: by rotation, or in a learnt basis, whose books follow the rules of memory/fitted.py.

    Arguments as of FittedCode. ideal: does it err as the best code of so many bits in the same basis would, by the
    rate-distortion bound?
    """

    codec: Transform

    def __init__(
        self, codec: Transform, width: int, vocabulary: int, tokens: float, device: torch.device,
        ideal: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(codec, width, vocabulary, tokens, device)
        self.ideal = ideal
        room = 1 + CLASSES if codec.learns else 1
        self.basis = torch.zeros(width, width, device=device) if codec.learns else None
        self.steps, self.gaps, self.bits = (torch.zeros(room, width, device=device) for _ in range(3))
        self.made = False  # is there a book?
        shapes = (width, width), (CLASSES,), ()
        self.seen = Moments(*(torch.zeros(shape, device=device) for shape in shapes))
        self.coming: Moments | None = None  # what the book that this step brings is made of
        self.last: tuple[Moments, Tensor] | None = None  # what the book in use was made of, and its basis
        self.set_bits(codec.bits)

    def _decoded(self, rows: Tensor, means: Tensor | None) -> Tensor:
        z, scale = beside_means(rows, means)
        if self.codec.learns and self.looking:
            self._look(z)
        return self._through(z, scale)

    def _through(self, z: Tensor, scale: Tensor) -> Tensor:
        """Of Transform's two ends what becomes of rows."""
        room = slice(1, None) if self.made and len(z) % CLASSES == 0 else slice(0, 1)
        classes = class_of(scale, CLASSES if room.start else 1)
        if self.made and self.basis is not None:
            basis = self.basis.to(z.dtype)
            return self._left(z @ basis, scale, classes, room) @ basis.T
        blocks = z.view(-1, block_of(self.width))
        signs = random_signs(blocks)
        values = self._left(rotated(blocks, signs).view(z.shape), scale, classes, room)
        return rotated(values.view(blocks.shape), signs, back=True).view(z.shape)

    def _left(self, y: Tensor, scale: Tensor, classes: Tensor, room: slice) -> Tensor:
        """What arrives of components."""
        if self.ideal:
            return blurred(y, scale, classes, self.steps[room], self.bits[room])
        if self.basis is None or not self.made:
            return lengthened(y, self.steps[:1], self.gaps[:1], self.bits[:1])
        return quantised(y, scale, classes, self.steps[room], self.gaps[room], self.bits[room])

    def _look(self, z: Tensor) -> None:
        rows = z[:: max(1, -(-len(z) // LOOKED_AT))].float()
        unit = rows / rows.square().mean(1, keepdim=True).sqrt().clamp_min(TINY)
        if self.basis is not None:
            self.seen.products += unit.T @ unit / len(unit)
        self.seen.energies += energies_of(rows.square().mean(1))
        self.seen.count += 1

    def set_bits(self, bits: float) -> None:
        self.codec = Transform(bits, self.codec.every)
        if self.last is not None:
            self.take(*self.last)
        elif self.ideal:
            self._hold(torch.ones_like(self.steps), torch.full_like(self.bits, bits))
        else:
            even = Book.even(self.codec.row_bits(self.width), self.width, self.steps.device)
            self._hold(even.steps, even.bits)

    def take(self, moments: Moments, basis: Tensor) -> None:
        """Use the book of what was seen, in that basis, from now on."""
        assert self.basis is not None
        steps, bits = (filled if self.ideal else allotted)(self.codec, moments, basis)
        self.basis.copy_(basis)
        self._hold(steps, bits)
        self.last, self.made = (moments, basis), True

    def _hold(self, steps: Tensor, bits: Tensor) -> None:
        """In place, since a graph has been told where they lie. gaps: between two values that arrive."""
        self.steps.copy_(steps.expand_as(self.steps))
        self.bits.copy_(bits.expand_as(self.bits))
        self.gaps.copy_(self.steps * gain(self.bits.long()))

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


def looked_at(step: int, every: int) -> bool:
    """Are messages of that step among those that the next book is made of?"""
    return any(due(step + ahead, every) for ahead in range(1, LOOKED + 1))


def books(codes: Sequence[Code]) -> bool:
    """Give codes the books that the last step brought, all at once; True: the first ones."""
    new = [code for code in codes if isinstance(code, TransformCode) and code.coming is not None]
    first = any(not code.made for code in new)
    learnt = [code.coming for code in new if code.coming is not None]
    products = [moments.products / moments.count for moments in learnt]
    bases = eigenvectors(torch.stack(products)) if products else ()
    for code, moments, basis in zip(new, learnt, bases):
        code.take(moments, basis)
        code.coming = None
    return first
