"""One end of one direction over one boundary between stages: tensors of a micro-batch ⇄ frames.

Per tensor there are two channels: the coded one, with the link's codec and memory, and an exact one for messages that
`when` leaves alone and for evaluation. Per-sample memory (a cold start) is keyed by sample id, everything else by
boundary. A frame that is damaged, stale or foreign, or that says "not finite", becomes NaN and a fault: the step goes
on to its end, where all ranks roll it back together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from thinwire.codecs import Identity
from thinwire.config.wire import Link
from thinwire.errors import UsageError
from thinwire.kernels.random import derive
from thinwire.memory import Memory, Plain
from thinwire.memory.channel import Channel
from thinwire.memory.store import Key
from thinwire.pipeline.lazy_error import Trial

AS_IS = Link(Identity())


@dataclass(frozen=True)
class Part:
    """A micro-batch at this boundary: its number, its samples, whether `when` chose it."""

    microbatch: int
    ids: tuple[int, ...] | None
    coded: bool


class Lane:
    """`name` is the boundary and direction ("forward 1→2"), equal at both ends; `end` is send or recv."""

    def __init__(self, link: Link | None, name: str, end: str, seed: int) -> None:
        self.link, self.name, self.end, self.seed = link or AS_IS, name, end, seed
        tries = self.link.memory == "auto" and end == "send"
        self.trial = Trial(name, self.link.codec, seed) if tries else None
        if self.memory.refresh:
            raise UsageError(f"{name}: {self.memory.name} sends in full at random; a pipeline takes other memories")
        self.coded: dict[int, Channel] = {}
        self.exact: dict[int, Channel] = {}
        self.step: int | None = None
        self.faults: list[str] = []
        self.sent_as_is = 0  # bytes of integers and masks, which no channel counts
        self._lost: list[tuple[Channel, Key]] = []
        self._channel(Part(0, None, True), 0)  # a codec or a path that cannot be shows before the first step

    @property
    def memory(self) -> Memory:
        """ "auto" is what the trial of lazy error says; the receiving end need not know."""
        if isinstance(self.link.memory, Memory):
            return self.link.memory
        return Plain() if self.trial is None else self.trial.memory

    @property
    def per_sample(self) -> bool:
        return self.memory.cold_start

    # --- tensors ⇄ frames

    def send(self, part: Part, index: int, x: Tensor) -> Tensor:
        """The frame of tensor `index` of a micro-batch; integers and masks go as they are."""
        if not x.is_floating_point():
            self.sent_as_is += x.nbytes
            return x.contiguous()
        channel, key = self._channel(part, index), self._key(part, index, tuple(x.shape))
        before = channel.stats.nonfinite
        frame = channel.send(key, x, nonfinite="later")
        if channel.stats.nonfinite > before:
            self.faults.append(f"{self.name}, micro-batch {part.microbatch}: NaN or Inf")
        elif self.trial is not None and part.coded:
            self.trial.note_message(part.microbatch, index, x)
        return frame

    def expect(self, part: Part, index: int, shape: Sequence[int], like: Tensor) -> Tensor:
        """An empty buffer of exactly the frame's size."""
        if not like.is_floating_point():
            return torch.empty(tuple(shape), dtype=like.dtype, device=like.device)
        size = self._channel(part, index).nbytes(self._key(part, index, tuple(shape)), shape, like.dtype)
        return torch.empty(size, dtype=torch.uint8, device=like.device)

    def recv(self, part: Part, index: int, frame: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The tensor of a frame; NaN and a fault where it is not the expected one."""
        if not dtype.is_floating_point:
            return frame
        channel, key = self._channel(part, index), self._key(part, index, tuple(shape))
        before = channel.stats.nonfinite
        try:
            y = channel.recv(key, frame, shape, dtype, later=True)
        except ValueError as error:
            self.faults.append(str(error))
            self._lost += [(channel, k) for k in (key if isinstance(key, list) else [key])]
            return torch.full(tuple(shape), torch.nan, dtype=dtype, device=frame.device)
        if channel.stats.nonfinite > before:
            self.faults.append(f"{self.name}, micro-batch {part.microbatch}: NaN or Inf")
        return y

    def resolve_checks(self) -> None:
        """The step's end: faults of messages that nobody has looked at yet."""
        for _, channel in self.channels():
            for keys, foreign in channel.resolve_checks():
                what = "frame is damaged, stale or foreign" if foreign else "NaN or Inf"
                self.faults.append(f"{self.name}, {', '.join(map(str, keys))}: {what}")
                self._lost += [(channel, key) for key in keys] if foreign else []

    def _key(self, part: Part, index: int, shape: tuple[int, ...]) -> Key | list[Key]:
        if not (part.coded and self.per_sample):
            return f"{self.name}/{index}"
        if part.ids is None:
            raise UsageError(f"{self.name}: {self.memory.name} remembers samples: give step(ids=…) on the first stage")
        if not shape or shape[0] != len(part.ids):
            raise UsageError(
                f"{self.name}: {len(part.ids)} sample ids in micro-batch {part.microbatch} for a tensor of shape "
                f"{shape}: its first dimension must be the samples"
            )
        return list(part.ids)

    def _channel(self, part: Part, index: int) -> Channel:
        table = self.coded if part.coded else self.exact
        if index not in table:
            kind = "" if part.coded else "exact "
            memory = self._placed(index) if part.coded else Plain()
            codec = self.link.codec if part.coded else Identity()
            seed = derive(self.seed, self.name, index)
            table[index] = Channel(codec, memory, seed=seed, name=f"{kind}{self.name}")
            if self.step is not None:
                table[index].begin(self.step)
        return table[index]

    def _placed(self, index: int) -> Memory:
        """The link's memory, with a file of its own in the folder that its path names."""
        memory = self.memory
        if memory.path is None:
            return memory
        name = f"{self.name.replace(' ', '-').replace('→', '-')}-{self.end}-{index}.store"
        return replace(memory, path=str(Path(memory.path) / name))

    # --- steps

    def channels(self) -> Iterator[tuple[str, Channel]]:
        for kind, table in (("coded", self.coded), ("exact", self.exact)):
            for index, channel in table.items():
                yield f"{kind}{index}", channel

    def begin(self, step: int) -> None:
        self.step, self.faults, self._lost = step, [], []
        if self.trial is not None:
            self.trial.begin(step)
        for _, channel in self.channels():
            channel.begin(step)

    def end_step(self, keep: bool, count: bool = True) -> None:
        """Commit, or roll back; what came in damaged is then forgotten, so that its samples are cold next time."""
        self.step = None
        for _, channel in self.channels():
            if keep:
                channel.commit()
            elif count:
                channel.rollback()
            else:
                channel.state.rollback()
        for channel, key in self._lost:
            channel.state.forget(key)
        if self.trial is not None:
            self.trial.end_step(keep)
            self._change_memory(self.trial.memory)

    def _change_memory(self, memory: Memory) -> None:
        """From the next step on; residuals of another memory are dropped."""
        for channel in self.coded.values():
            if channel.memory != memory:
                channel.memory = channel.visits.memory = memory
                for key in list(channel.state.stores["e"]):
                    channel.state.stores["e"].forget(key)

    def rescale(self, factor: float) -> None:
        """The loss scale has changed by `factor`, and with it the unit of the residuals."""
        for channel in self.coded.values():
            for key in list(channel.state.stores["e"]):
                e = channel.state.read("e", key)
                if e is not None:
                    channel.state.write("e", key, e * factor)

    # --- what is remembered of samples

    def digests(self, ids: Sequence[int]) -> Tensor:
        """int64[samples]: a digest of the mirrors of all tensors, −1 where one is missing."""
        parts = [channel.digests(ids) for channel in self.coded.values()]
        if not parts:
            return torch.full((len(ids),), -1, dtype=torch.int64)
        both = torch.stack(parts)  # below 2³² each, so that the weighted sum stays far below 2⁶³
        weights = torch.arange(1, len(parts) + 1)[:, None]
        return torch.where((both >= 0).all(dim=0), (both * weights).sum(dim=0), -1)

    def remembers(self) -> int:
        """How many samples' mirrors this end holds."""
        return max((sum(1 for _ in channel.state.stores["h"]) for channel in self.coded.values()), default=0)

    def agree(self, ids: Sequence[int], mine: Tensor, theirs: Tensor) -> int:
        """Forget, for this step, what the two ends do not hold alike; how many samples differed."""
        differ = (mine != theirs).tolist()
        for key, other in zip(ids, differ):
            if other:
                for channel in self.coded.values():
                    channel.state.forget(key)
        return sum(differ)

    def load(self, ids: Sequence[int]) -> None:
        """These samples are about to be read."""
        for channel in self.coded.values():
            channel.state.stores["h"].load(ids)

    def close(self) -> None:
        """Forget everything; files of stores are removed."""
        for _, channel in self.channels():
            for store in channel.state.stores.values():
                store.close()

    # --- checkpoints

    def state_dict(self, stores: bool) -> dict[str, Tensor]:
        out = self.trial.state_dict() if self.trial is not None else {}
        for name, channel in self.channels():
            state = channel.state_dict(stores)
            out |= {f"{name}/{key}": value for key, value in state.items()}
        return out

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        if self.trial is not None and "trial" in state:
            self.trial.load_state_dict(state)
            self._change_memory(self.trial.memory)
        kinds = {name.partition("/")[0] for name in state if name.startswith(("coded", "exact"))}
        for kind in kinds:
            index = int(kind.removeprefix("coded").removeprefix("exact"))
            channel = self._channel(Part(0, None, kind.startswith("coded")), index)
            prefix = f"{kind}/"
            channel.load_state_dict({n.removeprefix(prefix): v for n, v in state.items() if n.startswith(prefix)})
