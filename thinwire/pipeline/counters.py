"""Counters of a pipeline rank, how large its stores of samples are or will become, and whether they are of use."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from thinwire.errors import UsageError
from thinwire.memory.store import RamStore, parse_capacity
from thinwire.pipeline.lane import Lane
from thinwire.quantities import show_bytes

LONG = 1000  # training steps after which it is said that no sample has come again, where their number is unknown
ONCE = (
    "samples that come once are better sent by the preset 'scratch': 4 bits each way, no memory of samples"
    " ('scratch-tokens' where every rank is given token ids, as in thinwire train)"
)


@dataclass(frozen=True)
class Counters:
    """What one rank has done so far.

    steps: begun. skips: training steps that were rolled back.
    healed: samples whose mirrors the two ends did not hold alike.
    forward_bytes, backward_bytes: sent by this rank: frames with their headers, and integers and masks as they are.
    raw_bytes: what the tensors sent take uncompressed.
    cold, warm: visits of samples without and with a mirror.
    nonfinite: messages with NaN or Inf. rejected: frames that were damaged, stale or foreign.
    rollbacks: of channels.
    lost: samples whose mirrors in a file were changed by somebody else, and are cold at their next visit.
    """

    steps: int
    skips: int
    healed: int
    forward_bytes: int
    backward_bytes: int
    raw_bytes: int
    cold: int
    warm: int
    nonfinite: int
    rejected: int
    rollbacks: int
    lost: int

    @property
    def hit_rate(self) -> float:
        """The share of visits that were warm."""
        return self.warm / (self.cold + self.warm) if self.cold + self.warm else 0.0

    @staticmethod
    def of(lanes: Sequence[Lane], steps: int, skips: int, healed: int) -> Counters:
        """Sums over a rank's `lanes`; the others are as in the class."""
        forward = _sum(lanes, "forward", "wire_bytes")
        backward = _sum(lanes, "backward", "wire_bytes")
        raw = _sum(lanes, "forward", "raw_bytes") + _sum(lanes, "backward", "raw_bytes")
        every = [channel.stats for lane in lanes for _, channel in lane.channels()]
        rest = {n: sum(getattr(s, n) for s in every) for n in ("cold", "warm", "nonfinite", "rejected", "rollbacks")}
        lost = sum(channel.state.stores["h"].lost for lane in lanes for _, channel in lane.channels())
        return Counters(steps, skips, healed, forward, backward, raw, **rest, lost=lost)


def _sum(lanes: Iterable[Lane], direction: str, field: str) -> int:
    """Of all that was sent in a direction; `field` is wire_bytes or raw_bytes."""
    sending = [lane for lane in lanes if lane.end == "send" and lane.name.startswith(direction)]
    framed = sum(getattr(channel.stats, field) for lane in sending for _, channel in lane.channels())
    return framed + sum(lane.sent_as_is for lane in sending)


def store_forecast(lanes: Iterable[Lane], samples: int | None, row: Sequence[int]) -> list[str]:
    """`store_estimate` before the first step. UsageError where a disk has too little room.

    lanes: of this rank. samples: in the data set, where known. row: the shape of one sample's activation.
    """
    out = []
    needed: dict[Path, float] = {}
    for lane in (lane for lane in lanes if lane.per_sample):
        memory = lane.memory
        size = RamStore(memory.store).pack(torch.zeros(tuple(row))).nbytes
        line = f"{lane.name} ({lane.end}) will remember {show_bytes(size)} per sample in {memory.path or 'RAM'}"
        if samples is not None:
            share, limit = parse_capacity(memory.capacity)
            total = min(share * size * samples, math.inf if limit is None else limit)
            line += f", {show_bytes(total)} for {samples} samples"
            if memory.path is not None:
                needed[Path(memory.path)] = needed.get(Path(memory.path), 0.0) + total
        out.append(line)
    for folder, total in needed.items():
        free = shutil.disk_usage(folder).free  # made by the stores already
        if total > free:
            raise UsageError(
                f"this rank's stores will take {show_bytes(total)} in {folder}, where {show_bytes(free)} are free: "
                "give another path, a capacity such as 0.5, or store = 'int8'"
            )
    return out


def store_estimate(lanes: Iterable[Lane], samples: int | None) -> list[str]:
    """One line per lane that remembers samples: bytes per sample, and for the whole data set where its size is known.

    lanes: of this rank. samples: in the data set, where known.
    """
    out = []
    for lane in lanes:
        stores = [channel.state.stores["h"] for channel in lane.coded.values() if lane.per_sample]
        kept = [(sum(store.size_of(key) for key in store), sum(1 for _ in store)) for store in stores]
        per_sample_bytes = sum(size / count for size, count in kept if count)
        if not per_sample_bytes:
            continue
        where = stores[0].path if hasattr(stores[0], "path") else "RAM"
        line = f"{lane.name} ({lane.end}) remembers {show_bytes(per_sample_bytes)} per sample in {where}"
        out.append(
            line if samples is None else f"{line}, {show_bytes(per_sample_bytes * samples)} for {samples} samples"
        )
    return out


class StoreReport:
    """Says how large the stores of samples are, and once, if it is so, that no sample has come again.

    samples, row and say: Pipeline's.
    """

    def __init__(self, samples: int | None, row: Sequence[int] | None, say: Callable[[str], None]) -> None:
        self.samples = samples
        self.row = row
        self.say = say
        self.steps = 0  # that were kept
        self.watching = True

    def before(self, lanes: Sequence[Lane]) -> None:
        """All lanes are there, and nothing has been sent."""
        for line in () if self.row is None else store_forecast(lanes, self.samples, self.row):
            self.say(line)

    def after(self, lanes: Sequence[Lane], first: bool) -> None:
        """A training step was kept; `first`: of the whole run."""
        self.steps += 1
        for line in store_estimate(lanes, self.samples) if first and self.row is None else ():
            self.say(line)
        for lane in [lane for lane in lanes if lane.per_sample][:1] if self.watching else ():
            visits = [channel.stats for channel in lane.coded.values()]
            cold, warm = sum(stats.cold for stats in visits), sum(stats.warm for stats in visits)
            enough = self.steps >= LONG if self.samples is None else cold > self.samples
            if enough and not warm:
                self.say(f"{lane.name}: none of {cold} samples has come again in {self.steps} steps; {ONCE}")
            self.watching = not enough and not warm
