"""What both ends of a boundary hold of a transform: basis, steps and bits (transform.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.codecs.base import from_raw, raw_bytes

MOST_BITS = 8
STEP = (0.0, 1.5958, 0.9957, 0.5860, 0.3352, 0.1881, 0.1041, 0.0569, 0.0308)  # of unit variance, by bits
CLASSES = 4  # of rows, by their scales


@dataclass(frozen=True)
class Book:
    """What both ends of a boundary hold.

    basis: float32[d, d], orthonormal but for bfloat16's rounding; None: a Hadamard rotation by the message's seed.
    steps: float32[c, d], bits: int64[c, d], 0 to 8: of all rows alike, and then of each class of rows; without a basis
        there are no classes. planes: of each c per bit the components that have it, as indices.
    """

    basis: Tensor | None
    steps: Tensor
    bits: Tensor
    planes: Sequence[Sequence[Tensor]] = field(repr=False)

    @staticmethod
    def of(basis: Tensor, steps: Tensor, bits: Tensor) -> Book:
        """With its planes. Waits for a card."""
        most = bits.amax(1).tolist()
        return Book(basis, steps, bits, [[(b > p).nonzero().view(-1) for p in range(m)] for b, m in zip(bits, most)])

    @staticmethod
    def even(total: int, width: int, device: torch.device) -> Book:
        """Without a basis: so many bits of a row, as equal as can be."""
        least, more = divmod(min(total, MOST_BITS * width), width)
        every = torch.arange(width, device=device)
        steps = torch.full((1, width), STEP[least], device=device)
        if more:
            steps[0, :more] = STEP[least + 1]
        planes = [every] * least + ([every[:more]] if more else [])
        return Book(None, steps, (least + (every < more).long())[None], [planes])

    def classes(self, rows: int) -> slice:
        """Which of its rows' classes hold for a message of so many rows: all alike where they cannot be cut evenly."""
        return slice(1, None) if len(self.steps) > 1 and rows % (len(self.steps) - 1) == 0 else slice(0, 1)

    @staticmethod
    def nbytes(width: int) -> int:
        """Of one with a basis, as it is sent."""
        return 2 * width * width + 5 * (CLASSES + 1) * width

    @staticmethod
    def width(nbytes: int) -> int | None:
        """Of rows whose book has so many bytes; None: of no book."""
        part = 5 * (CLASSES + 1)
        width = round((part * part + 8 * nbytes) ** 0.5 - part) // 4
        return width if Book.nbytes(width) == nbytes else None

    def raw(self) -> Tensor:
        """As it is sent: the basis in bfloat16, steps, bits."""
        assert self.basis is not None
        return torch.cat([raw_bytes(x) for x in (self.basis.bfloat16(), self.steps, self.bits.to(torch.uint8))])

    @staticmethod
    def read(raw: Tensor, width: int) -> Book | None:
        """From `raw` bytes; None: zeros, there is none yet. ValueError where they are no book. Waits for a card."""
        cut = 2 * width * width
        end = cut + 4 * (CLASSES + 1) * width
        basis = from_raw(raw[:cut], torch.bfloat16).float().view(width, width)
        steps, bits = from_raw(raw[cut:end], torch.float32).view(-1, width), raw[end:].long().view(-1, width)
        if not bool(bits.any()):
            return None
        if int(bits.max()) > MOST_BITS or not bool(torch.isfinite(basis).all() & torch.isfinite(steps).all()):
            raise ValueError("the book of a transform has impossible values")
        if int(bits[1:].sum()) != CLASSES * int(bits[0].sum()):
            raise ValueError("the book of a transform gives classes of rows too many or too few bits")
        return Book.of(basis, steps, bits)
