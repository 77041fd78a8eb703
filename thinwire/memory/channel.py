"""A channel: a codec (point to point) or a collective (a group) with a memory.

`send` and `recv` are the two ends of one wire, each with its own Channel; `reduce` is one member's part of a group.
Keys name the state: a parameter, a boundary, a sample. Every message is a frame (codecs/frame.py): a header, and a body
coded against the state (memory/keyed_codec.py). The rule that makes DIANA, error feedback, EF21, AQ-SGD and the rest is
in memory/rule.py; nothing here knows their names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs import frame as framing
from thinwire.codecs.base import Codec, describe_nonfinite, raw_bytes
from thinwire.errors import UsageError
from thinwire.kernels.checksum import checksums
from thinwire.kernels.random import derive
from thinwire.memory.deferred import DeferredChecks
from thinwire.memory.group_reduce import Averaging, State, reduce_by_rule
from thinwire.memory.keyed_codec import KeyedCodec, Layout
from thinwire.memory.rule import Memory, Plain
from thinwire.memory.state import KeyedState, check_key, key_name, parse_key
from thinwire.memory.stats import Stats
from thinwire.memory.store import Key, MessageKey
from thinwire.steps import Steps, finish

FEW, MANY = 16, 2**20  # values; a codec that is refused for both is refused at once, others when they meet a size


class Channel:
    """One end of a wire, or one member of a group.

    codec: a codec, for `send` and `recv`; a collective, for `reduce`. memory: what is remembered (default: nothing).
    seed: the run's, equal at both ends. name: shown in errors. measure_every: the error of every so manieth message is
    measured (0: of none). defer: may checks of messages wait for the step's end (`resolve_checks`) where the caller
    allows it? None: on a card.
    """

    def __init__(
        self, codec: Codec | Averaging, memory: Memory | None = None, *, seed: int = 0, name: str = "channel",
        measure_every: int = 16, defer: bool | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(codec, (Codec, Averaging)):
            raise UsageError(f"a channel takes a codec or a collective, not {codec!r}")
        self.codec, self.seed, self.name, self.defer = codec, seed, name, defer
        self.state = KeyedState(memory or Plain())
        if isinstance(codec, Codec) and (codec.omega(FEW) or 0) >= 1:
            self.memory.check(codec, MANY)
        self.collective_state: dict[Key, State] = {}
        self.staged_collective: dict[Key, State] = {}
        self.step = 0
        self.counts: dict[Key | tuple[Key, ...], int] = {}  # messages of a key, or of a list of keys, in this step
        self.deferred = DeferredChecks()
        self.stats = Stats(measure_every=measure_every)

    @property
    def memory(self) -> Memory:
        """The memory; change it with `change_memory`."""
        return self.state.memory

    def change_memory(self, memory: Memory) -> None:
        """From now on `memory`, with the same store; residuals of another memory are dropped."""
        if memory != self.memory:
            self.state.memory = memory
            for key in list(self.state.stores["e"]):
                self.state.stores["e"].forget(key)

    # --- steps: writes between begin and commit are kept together or dropped together

    def begin(self, step: int | None = None) -> None:
        """Open a step. Its number (default: the next) is in every frame, so that a late one is refused."""
        self.state.begin()
        self.step = self.step + 1 if step is None else step
        self.counts.clear()
        self.deferred.open.clear()

    def commit(self) -> None:
        """Keep every write since begin. Deferred checks must have been resolved. Where the state cannot be written (a
        full disk) it is as KeyedState.commit says: roll back."""
        if self.deferred.open:
            raise RuntimeError(
                f"{self.name}: checks of this step's messages are open: resolve_checks() before commit()"
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
        """Read the checks that were deferred. Of every message that failed: its keys, and whether it was not the
        expected one (else it was, and not finite). Where there is any, roll back."""
        return self.deferred.resolve(self.stats)

    # --- point to point

    def send(self, key: MessageKey, x: Tensor, *, nonfinite: str = "raise") -> Tensor:
        """x → frame, uint8[nbytes]. A list of keys gives every row of x its own state.

        nonfinite: what NaN or Inf does. "raise": ValueError naming the key. "flag": a frame of the usual size that says
        so, and no change of state (the receiver gets NaN, and the step is for the caller to roll back). "later": the
        same, or the check may be deferred (`resolve_checks`), and the caller then has to roll back.
        """
        key = self._checked(key)
        later = nonfinite == "later" and self._may_defer(x.device)
        layout = self._layout(key, tuple(x.shape), x.dtype)
        frame = torch.empty(framing.BYTES + layout.nbytes, dtype=torch.uint8, device=x.device)
        body = frame[framing.BYTES :]
        finite = self._coder().encode(layout, x, body, later)
        if layout.warm is not None:
            framing.write_warm(layout.warm, body)
        header = self._header(key, layout.kind)
        if isinstance(finite, Tensor):
            self.deferred.add(key, None, finite)
            framing.seal(header, frame, finite)
        elif finite:
            framing.seal(header, frame)
        elif nonfinite == "raise":
            raise ValueError(f"{self.name}: cannot send {key!r}: {describe_nonfinite(x)}")
        else:
            self.stats.nonfinite += 1
            body.zero_()
            flagged = (header.kind & ~framing.REFRESH) | framing.NONFINITE  # x does not follow in full
            framing.seal(replace(header, kind=flagged), frame)
        self._advance(key)
        self.stats.count(frame.numel(), x.nbytes)
        return frame

    def recv(
        self, key: MessageKey, wire: Tensor, shape: Sequence[int], dtype: torch.dtype, *, later: bool = False
    ) -> Tensor:
        """Frame → y of that shape and dtype. A frame that is not the expected one raises ValueError and changes
        nothing; with `later` the check may be deferred (`resolve_checks`): y is then NaN, and the caller has to roll
        back."""
        key = self._checked(key)
        if later and self._may_defer(wire.device):
            y = self._recv_unchecked(key, wire, tuple(shape), dtype)
        else:
            y = self._recv(key, wire, tuple(shape), dtype)
        self._advance(key)
        self.stats.count(wire.numel(), math.prod(shape) * dtype.itemsize)
        return y

    def _recv(self, key: MessageKey, wire: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        try:
            kind, body = framing.unseal(wire, self._header(key, 0))
            if kind & framing.NONFINITE:
                self.stats.nonfinite += 1
                return torch.full(shape, torch.nan, dtype=dtype, device=wire.device)
            warm = [bool(kind & framing.WARM)] if isinstance(key, (str, int)) else framing.warm_rows(body, len(key))
            return self._coder().decode(self._layout(key, shape, dtype, warm), body, shape, dtype)
        except ValueError as error:
            self.stats.rejected += 1
            raise ValueError(f"{self.name}, {key!r}: {error}") from error

    def _recv_unchecked(self, key: MessageKey, wire: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The same without the host reading anything: decoded as what this end expects, NaN where it was not."""
        layout = self._layout(key, shape, dtype)
        good, finite, body = framing.inspect(wire, self._header(key, layout.kind))
        if layout.warm is not None:
            good = good & framing.has_warm_rows(body, layout.warm)
        y = self._coder().decode(layout, body, shape, dtype)
        self.deferred.add(key, good, finite)
        return torch.where(good & finite, y, torch.nan)

    def _may_defer(self, device: torch.device) -> bool:
        """Can checks be deferred? In an open step, by codecs that never wait for a card; worth it on a card."""
        wanted = device.type == "cuda" if self.defer is None else self.defer
        cold = self.memory.cold
        never_syncs = isinstance(self.codec, Codec) and self.codec.never_syncs and (cold is None or cold.never_syncs)
        return wanted and never_syncs and not self.memory.refresh and self.state.staged is not None

    def nbytes(self, key: MessageKey, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Exactly how long the next frame for this key and a tensor of that shape and dtype will be, at either end."""
        return framing.BYTES + self._layout(self._checked(key), tuple(shape), dtype).nbytes

    def is_warm(self, key: Key, shape: Sequence[int]) -> bool:
        """Does this end hold a mirror of that shape for the key?"""
        return self.state.is_warm(check_key(key), tuple(shape))

    def digest(self, key: Key) -> int:
        """The checksum of a key's mirror, −1 where there is none."""
        return int(self.digests([key])[0])

    def digests(self, keys: Sequence[Key]) -> Tensor:
        """int64[keys]: checksums of the keys' mirrors, for the two ends to compare; −1 where there is none."""
        self.state.stores["h"].load(keys)  # whoever compares them reads them next
        out = torch.full((len(keys),), -1, dtype=torch.int64)
        alike: dict[tuple[torch.dtype, torch.Size, torch.device], list[tuple[int, Tensor]]] = {}
        for i, key in enumerate(keys):
            h = self.state.read("h", check_key(key))
            if h is not None:
                alike.setdefault((h.dtype, h.shape, h.device), []).append((i, raw_bytes(h)))
        for rows in alike.values():
            out[[i for i, _ in rows]] = checksums(torch.stack([row for _, row in rows])).cpu()
        return out

    def forget(self, key: Key) -> None:
        """Drop all state of a key: its next message is cold. Both ends must do so."""
        key = check_key(key)
        self.state.forget(key)
        self.counts.pop(key, None)
        self.collective_state.pop(key, None)

    # --- a group

    def reduce(self, key: Key, x: Tensor, group: Any = None) -> Tensor:
        """The mean of x over the group, through the collective: y = h̄ + mean d_i (memory/group_reduce.py)."""
        return finish(self.reduce_steps(key, x, group))

    def reduce_steps(self, key: Key, x: Tensor, group: Any = None) -> Steps[Tensor]:
        """`reduce`, stopping where it would wait for other members."""
        if not isinstance(self.codec, Averaging):
            raise UsageError(f"{self.name}: reduce takes a collective, not {self.codec!r}")
        key = check_key(key)
        own_state = dict(self.staged_collective.get(key) or self.collective_state.get(key, {}))
        y = yield from reduce_by_rule(
            self.codec, self.state, key, x, group, collective_state=own_state, step=self.step, seed=self._seed(key)
        )
        kept = self.collective_state if self.state.staged is None else self.staged_collective
        kept[key] = own_state
        self._advance(key)
        return y

    # --- checkpoints

    def state_dict(self, mirrors: bool = True) -> dict[str, Tensor]:
        """Tensors only (loads with weights_only=True): residuals, mirrors, factors, collective state, step, counts.

        mirrors: with the shifts h.
        """
        out = self.state.state_dict(() if mirrors else ("h",))
        for key, tensors in self.collective_state.items():
            out |= {f"c/{key_name(key)}/{name}": value.clone() for name, value in tensors.items()}
        out |= {f"count/{key_name(k)}": torch.tensor(n) for k, n in self.counts.items() if isinstance(k, (str, int))}
        return out | {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Replace all state by what `state_dict` gave."""
        self.state.load_state_dict(state)
        self.step = int(state["step"])
        self.counts = {parse_key(k[6:]): int(n) for k, n in state.items() if k.startswith("count/")}
        self.collective_state = {}
        for name, value in state.items():
            if name.startswith("c/"):
                key, _, field = name[2:].rpartition("/")
                self.collective_state.setdefault(parse_key(key), {})[field] = value.clone()

    # --- layouts, seeds, headers and counts of messages

    def _coder(self) -> KeyedCodec:
        if not isinstance(self.codec, Codec):
            raise UsageError(f"{self.name}: messages between two ends take a codec, not {self.codec!r}")
        return KeyedCodec(self.codec, self.state, self.stats)

    def _layout(
        self, key: MessageKey, shape: tuple[int, ...], dtype: torch.dtype, warm: list[bool] | None = None
    ) -> Layout:
        if not isinstance(key, (str, int)):
            self._check_rows(key, shape)
        return self._coder().layout(key, shape, dtype, self._seed, warm)

    def _checked(self, key: MessageKey) -> MessageKey:
        """The key, or the list of keys, as Python's texts and whole numbers."""
        try:
            if isinstance(key, Sequence) and not isinstance(key, (str, bytes)):
                return [check_key(one) for one in key]
            return check_key(key)
        except UsageError as error:
            raise UsageError(f"{self.name}: {error}") from None

    def _check_rows(self, keys: Sequence[Key], shape: tuple[int, ...]) -> None:
        if not shape or shape[0] != len(keys):
            raise ValueError(f"{self.name}: {len(keys)} keys for a tensor of shape {shape}: one key per row")
        if len(set(keys)) != len(keys):
            twice = next(k for k in keys if list(keys).count(k) > 1)
            raise ValueError(f"{self.name}: key {twice!r} stands twice in one message")

    def _seed(self, key: Key) -> int:
        return derive(self.seed, self.step, key, self.counts.get(key, 0))

    def _header(self, key: MessageKey, kind: int) -> framing.Header:
        name = key if isinstance(key, (str, int)) else tuple(key)
        return framing.Header(kind, self.counts.get(name, 0), self.step, framing.key_hash(name))

    def _advance(self, key: MessageKey) -> None:
        """The next message of these keys has another count, and so another seed."""
        keys = [key] if isinstance(key, (str, int)) else [*key, tuple(key)]
        for one in keys:
            self.counts[one] = self.counts.get(one, 0) + 1
