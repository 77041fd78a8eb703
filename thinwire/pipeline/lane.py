"""A lane: one end of one boundary between stages, in one direction. It makes frames of tensors, or tensors of frames.

Per tensor there are two channels: the coded one, with the link's codec and memory, and an exact one for messages that
`when` leaves uncompressed and for evaluation. Per-sample memory (a cold start) is keyed by sample id, everything else
by boundary. A frame that is damaged, stale or foreign, or that is flagged as not finite, becomes NaN and a fault. The
step then goes on to its end, where all ranks roll it back together.

A refusal is a frame that no codec writes. The first stage sees a batch only when the others already wait for its first
message. Where the batch is not as it was announced, a refusal of the expected size is sent instead; whoever receives
it passes it on, and then all ranks raise the same error (FramedStage._refuse).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from thinwire.codecs import Identity
from thinwire.config.wire import Link
from thinwire.errors import UsageError
from thinwire.kernels.random import derive
from thinwire.memory import Memory, Plain
from thinwire.memory.channel import Channel
from thinwire.memory.file_store import SUFFIX
from thinwire.memory.fitted import FittedChannel, more_of
from thinwire.memory.store import Key
from thinwire.pipeline.lazy_error import Trial
from thinwire.pipeline.message_choice import Message

DIRECTIONS = ("forward", "backward")
AS_IS = Link(Identity())
REFUSED = 255  # every byte of a refusal; a frame of a codec begins with its version


class Lane:
    """One end of one boundary, in one direction.

    link: codec, memory and `when` of the messages; None: they are sent uncompressed.
    name: direction and boundary ("forward 1→2"), equal at both ends.
    end: "send" or "recv".
    seed: the run's, equal at both ends.
    owner: what names of its stores' files begin with, unlike any other rank's or run's (file_store.store_owner).
    """

    def __init__(self, link: Link | None, name: str, end: str, seed: int, owner: str = "") -> None:
        self.link = link or AS_IS
        self.name = name
        self.end = end
        self.seed = seed
        self.owner = owner
        has_trial = self.link.memory == "auto" and end == "send"
        self.trial = Trial(name, self.link.codec, seed) if has_trial else None
        if self.memory.refresh:
            raise UsageError(f"{name}: {self.memory.name} sends in full at random; a pipeline takes other memories")
        self.coded: dict[int, Channel] = {}
        self.exact: dict[int, Channel] = {}
        self.step: int | None = None
        self.faults: list[str] = []
        self.sent_as_is = 0  # bytes of integers and masks, which no channel counts
        self._lost: list[tuple[Channel, Key]] = []
        self._channel(0, coded=True)  # an impossible codec or path raises here, before the first step

    @property
    def memory(self) -> Memory:
        """The link's memory; with "auto" the trial's last decision, which the receiving end need not know."""
        if isinstance(self.link.memory, Memory):
            return self.link.memory
        return Plain() if self.trial is None else self.trial.memory

    @property
    def per_sample(self) -> bool:
        """Does this lane remember samples?"""
        return self.memory.cold_start

    # --- tensors ⇄ frames

    def send(self, message: Message, index: int, x: Tensor) -> Tensor:
        """The frame of `x`, tensor number `index` of a message; integers and masks are sent as they are."""
        if not x.is_floating_point():
            self.sent_as_is += x.nbytes
            return x.contiguous()
        channel = self._channel(index, message.coded)
        key = self._key(message, index, tuple(x.shape))
        before = channel.stats.nonfinite
        frame = channel.send(key, x, nonfinite="later", **more_of(channel, message.microbatch, tokens=message.tokens))
        if channel.stats.nonfinite > before:
            self.faults.append(f"{self.name}, micro-batch {message.microbatch}: NaN or Inf")
        elif self.trial is not None and message.coded:
            self.trial.note_message(message.microbatch, index, x)
        return frame

    def expect(self, message: Message, index: int, shape: Sequence[int], like: Tensor) -> Tensor:
        """An empty buffer of exactly the size of the frame that tensor `index` will be sent in.

        shape: the tensor's. like: any tensor of its dtype and device.
        """
        if not like.is_floating_point():
            return torch.empty(tuple(shape), dtype=like.dtype, device=like.device)
        channel = self._channel(index, message.coded)
        key = self._key(message, index, tuple(shape))
        size = channel.nbytes(key, shape, like.dtype, **more_of(channel, message.microbatch))
        return torch.empty(size, dtype=torch.uint8, device=like.device)

    def recv(self, message: Message, index: int, frame: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The tensor in a frame, of that shape and dtype; NaN and a fault where the frame is not the expected one."""
        if not dtype.is_floating_point:
            return frame
        channel = self._channel(index, message.coded)
        key = self._key(message, index, tuple(shape))
        before = channel.stats.nonfinite
        try:
            more = more_of(channel, message.microbatch, tokens=message.tokens)
            y = channel.recv(key, frame, shape, dtype, later=True, **more)
        except UsageError:
            raise
        except ValueError as error:
            self.faults.append(str(error))
            self._lost += [(channel, k) for k in (key if isinstance(key, list) else [key])]
            return torch.full(tuple(shape), torch.nan, dtype=dtype, device=frame.device)
        if channel.stats.nonfinite > before:
            self.faults.append(f"{self.name}, micro-batch {message.microbatch}: NaN or Inf")
        return y

    def correct(self, microbatch: int, gradients: Sequence[Tensor], indices: Sequence[int] = (0,)) -> list[Tensor]:
        """At the sending end: gradients that came back of tensors `indices` of a message, through their codes."""
        out = list(gradients)
        for at, index in enumerate(indices):
            channel = self.coded.get(index)
            if isinstance(channel, FittedChannel):
                with torch.no_grad():
                    out[at] = channel.correct(microbatch, out[at])
        return out

    def refusal(self, message: Message, index: int, shape: Sequence[int], like: Tensor) -> Tensor:
        """A refusal in place of the frame of tensor `index`; arguments as of `expect`."""
        return self.expect(message, index, shape, like).fill_(REFUSED)

    def resolve_checks(self) -> None:
        """At the end of a step: collect the faults of messages whose checks were deferred."""
        for _, channel in self.channels():
            for keys, foreign in channel.resolve_checks():
                what = "frame is damaged, stale or foreign" if foreign else "NaN or Inf"
                self.faults.append(f"{self.name}, {', '.join(map(str, keys))}: {what}")
                self._lost += [(channel, key) for key in keys] if foreign else []

    def _key(self, message: Message, index: int, shape: tuple[int, ...]) -> Key | list[Key]:
        if not (message.coded and self.per_sample):
            return f"{self.name}/{index}"
        if message.ids is None:
            raise UsageError(f"{self.name}: {self.memory.name} remembers samples: give step(ids=…) on the first stage")
        if not shape or shape[0] != len(message.ids):
            raise UsageError(
                f"{self.name}: {len(message.ids)} sample ids in micro-batch {message.microbatch} for a tensor of shape "
                f"{shape}: its first dimension must be the samples"
            )
        return list(message.ids)

    def _channel(self, index: int, coded: bool) -> Channel:
        """The channel of tensor number `index`, made when it is first needed."""
        table = self.coded if coded else self.exact
        if index not in table:
            seed = derive(self.seed, self.name, index)
            if coded and self.link.fitted:
                table[index] = FittedChannel(
                    self.link.codec, seed=seed, name=self.name, sends=self.end == "send", tokens=self.link.tokens,
                    scale_gradient=self.link.scale_gradient,
                )  # fmt: skip
            elif coded:
                table[index] = Channel(self.link.codec, self._memory_of(index), seed=seed, name=self.name)
            else:
                table[index] = Channel(Identity(), Plain(), seed=seed, name=f"exact {self.name}")
            if self.step is not None:
                table[index].begin(self.step)
        return table[index]

    def _memory_of(self, index: int) -> Memory:
        """The link's memory; a path in it names a folder, in which tensor `index` of this lane has its own file."""
        memory = self.memory
        if memory.path is None:
            return memory
        name = f"{self.owner}{self.name.replace(' ', '-').replace('→', '-')}-{self.end}-{index}{SUFFIX}"
        return replace(memory, path=str(Path(memory.path) / name))

    # --- steps

    def channels(self) -> Iterator[tuple[str, Channel]]:
        """Every channel made so far, with its name in checkpoints."""
        for kind, table in (("coded", self.coded), ("exact", self.exact)):
            for index, channel in table.items():
                yield f"{kind}{index}", channel

    def begin(self, step: int) -> None:
        """Open step number `step` on every channel."""
        self.step = step
        self.faults = []
        self._lost = []
        if self.trial is not None:
            self.trial.begin(step)
        for _, channel in self.channels():
            channel.begin(step)

    def end_step(self, keep: bool, count: bool = True) -> None:
        """Commit the step, or roll it back. Samples whose frames arrived damaged are cold next time.

        keep: commit. count: count a rollback in the channels' statistics.
        """
        self.step = None
        problems: list[UsageError] = []
        for _, channel in self.channels():
            try:
                if keep:
                    channel.commit()
                elif count:
                    channel.rollback()
                else:
                    channel.state.rollback()
            except UsageError as error:  # a store that cannot be written: the others end their step all the same
                channel.rollback()
                problems.append(error)
        for channel, key in self._lost:
            channel.state.forget(key)
        if self.trial is not None:
            self.trial.end_step(keep)
            self._change_memory(self.trial.memory)
        if problems:
            raise problems[0]

    def _change_memory(self, memory: Memory) -> None:
        """Use another memory from the next step on; residuals of the former one are dropped."""
        for channel in self.coded.values():
            channel.change_memory(memory)

    def rescale(self, factor: float) -> None:
        """The loss scale has changed by `factor`, and with it the unit of residuals and of gradients' means."""
        for channel in self.coded.values():
            if isinstance(channel, FittedChannel) and channel.means is not None:
                channel.means.rescale(factor)
            for key in list(channel.state.stores["e"]):
                e = channel.state.read("e", key)
                if e is not None:
                    channel.state.write("e", key, e * factor)

    # --- what is remembered of samples

    def digests(self, ids: Sequence[int]) -> Tensor:
        """int64[samples]: a digest of the mirrors of all tensors, −1 where one is missing."""
        per_tensor = [channel.digests(ids) for channel in self.coded.values()]
        stacked = torch.stack(per_tensor)  # below 2³² each, so that the weighted sum stays far below 2⁶³
        weights = torch.arange(1, len(per_tensor) + 1)[:, None]
        return torch.where((stacked >= 0).all(dim=0), (stacked * weights).sum(dim=0), -1)

    def remembers(self) -> int:
        """How many samples' mirrors this end holds."""
        return max((sum(1 for _ in channel.state.stores["h"]) for channel in self.coded.values()), default=0)

    def forget(self, ids: Sequence[int]) -> None:
        """Drop the state of these samples: they are cold in this step."""
        for channel in self.coded.values():
            for key in ids:
                channel.state.forget(key)

    def close(self) -> None:
        """Forget everything; files of stores are removed."""
        for _, channel in self.channels():
            for store in channel.state.stores.values():
                store.close()

    # --- checkpoints

    def state_dict(self, stores: bool) -> dict[str, Tensor]:
        """State of all channels and of the trial; with `stores` the mirrors of samples too."""
        out = self.trial.state_dict() if self.trial is not None else {}
        for name, channel in self.channels():
            state = channel.state_dict(stores)
            out |= {f"{name}/{key}": value for key, value in state.items()}
        return out

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over a `state_dict()` of the same lane; channels that are not in it stay as they are."""
        if self.trial is not None and "trial" in state:
            self.trial.load_state_dict(state)
            self._change_memory(self.trial.memory)
        kinds = {name.partition("/")[0] for name in state if name.startswith(("coded", "exact"))}
        for kind in kinds:
            index = int(kind.removeprefix("coded").removeprefix("exact"))
            channel = self._channel(index, coded=kind.startswith("coded"))
            prefix = f"{kind}/"
            channel.load_state_dict({n.removeprefix(prefix): v for n, v in state.items() if n.startswith(prefix)})
