"""Encoding and decoding of keyed values against their state: the body of a message, at one end of a wire.

A message carries one key's tensor, or a tensor whose rows have a key each (a sample's activation). Its body is made of
pieces, one call of the codec each, and for rows ends in a bitmap of the warm ones:

    one key   the codec's bytes, then x in full on a refresh
    rows      the warm rows, changes against their mirrors | the cold rows, by the cold codec | bitmap

A memory with a cold start (`Delta`) codes changes against mirrors; rows of a whole number of coding blocks then share a
piece, and a row's values do not depend on its neighbours, since no block reaches over a row's end. All other memories
code one key per piece, by the rule (rule.py). The two ends run the mirror image of the same lines, and the state is
written only when all pieces are through.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.codecs import frame as framing
from thinwire.codecs.base import Codec, is_finite
from thinwire.codecs.exact import Identity
from thinwire.memory.state import KeyedState
from thinwire.memory.stats import Stats
from thinwire.memory.store import Key, MessageKey

EXACT = Identity()

SeedOf = Callable[[Key], int]  # the seed of a key's message: of (run, step, key, send count), equal at both ends
Write = tuple[str, Key, Tensor]  # (slot, key, its next value)


@dataclass(frozen=True)
class Piece:
    """What one call of the codec codes: the values of `keys`, each of shape `row`, as one tensor of shape `shape`."""

    keys: Sequence[Key]
    row: tuple[int, ...]
    shape: tuple[int, ...]
    at: int | list[int] | None  # which rows of the message's tensor it is; None: the whole tensor
    warm: bool  # against mirrors
    seed: int
    refresh: bool  # x follows in full
    nbytes: int


@dataclass(frozen=True)
class Layout:
    """A body before it is written: its pieces in order, `warm` per row (None: a message of one key), and its length."""

    pieces: list[Piece]
    warm: list[bool] | None
    kind: int  # of the frame
    nbytes: int


@dataclass(frozen=True)
class Encoded:
    """What encoding a piece gave besides its bytes."""

    finite: Tensor | bool
    writes: list[Write] = field(default_factory=list)
    decoded: Tensor | None = None  # what the other end will have; None: not computed


class KeyedCodec:
    """codec: C. state: the keyed state, with the memory. stats: where keys and errors are counted."""

    def __init__(self, codec: Codec, state: KeyedState, stats: Stats) -> None:
        self.codec, self.state, self.stats = codec, state, stats

    # --- what a body will hold, known at both ends before anything is sent

    def layout(
        self, key: MessageKey, shape: tuple[int, ...], dtype: torch.dtype, seed_of: SeedOf,
        warm: list[bool] | None = None,
    ) -> Layout:  # fmt: skip
        """The layout of a message of that shape and dtype; `warm` per key, as this end's state has it unless given."""
        if isinstance(key, (str, int)):
            piece = self._piece(
                [key], shape, shape, None, warm[0] if warm else self.state.is_warm(key, shape), dtype, seed_of
            )
            kind = framing.REFRESH if piece.refresh else 0
            kind |= framing.WARM if piece.warm and self.state.memory.cold_start else 0
            return Layout([piece], None, kind, piece.nbytes)
        row = shape[1:]
        flags = [self.state.is_warm(one, row) for one in key] if warm is None else warm
        pieces = []
        for flag in (True, False):
            at = [i for i, one in enumerate(flags) if one == flag]
            if at and self._codes_together(flag, row):
                keys = [key[i] for i in at]
                rows = None if len(at) == len(key) else at
                pieces.append(self._piece(keys, row, (len(at), *row), rows, flag, dtype, seed_of))
            else:
                pieces += [self._piece([key[i]], row, row, i, flag, dtype, seed_of) for i in at]
        size = sum(piece.nbytes for piece in pieces) + framing.bitmap_bytes(len(flags))
        return Layout(pieces, flags, framing.ROWS, size)

    def _codec(self, warm: bool) -> Codec:
        memory = self.state.memory
        return (memory.cold or EXACT) if memory.cold_start and not warm else self.codec

    def _codes_together(self, warm: bool, row: tuple[int, ...]) -> bool:
        """May rows share a piece? With a memory with a cold start, and rows of whole blocks."""
        codec, numel = self._codec(warm), math.prod(row)
        if not self.state.memory.cold_start or codec.span is None or not numel:
            return False
        return numel % (math.lcm(codec.span, codec.gate_block) if warm else codec.span) == 0

    def _piece(
        self, keys: Sequence[Key], row: tuple[int, ...], shape: tuple[int, ...], at: int | list[int] | None, warm: bool,
        dtype: torch.dtype, seed_of: SeedOf,
    ) -> Piece:  # fmt: skip
        memory, codec, seed = self.state.memory, self._codec(warm), seed_of(keys[0])
        refresh = not memory.cold_start and memory.refreshes(seed)
        if memory.cold_start and warm:
            size = codec.nbytes_onto(shape, dtype, memory.gate)
        else:
            size = codec.nbytes(shape, dtype) + (EXACT.nbytes(shape, dtype) if refresh else 0)
        return Piece(keys, row, shape, at, warm, seed, refresh, size)

    # --- encoding

    def encode(self, layout: Layout, x: Tensor, into: Tensor, later: bool = False) -> Tensor | bool:
        """x → the pieces in `into`, uint8[layout.nbytes]; is all of it finite? The state moves only where it is.

        `later`: without waiting for a card. The state moves in any case, to be rolled back by whoever reads the flag,
        which is a 0-d tensor on x's device.
        """
        done: list[tuple[Piece, Tensor, Encoded]] = []
        start = 0
        for piece in layout.pieces:
            part = x if piece.at is None else x[piece.at]
            with _aligned(into[start : start + piece.nbytes]) as room:
                if self.state.memory.cold_start:
                    done.append((piece, part, self._encode_onto_mirrors(piece, part, room, later)))
                else:
                    done.append((piece, part, self._encode_by_rule(piece, part, room, later)))
            start += piece.nbytes
        finite = _all([encoded.finite for _, _, encoded in done])
        if later or finite:
            for piece, part, encoded in done:
                self._keep(piece, encoded.writes)
                if encoded.decoded is not None and self.stats.measures_now:
                    self.stats.measure(self.state.memory.s * part.to(_work_dtype(part.dtype)), encoded.decoded)
        return finite

    def _encode_by_rule(self, piece: Piece, x: Tensor, into: Tensor, later: bool) -> Encoded:
        """u = s·x + η·e − h ;  d = C(u) ;  then e and h after it."""
        memory, key, work = self.state.memory, piece.keys[0], _work_dtype(x.dtype)
        memory.check(self.codec, x.numel())
        value = x.to(work)
        e, h = self.state.residual(key, x.shape), self.state.shift(key, value)
        u = memory.outgoing(value, e, h).to(x.dtype)
        cut = self.codec.nbytes(x.shape, x.dtype)
        finite, writes = self._encode_warm_started(key, u, piece.seed, into[:cut], later)
        if not (later or finite):
            return Encoded(False)
        if piece.refresh:
            EXACT.encode_flagged(x, into=into[cut:])
        if memory.beta is None and not memory.mirrored and not self.stats.measures_now:
            return Encoded(finite, writes)
        own = self.codec.decode(into[:cut], x.shape, x.dtype, piece.seed).to(work)
        if memory.beta is not None:
            writes.append(("e", key, memory.residual(value, e, h, own)))
        moved = memory.next_shift(h, own, self.codec, value.clone() if piece.refresh else None)
        if moved is not None:
            writes.append(("h", key, moved))
        return Encoded(finite, writes, own if h is None else h + own)

    def _encode_warm_started(
        self, key: Key, u: Tensor, seed: int, into: Tensor, later: bool
    ) -> tuple[Tensor | bool, list[Write]]:
        """C(u) in `into`: (finite, writes). Low rank starts from the right factor of the key's last message."""
        if not self.codec.warm_starts:
            _, finite = self.codec.encode_flagged(u, seed, into)
            return finite if later else bool(finite), []
        if not bool(is_finite(u)):
            return False, []
        into.copy_(self.codec.encode(u, seed, prev=self.state.read("q", key)))
        factor = self.codec.right_factor(into, tuple(u.shape), u.dtype)
        return True, [] if factor is None else [("q", key, factor.clone())]

    def _encode_onto_mirrors(self, piece: Piece, x: Tensor, into: Tensor, later: bool) -> Encoded:
        """A change against the mirrors, subtracted, coded and added in one pass; or, of cold keys, the values."""
        memory, codec = self.state.memory, self._codec(piece.warm)
        if piece.warm:
            memory.check(codec, math.prod(piece.row))
            mirrors = self._mirrors(piece, x.device)
            new = self.state.empty_mirror(x.shape, x.dtype, x.device)
            _, flag = codec.encode_onto_flagged(x, mirrors, piece.seed, memory.gate, new, into)
            finite = flag if later else bool(flag)
        else:
            _, flag = codec.encode_flagged(x, piece.seed, into)
            finite = flag if later else bool(flag)
            if not (later or finite):
                return Encoded(False)
            new = codec.decode(into, x.shape, x.dtype, piece.seed)
        return Encoded(finite, _mirror_writes(piece, new), new)

    # --- decoding

    def decode(self, layout: Layout, body: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """y of a body of that layout; anything unexpected raises ValueError before the state is touched."""
        if body.numel() != layout.nbytes:
            raise ValueError(f"a body of {body.numel()} bytes arrived, {layout.nbytes} were expected")
        if self.state.memory.cold_start:
            self._check_mirrors(layout)
        parts = body.split(
            [*(piece.nbytes for piece in layout.pieces), body.numel() - sum(p.nbytes for p in layout.pieces)]
        )
        decoded = [self._decode_piece(piece, part, dtype) for piece, part in zip(layout.pieces, parts)]
        for piece, (_, writes) in zip(layout.pieces, decoded):
            self._keep(piece, writes)
        if len(layout.pieces) == 1 and layout.pieces[0].at is None:
            return decoded[0][0]
        out = torch.zeros(shape, dtype=dtype, device=body.device)
        for piece, (y, _) in zip(layout.pieces, decoded):
            out[piece.at] = y
        return out

    def _check_mirrors(self, layout: Layout) -> None:
        for piece in layout.pieces:
            for key in piece.keys:
                if piece.warm and not self.state.is_warm(key, piece.row):
                    raise ValueError(f"a change for {key!r} arrived, but this end remembers no such sample")

    def _decode_piece(self, piece: Piece, body: Tensor, dtype: torch.dtype) -> tuple[Tensor, list[Write]]:
        memory, codec = self.state.memory, self._codec(piece.warm)
        if not memory.cold_start:
            return self._decode_by_rule(piece, body, dtype)
        if not piece.warm:
            y = codec.decode(body, piece.shape, dtype, piece.seed)
            return y, _mirror_writes(piece, y.clone())
        new = self.state.empty_mirror(piece.shape, dtype, body.device)
        y = codec.decode_onto(body, self._mirrors(piece, body.device), dtype, piece.seed, memory.gate, new)
        return y, _mirror_writes(piece, new)

    def _decode_by_rule(self, piece: Piece, body: Tensor, dtype: torch.dtype) -> tuple[Tensor, list[Write]]:
        """y = h + d, and h after it."""
        key, work = piece.keys[0], _work_dtype(dtype)
        cut = self.codec.nbytes(piece.shape, dtype)
        d = self.codec.decode(body[:cut], piece.shape, dtype, piece.seed).to(work)
        h = self.state.shift(key, d)
        refreshed = EXACT.decode(body[cut:], piece.shape, dtype).to(work) if piece.refresh else None
        moved = self.state.memory.next_shift(h, d, self.codec, refreshed)
        return (d if h is None else h + d).to(dtype), [] if moved is None else [("h", key, moved)]

    # --- mirrors

    def _mirrors(self, piece: Piece, device: torch.device) -> Tensor:
        """The mirrors of a piece's keys as one tensor of its shape; a file store gives them on the CPU."""
        found = [h for h in (self.state.read("h", key) for key in piece.keys) if h is not None]
        together = found[0] if len(found) == 1 else torch.stack(found)
        return together.reshape(piece.shape).to(device)

    def _keep(self, piece: Piece, writes: list[Write]) -> None:
        for slot, key, value in writes:
            self.state.write(slot, key, value)
        if self.state.memory.cold_start:
            self.stats.count_keys(len(piece.keys), piece.warm)


def _mirror_writes(piece: Piece, new: Tensor) -> list[Write]:
    """`new`, the mirrors of a piece's keys as one tensor: one write per key."""
    return [("h", key, row) for key, row in zip(piece.keys, new.reshape(len(piece.keys), *piece.row))]


def _work_dtype(dtype: torch.dtype) -> torch.dtype:
    """What the rule is computed in: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


@contextmanager
def _aligned(place: Tensor) -> Iterator[Tensor]:
    """The place itself, or one from an address that kernels can write words to, copied there afterwards."""
    if place.data_ptr() % 4 == 0:
        yield place
        return
    other = torch.empty_like(place)
    yield other
    place.copy_(other)


def _all(flags: Sequence[Tensor | bool]) -> Tensor | bool:
    tensors = [flag for flag in flags if isinstance(flag, Tensor)]
    if len(tensors) == 1:
        return tensors[0]
    return torch.stack(tensors).all() if tensors else all(flags)
