"""A channel: a codec (point to point) or a collective (a group) with a memory.

`send` and `recv` are the two ends of one wire, each with its own Channel; `reduce` is one member's part of a group.
Keys name the state: a parameter, a boundary, a sample. Every message is a frame (codecs/frame.py). The rule that
makes DIANA, error feedback, EF21, AQ-SGD and the rest is in memory/rule.py; nothing here knows their names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs import frame as framing
from thinwire.codecs.base import Codec, describe_nonfinite, raw_bytes
from thinwire.errors import UsageError
from thinwire.kernels.checksum import checksums
from thinwire.kernels.random import derive
from thinwire.memory.deferred import DeferredChecks
from thinwire.memory.rows import Rows
from thinwire.memory.rule import Memory, Plain
from thinwire.memory.state import KeyedState, key_name, parse_key
from thinwire.memory.stats import Stats
from thinwire.memory.store import Key
from thinwire.memory.visit import Visits

FEW, MANY = 16, 2**20  # values; a codec that is refused for both is refused at once, others when they meet a size


class Channel:
    """One end of a wire, or one member of a group. `seed` is the run's, equal at both ends. `defer`: may checks of
    messages wait for the step's end (`deferred`) where the caller allows it? None: on a card."""

    def __init__(
        self, codec: Any, memory: Memory | None = None, *, seed: int = 0, name: str = "channel",
        measure_every: int = 16, defer: bool | None = None,
    ) -> None:  # fmt: skip
        self.codec, self.memory, self.seed, self.name = codec, memory or Plain(), seed, name
        if not isinstance(codec, Codec) and not hasattr(codec, "exchange"):
            raise UsageError(f"a channel takes a codec or a collective, not {codec!r}")
        if isinstance(codec, Codec) and (codec.omega(FEW) or 0) >= 1:
            self.memory.check(codec, MANY)
        self.state = KeyedState(self.memory)
        self.collective_state: dict[Key, dict[str, Tensor]] = {}
        self.staged_collective: dict[Key, dict[str, Tensor]] = {}
        self.step = 0
        self.counts: dict[Any, int] = {}
        self.deferred, self.defer = DeferredChecks(), defer
        self.stats = Stats()
        self.visits = Visits(codec, self.memory, self.state, self.stats, measure_every)
        self.rows = Rows(self.visits)

    # --- steps: writes between begin and commit are kept together or dropped together

    def begin(self, step: int | None = None) -> None:
        """Open a step. Its number (default: the next) is in every frame, so that a late one is refused."""
        self.state.begin()
        self.step = self.step + 1 if step is None else step
        self.counts.clear()
        self.deferred.open.clear()

    def commit(self) -> None:
        if self.deferred.open:
            raise RuntimeError(
                f"{self.name}: messages of this step were not looked at: resolve_checks() before commit()"
            )
        self.state.commit()
        self.collective_state.update(self.staged_collective)
        self.staged_collective = {}

    def rollback(self) -> None:
        """Drop every write since begin. The step's number stays used: its frames are stale from now on."""
        self.state.rollback()
        self.staged_collective = {}
        self.stats.rollbacks += 1

    def resolve_checks(self) -> list[tuple[list[Key], bool]]:
        """Look at what was left for later; where anything is told here, roll back."""
        return self.deferred.resolve(self.stats)

    # --- point to point

    def send(self, key: Key | Sequence[Key], x: Tensor, *, nonfinite: str = "raise") -> Tensor:
        """x → frame. A list of keys gives every row of x its own state.

        NaN or Inf: ValueError naming the key; with nonfinite="flag" a frame of the usual size that says so, and no
        change of state (the receiver gets NaN, and the step is for the caller to roll back); with nonfinite="later" the
        host may leave it to `deferred`, and then has to roll back.
        """
        if not isinstance(key, (str, int)):
            self._check_rows(key, tuple(x.shape))
        later = nonfinite == "later" and self._may_defer(x.device)
        frame = torch.empty(self.nbytes(key, x.shape, x.dtype), dtype=torch.uint8, device=x.device)
        body = frame[framing.BYTES :]
        if isinstance(key, (str, int)):
            kind, finite = self.visits.encode(key, x, self._seed(key), body, later)
        else:
            kind, finite = framing.ROWS, self.rows.encode(key, x, self._seed, body, later)
        if isinstance(finite, Tensor):
            self.deferred.add(key, None, finite)
            framing.seal(self._header(key, kind), frame, finite)
        else:
            if not finite and nonfinite == "raise":
                raise ValueError(f"{self.name}: cannot send {key!r}: {describe_nonfinite(x)}")
            if not finite:
                self.stats.nonfinite += 1
                kind |= framing.NONFINITE
                body.zero_()
            framing.seal(self._header(key, kind), frame)
        self._advance(key)
        self.stats.count(frame.numel(), x.numel() * x.element_size())
        return frame

    def recv(
        self, key: Key | Sequence[Key], wire: Tensor, shape: Sequence[int], dtype: torch.dtype, *, later: bool = False
    ) -> Tensor:
        """Frame → y. A frame that is not the expected one raises ValueError and changes nothing; with `later` the host
        may leave that to `deferred`, y is then NaN, and the caller has to roll back."""
        if later and self._may_defer(wire.device):
            y = self._recv_unseen(key, wire, tuple(shape), dtype)
        else:
            y = self._recv(key, wire, shape, dtype)
        self._advance(key)
        self.stats.count(wire.numel(), math.prod(shape) * dtype.itemsize)
        return y

    def _recv(self, key: Key | Sequence[Key], wire: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        try:
            kind, body = framing.unseal(wire, self._header(key, 0))
            if kind & framing.NONFINITE:
                self.stats.nonfinite += 1
                y = torch.full(tuple(shape), torch.nan, dtype=dtype, device=wire.device)
            elif isinstance(key, (str, int)):
                y = self.visits.decode(key, kind, body, tuple(shape), dtype, self._seed(key))
            else:
                self._check_rows(key, tuple(shape))
                y, _ = self.rows.decode(key, body, tuple(shape), dtype, self._seed)
        except ValueError as error:
            self.stats.rejected += 1
            raise ValueError(f"{self.name}, {key!r}: {error}") from error
        return y

    def _recv_unseen(
        self, key: Key | Sequence[Key], wire: Tensor, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """The same without looking: decoded as what this end expects, NaN where it was something else."""
        if isinstance(key, (str, int)):
            warm = self.memory.cold_start and self.is_warm(key, shape)
            good, finite, body = framing.inspect(wire, self._header(key, framing.WARM if warm else 0))
            y = self.visits.decode(key, framing.WARM if warm else 0, body, shape, dtype, self._seed(key))
        else:
            self._check_rows(key, shape)
            good, finite, body = framing.inspect(wire, self._header(key, framing.ROWS))
            y, same = self.rows.decode(key, body, shape, dtype, self._seed, later=True)
            good = good & same
        self.deferred.add(key, good, finite)
        return torch.where(good & finite, y, torch.nan)

    def _may_defer(self, device: torch.device) -> bool:
        """Can messages be left to `deferred`? In an open step, by codecs that look at nothing; worth it on a card."""
        wanted = device.type == "cuda" if self.defer is None else self.defer
        blind = self.codec.is_blind and (self.memory.cold is None or self.memory.cold.is_blind)
        return wanted and blind and not self.memory.refresh and self.state.staged is not None

    def nbytes(self, key: Key | Sequence[Key], shape: Sequence[int], dtype: torch.dtype) -> int:
        """Exactly how long the next frame for this key will be, at either end."""
        if isinstance(key, (str, int)):
            return framing.BYTES + self._body_bytes(key, tuple(shape), dtype)
        return framing.BYTES + self.rows.nbytes(key, tuple(shape[1:]), dtype, self._seed, None)

    def is_warm(self, key: Key, shape: Sequence[int]) -> bool:
        """Does this end hold a mirror of that shape for the key?"""
        return self.visits.is_warm(key, tuple(shape))

    def digest(self, key: Key) -> int:
        return int(self.digests([key])[0])

    def digests(self, keys: Sequence[Key]) -> Tensor:
        """int64[keys]: checksums of the keys' mirrors, for the two ends to compare; −1 where there is none."""
        out = torch.full((len(keys),), -1, dtype=torch.int64)
        alike: dict[tuple[Any, ...], list[tuple[int, Tensor]]] = {}
        for i, key in enumerate(keys):
            h = self.state.read("h", key)
            if h is not None:
                alike.setdefault((h.dtype, h.shape, h.device), []).append((i, raw_bytes(h)))
        for rows in alike.values():
            out[[i for i, _ in rows]] = checksums(torch.stack([row for _, row in rows])).cpu()
        return out

    def forget(self, key: Key) -> None:
        """Drop all state of a key: its next message is cold. Both ends must do so."""
        self.state.forget(key)
        self.counts.pop(key, None)
        self.collective_state.pop(key, None)

    # --- a group

    def reduce(self, key: Key, x: Tensor, group: Any = None) -> Tensor:
        """The mean of x over the group, through the collective: y = h̄ + mean d_i."""
        memory, work = self.memory, torch.promote_types(x.dtype, torch.float32)
        x, e, h = x.to(work), self.state.read("e", key), self.visits.shift(key, x.to(work))
        u = memory.outgoing(x, e, h)
        state = dict(self.staged_collective.get(key) or self.collective_state.get(key, {}))
        seed = derive(self.seed, self.step, key, self.counts.get(key, 0))
        mean, own = self.codec.exchange(u, group, state=state, key=key, step=self.step, seed=seed)
        center = self.state.read("m", key) if memory.mirrored else self.codec.mean(h, group) if h is not None else None
        y = mean if center is None else center + mean
        if memory.beta is not None:
            self.state.write("e", key, memory.residual(x, e, h, own))
        if memory.mirrored:
            self._move_group_shifts(key, x, h, own, center, mean, group)
        (self.collective_state if self.state.staged is None else self.staged_collective)[key] = state
        self._advance(key)
        return y

    def _move_group_shifts(
        self, key: Key, x: Tensor, h: Tensor | None, own: Tensor, center: Tensor | None, mean: Tensor, group: Any
    ) -> None:
        """h_i ← h_i + α·own and h̄ ← h̄ + α·mean; on a refresh h_i ← x and h̄ ← mean x (the coin is the group's)."""
        coin = derive(self.seed, self.step, key, self.counts.get(key, 0))
        if self.memory.refresh:
            if self.memory.refreshes(coin):
                self.state.write("h", key, x.clone())
                self.state.write("m", key, self.codec.mean(x, group))
            return
        alpha = self.memory.alpha_for(getattr(self.codec, "codec", self.codec), x.numel())
        zero = torch.zeros_like(x)
        self.state.write("h", key, self.memory.shifted(zero if h is None else h, own, alpha))
        self.state.write("m", key, self.memory.shifted(zero if center is None else center, mean, alpha))

    # --- checkpoints

    def state_dict(self, mirrors: bool = True) -> dict[str, Tensor]:
        """Tensors only (loads with weights_only=True): residuals, mirrors, factors, collective state, step, counts."""
        out = self.state.state_dict(() if mirrors else ("h",))
        for key, tensors in self.collective_state.items():
            out |= {f"c/{key_name(key)}/{name}": value.clone() for name, value in tensors.items()}
        out |= {f"count/{key_name(k)}": torch.tensor(n) for k, n in self.counts.items() if isinstance(k, (str, int))}
        return out | {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.state.load_state_dict(state)
        self.step = int(state["step"])
        self.counts = {parse_key(k[6:]): int(n) for k, n in state.items() if k.startswith("count/")}
        self.collective_state = {}
        for name, value in state.items():
            if name.startswith("c/"):
                key, _, field = name[2:].rpartition("/")
                self.collective_state.setdefault(parse_key(key), {})[field] = value.clone()

    # --- rows

    def _check_rows(self, keys: Sequence[Key], shape: tuple[int, ...]) -> None:
        if not isinstance(keys, Sequence):
            raise ValueError(f"{self.name}: key {keys!r}: must be a text, a whole number, or a list of them, one a row")
        if not shape or shape[0] != len(keys):
            raise ValueError(f"{self.name}: {len(keys)} keys for a tensor of shape {shape}: one key a row")
        if len(set(keys)) != len(keys):
            twice = next(k for k in keys if list(keys).count(k) > 1)
            raise ValueError(f"{self.name}: key {twice!r} stands twice in one message")

    # --- seeds and headers

    def _body_bytes(self, key: Key, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return self.visits.body_bytes(shape, dtype, self._seed(key), self.is_warm(key, shape))

    def _seed(self, key: Key) -> int:
        return derive(self.seed, self.step, key, self.counts.get(key, 0))

    def _header(self, key: Key | Sequence[Key], kind: int) -> framing.Header:
        name = key if isinstance(key, (str, int)) else tuple(key)
        return framing.Header(kind, self.counts.get(name, 0), self.step, framing.key_hash(name))

    def _advance(self, key: Key | Sequence[Key]) -> None:
        keys = [key] if isinstance(key, (str, int)) else [*key, tuple(key)]
        for one in keys:
            self.counts[one] = self.counts.get(one, 0) + 1
