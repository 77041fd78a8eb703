"""A channel between two stages that is fitted to what it sends: a transform's book, and the means of tokens.

*Books.* The sender of a codec that learns (`Transform` with `every`) makes a new book now and then and sends it along
with the step's first message. Both ends count the steps that were committed, so both know which message is longer, and
by how much. The receiver never computes a book: eigenvectors have other bits on another device.

*Token means.* With `tokens` both ends hold a mean m per token, and x − m(token) is coded:

    z = x − m(token) ;  d = C(z) ;  y = m(token) + d ;  then, of the step's messages,  m ← m + α·mean of d

which is the rule of memory/rule.py with a token for a key, and α = max(tokens, 1/visits). The sender decodes its own
message, so both ends move alike; where their devices round differently, means differ by as little. Gradients have
means too, by the token that comes next. There a code has to be without bias: gradients of tokens nearly cancel, and
d would be made smaller where m is not, which is a direction of its own (docs/from-scratch.md).

*The gradient through the scale* (scale_gradient.py): the sender keeps what it coded until the gradient comes back.

*Bits of the first steps* (`early_bits`) end with a book for those that follow, where the codec learns.

A book, and means, hold from the next step on: all messages of a step are coded alike, in whatever order, and a step
that is rolled back leaves no trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs import frame as framing
from thinwire.codecs.base import Codec
from thinwire.codecs.transform import Transform
from thinwire.codecs.transform_book import Book
from thinwire.codecs.transform_fit import Moments, fit
from thinwire.errors import UsageError
from thinwire.memory.channel import Channel
from thinwire.memory.scale_gradient import KeptCodes
from thinwire.memory.store import MessageKey
from thinwire.memory.token_means import TokenMeans

EARLY = sorted({int(2 * 1.25**k) for k in range(50)})  # steps after which books are made while training is young
YOUNG = 6  # times `every`: until then
LOOKED = 16  # steps before a book whose messages it is made of, at most


class FittedChannel(Channel):
    """One end of one tensor's messages over a boundary; without memory besides what is said above.

    codec: any; a `Transform` with `every` gets books. seed, name: as of Channel. sends: is this the sending end?
    tokens: the least rate of the token means; 0: there are none.
    scale_gradient: at the sending end, keep what was coded for `correct`?
    """

    def __init__(
        self, codec: Codec, *, seed: int, name: str, sends: bool, tokens: float = 0.0, scale_gradient: bool = False
    ) -> None:
        super().__init__(at(codec, 0), seed=seed, name=name)
        self.plain = codec
        self.sends = sends
        self.means = TokenMeans(tokens) if tokens else None
        self.kept = KeptCodes() if scale_gradient and sends else None
        self.steps = 0  # committed, with messages
        self.seen: Moments | None = None  # of committed steps since the last book; at the sending end
        self._book: Tensor | None = None  # the book in use, as it was sent
        self._coming: Tensor | None = None  # the book that this step brought
        self._step_seen: Moments | None = None
        self._used = False  # was there a message in this step?

    # --- messages

    def send(
        self, key: MessageKey, x: Tensor, *, nonfinite: str = "raise", microbatch: int = 0,
        tokens: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """As of Channel. microbatch: its number in the step. tokens: int[…], of x's rows, for token means."""
        self._used = True
        shape = tuple(x.shape)
        z = x if self.means is None else x - self.means.of(self._told(tokens, shape), x)
        seed = self._seed(self._checked(key))  # type: ignore[arg-type]
        frame = super().send(key, z, nonfinite=nonfinite)
        if self.means is not None or self.kept is not None:
            assert isinstance(self.codec, Codec)
            decoded = self.codec.decode(frame[framing.BYTES :], shape, x.dtype, seed)
            if self.means is not None and tokens is not None:
                self.means.note(tokens, decoded)
            if self.kept is not None:
                self.kept.keep(microbatch, z, decoded)
        if self._looks():
            self._step_seen = Moments.of(z).plus(self._step_seen)
        return torch.cat((frame, self._sealed_book(shape[-1], frame))) if self._carries_book(microbatch) else frame

    def recv(
        self, key: MessageKey, wire: Tensor, shape: Sequence[int], dtype: torch.dtype, *, later: bool = False,
        microbatch: int = 0, tokens: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """As of Channel; further arguments as of `send`."""
        self._used = True
        book = framing.BYTES + Book.nbytes(shape[-1]) if self._carries_book(microbatch) else 0
        cut = max(wire.numel() - book, 0)
        d = super().recv(key, wire[:cut], shape, dtype, later=later)
        if book:
            self._coming = framing.unseal(wire[cut:].clone(), self._book_header())[1].clone()
        if self.means is None:
            return d
        tokens = self._told(tokens, tuple(shape))
        y = d + self.means.of(tokens, d)
        self.means.note(tokens, d)
        return y

    def correct(self, microbatch: int, gradient: Tensor) -> Tensor:
        """At the sending end: the gradient that came back of a micro-batch's message, through the code's scale."""
        return gradient if self.kept is None else self.kept.correct(microbatch, gradient)

    def nbytes(self, key: MessageKey, shape: Sequence[int], dtype: torch.dtype, microbatch: int = 0) -> int:
        book = framing.BYTES + Book.nbytes(shape[-1]) if self._carries_book(microbatch) else 0
        return super().nbytes(key, shape, dtype) + book

    def _told(self, tokens: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        if tokens is None or tuple(tokens.shape) != shape[:-1]:
            found = "none" if tokens is None else f"{tuple(tokens.shape)}"
            raise UsageError(
                f"{self.name}: token means need schedule.step(…, tokens=ids) on every rank, ids of shape {shape[:-1]}, "
                f"not {found}"
            )
        return tokens

    # --- books

    def _carries_book(self, microbatch: int) -> bool:
        return microbatch == 0 and self._due(self.steps)

    def _due(self, steps: int) -> bool:
        """Is a book made after so many steps?"""
        if not isinstance(self.plain, Transform) or not self.plain.every:
            return False
        return due(steps, self.plain.every) or steps + 1 == self.plain.early_steps

    def _looks(self) -> bool:
        """Are this step's messages among those that the next book is made of?"""
        return self.sends and any(self._due(self.steps + ahead) for ahead in range(1, LOOKED + 1))

    def _sealed_book(self, width: int, like: Tensor) -> Tensor:
        """A frame with the new book; zeros in it where nothing of that width was seen."""
        body = like.new_zeros(framing.BYTES + Book.nbytes(width))
        if self.seen is not None and len(self.seen.products) == width:
            assert isinstance(self.plain, Transform)
            body[framing.BYTES :] = fit(self.plain.at(self.steps + 1), self.seen).raw()
        self._coming = body[framing.BYTES :].clone()
        self.stats.count(body.numel(), 0)
        return framing.seal(self._book_header(), body)

    def _book_header(self) -> framing.Header:
        return framing.Header(0, 0, self.step, framing.key_hash(f"book {self.name}"))

    def _take(self, raw: Tensor) -> None:
        """Use a book from now on."""
        assert isinstance(self.plain, Transform)
        width = Book.width(raw.numel())
        if width is None:
            raise UsageError(f"{self.name}: a book of {raw.numel()} bytes is not one of a transform")
        self._book = raw
        self.codec = self.plain.at(self.steps).with_book(Book.read(raw, width))

    # --- steps

    def _open_step(self) -> None:
        self._coming, self._step_seen, self._used = None, None, False
        if self.kept is not None:
            self.kept.clear()

    def begin(self, step: int | None = None) -> None:
        super().begin(step)
        self._open_step()
        if self.means is not None:
            self.means.end_step(keep=False)

    def commit(self) -> None:
        super().commit()
        if self.means is not None:
            self.means.end_step(keep=True)
        self.steps += self._used
        if self._coming is not None:
            self.seen = None
            self._take(self._coming)
        elif self._used and isinstance(self.plain, Transform) and self.steps == self.plain.early_steps:
            self.codec = self.plain.at(self.steps)
        if self._step_seen is not None:
            self.seen = self._step_seen.plus(self.seen)
        self._open_step()

    # --- checkpoints

    def state_dict(self, mirrors: bool = True) -> dict[str, Tensor]:
        out = super().state_dict(mirrors) | {"fitted/steps": torch.tensor(self.steps)}
        if self._book is not None:
            out["fitted/book"] = self._book.clone()
        for prefix, part in (("fitted/seen/", self.seen), ("fitted/means/", self.means)):
            if part is not None:
                out |= {f"{prefix}{name}": value.clone() for name, value in part.tensors().items()}
        return out

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({name: value for name, value in state.items() if not name.startswith("fitted/")})
        own = {name.removeprefix("fitted/"): value for name, value in state.items() if name.startswith("fitted/")}
        self.steps = int(own.get("steps", 0))
        self.codec, self._book, self.seen = at(self.plain, self.steps), None, None
        if "book" in own and isinstance(self.plain, Transform) and self.plain.every:
            self._take(own["book"].clone())
            fitted = self.codec
            assert isinstance(fitted, Transform)
            if fitted.book and int(fitted.book.bits[0].sum()) != fitted.row_bits(fitted.book.bits.shape[1]):
                self.codec, self._book = at(self.plain, self.steps), None  # it is of another number of bits
        if "seen/count" in own:
            self.seen = Moments.read({name.removeprefix("seen/"): value for name, value in own.items()})
        if self.means is not None:
            self.means.read({n.removeprefix("means/"): v for n, v in own.items() if n.startswith("means/")})


def at(codec: Codec, step: int) -> Codec:
    """A codec with the bits of that step."""
    return codec.at(step) if isinstance(codec, Transform) else codec


def due(steps: int, every: int) -> bool:
    """Is a book made after so many steps? every: of Transform."""
    return every > 0 and steps > 0 and (steps % every == 0 or (steps < YOUNG * every and steps in EARLY))


def more_of(channel: Channel, microbatch: int, **more: Tensor | None) -> dict[str, Any]:
    """What a fitted channel is told of a message besides; nothing, of another channel.

    microbatch: its number. more: tokens.
    """
    return {"microbatch": microbatch, **more} if isinstance(channel, FittedChannel) else {}
