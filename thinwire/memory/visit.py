"""One key's visit at one end of a wire: apply the rule, encode or decode, move the state.

A body is the codec's bytes (then x in full on a refresh), or, for memories with a cold start, either a cold message
or a change against the mirror with its gate's bitmap. The two ends run the mirror image of the same lines.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, is_finite
from thinwire.codecs.exact import Identity
from thinwire.codecs.frame import REFRESH, WARM
from thinwire.memory.rule import Memory
from thinwire.memory.state import KeyedState
from thinwire.memory.stats import Stats
from thinwire.memory.store import Key

EXACT = Identity()


class Visits:
    """Codec, memory and state of one end. `seed` belongs to (run, step, key, send count): equal at both ends."""

    def __init__(self, codec: Codec, memory: Memory, state: KeyedState, stats: Stats, measure_every: int) -> None:
        self.codec, self.memory, self.state, self.stats = codec, memory, state, stats
        self.measure_every = measure_every

    def encode(self, key: Key, x: Tensor, seed: int, into: Tensor, later: bool = False) -> tuple[int, Tensor | bool]:
        """The body into `into`, uint8[body_bytes]: (kind, finite). The state is moved only where all is finite.

        `later`: nobody looks. The state is moved in any case, to be rolled back by whoever reads the flag, and `finite`
        is a 0-d tensor on x's device.
        """
        if self.memory.cold_start:
            return self._encode_delta(key, x, seed, into, later)
        memory, work = self.memory, torch.promote_types(x.dtype, torch.float32)
        memory.check(self.codec, x.numel())
        value, e, h = x.to(work), self._residual(key, x), self.shift(key, x.to(work))
        u = memory.outgoing(value, e, h).to(x.dtype)
        refresh, cut = memory.refreshes(seed), self.codec.nbytes(x.shape, x.dtype)
        body, finite = self._encode_with_factor(key, u, seed, into[:cut], later)
        if not (later or finite):
            return 0, False
        if memory.beta is not None or memory.mirrored or self._measures():
            self._learn(key, value, e, h, self.codec.decode(body, x.shape, x.dtype, seed).to(work), refresh)
        if refresh:
            EXACT.encode_flagged(x, into=into[cut:])
        return REFRESH if refresh else 0, finite

    def _residual(self, key: Key, x: Tensor) -> Tensor | None:
        """e of a key; one of another shape (a short last batch) belongs to nothing that is sent now, and is dropped."""
        return self.state.read("e", key) if self.state.shape("e", key) == tuple(x.shape) else None

    def _learn(self, key: Key, x: Tensor, e: Tensor | None, h: Tensor | None, own: Tensor, refresh: bool) -> None:
        """The sender's state after d_own: residual, shift, and now and then the error."""
        if self.memory.beta is not None:
            self.state.write("e", key, self.memory.residual(x, e, h, own))
        self._move_shift(key, h, own, x.clone() if refresh else None)
        if self._measures():
            self.stats.measure(self.memory.s * x, own if h is None else h + own)

    def decode(
        self, key: Key, kind: int, body: Tensor, shape: tuple[int, ...], dtype: torch.dtype, seed: int
    ) -> Tensor:
        """y of a body; anything unexpected raises ValueError before the state is touched."""
        if self.memory.cold_start:
            return self._decode_delta(key, bool(kind & WARM), body, shape, dtype, seed)
        work, cut = torch.promote_types(dtype, torch.float32), self.codec.nbytes(shape, dtype)
        refresh = self.memory.refreshes(seed)
        step = self.codec.decode(body[:cut] if refresh else body, shape, dtype, seed).to(work)
        h = self.shift(key, step)
        self._move_shift(key, h, step, EXACT.decode(body[cut:], shape, dtype).to(work) if refresh else None)
        return (step if h is None else h + step).to(dtype)

    def shift(self, key: Key, like: Tensor) -> Tensor | None:
        """h of a key: fixed, learned, or None for zero."""
        fixed = self.memory.base_shift(key, like)
        if fixed is not None:
            return fixed.to(like)
        return self.state.read("h", key) if self.memory.mirrored else None

    def body_bytes(self, shape: tuple[int, ...], dtype: torch.dtype, seed: int, warm: bool) -> int:
        """Length of a body; `warm` matters to memories with a cold start."""
        if not self.memory.cold_start:
            full = EXACT.nbytes(shape, dtype) if self.memory.refreshes(seed) else 0
            return self.codec.nbytes(shape, dtype) + full
        if warm:
            return self.codec.nbytes_onto(shape, dtype, self.memory.gate)
        return (self.memory.cold or EXACT).nbytes(shape, dtype)

    def _move_shift(self, key: Key, h: Tensor | None, step: Tensor, refreshed: Tensor | None) -> None:
        """h ← x on a refresh, h + α·d otherwise."""
        if refreshed is not None:
            self.state.write("h", key, refreshed)
        elif self.memory.mirrored and self.memory.refresh == 0:
            alpha = self.memory.alpha_for(self.codec, step.numel())
            self.state.write("h", key, self.memory.shifted(torch.zeros_like(step) if h is None else h, step, alpha))

    def _encode_with_factor(
        self, key: Key, u: Tensor, seed: int, into: Tensor, later: bool
    ) -> tuple[Tensor, Tensor | bool]:
        """(body, finite). Low rank is warm-started by the right factor of the key's last message."""
        if not self.codec.warm_starts:
            body, finite = self.codec.encode_flagged(u, seed, into)
            return body, finite if later else bool(finite)
        if not bool(is_finite(u)):
            return into, False
        body = into.copy_(self.codec.encode(u, seed, prev=self.state.read("q", key)))
        factor = self.codec.right_factor(body, tuple(u.shape), u.dtype)
        if factor is not None:
            self.state.write("q", key, factor.clone())
        return body, True

    # --- the delta against a mirror: cold start, gate, fused kernels

    def _encode_delta(self, key: Key, x: Tensor, seed: int, into: Tensor, later: bool) -> tuple[int, Tensor | bool]:
        h = self.state.read("h", key)
        warm = h is not None and h.shape == x.shape
        if h is None or not warm:
            codec = self.memory.cold or EXACT
            body, flag = codec.encode_flagged(x, seed, into)
            finite = flag if later else bool(flag)
            new = codec.decode(body, x.shape, x.dtype, seed) if later or finite else x
        else:
            self.memory.check(self.codec, x.numel())
            new = self.state.empty_mirror(x.shape, x.dtype, x.device)
            _, flag = self.codec.encode_onto_flagged(x, h.to(x.device), seed, self.memory.gate, new, into)
            finite = flag if later else bool(flag)
        if later or finite:
            self.state.write("h", key, new)
            self.stats.visit(warm)
            self.measure(x, new)
        return WARM if warm else 0, finite

    def _decode_delta(
        self, key: Key, warm: bool, body: Tensor, shape: tuple[int, ...], dtype: torch.dtype, seed: int
    ) -> Tensor:
        h = self.state.read("h", key)
        if not warm:
            y = (self.memory.cold or EXACT).decode(body, shape, dtype, seed)
            new = y.clone()
        elif h is None or h.shape != torch.Size(shape):
            raise ValueError(f"a change for {key!r} arrived, but this end remembers no such sample")
        else:
            new = self.state.empty_mirror(h.shape, dtype, body.device)
            y = self.codec.decode_onto(body, h.to(body.device), dtype, seed, self.memory.gate, new)
        self.state.write("h", key, new)
        self.stats.visit(warm)
        return y

    def is_warm(self, key: Key, shape: tuple[int, ...]) -> bool:
        """Does this end hold a mirror of that shape for the key?"""
        return self.state.shape("h", key) == shape

    def measure(self, x: Tensor, y: Tensor) -> None:
        """Note the relative error of y, every few messages."""
        if self._measures():
            self.stats.measure(x, y)

    def _measures(self) -> bool:
        return self.measure_every > 0 and self.stats.messages % self.measure_every == 0
