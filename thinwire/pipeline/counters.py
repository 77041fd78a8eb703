"""What a pipeline rank has sent, received, remembered and refused."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from thinwire.config.quantities import show_bytes
from thinwire.errors import UsageError
from thinwire.memory.store import RamStore, parse_capacity
from thinwire.pipeline.lane import Lane


@dataclass(frozen=True)
class Counters:
    """Bytes are frames, headers included, and integers and masks as they are, sent by this rank; `raw` what the
    tensors take uncompressed."""

    steps: int
    skips: int
    healed: int  # samples whose mirrors the two ends did not hold alike
    forward_bytes: int
    backward_bytes: int
    raw_bytes: int
    cold: int
    warm: int
    nonfinite: int
    rejected: int  # frames that were damaged, stale or foreign
    rollbacks: int

    @property
    def hit_rate(self) -> float:
        return self.warm / (self.cold + self.warm) if self.cold + self.warm else 0.0

    @staticmethod
    def of(lanes: Sequence[Lane], steps: int, skips: int, healed: int) -> Counters:
        sent = {way: _sum(lanes, way, "wire_bytes") for way in ("forward", "backward")}
        raw = _sum(lanes, "forward", "raw_bytes") + _sum(lanes, "backward", "raw_bytes")
        every = [channel.stats for lane in lanes for _, channel in lane.channels()]
        rest = {n: sum(getattr(s, n) for s in every) for n in ("cold", "warm", "nonfinite", "rejected", "rollbacks")}
        return Counters(steps, skips, healed, sent["forward"], sent["backward"], raw, **rest)


def _sum(lanes: Iterable[Lane], way: str, field: str) -> int:
    """Of all that was sent that way; `field` is wire_bytes or raw_bytes."""
    mine = [lane for lane in lanes if lane.end == "send" and lane.name.startswith(way)]
    framed = sum(getattr(channel.stats, field) for lane in mine for _, channel in lane.channels())
    return framed + sum(lane.sent_as_is for lane in mine)


def store_forecast(lanes: Iterable[Lane], samples: int | None, row: Sequence[int]) -> list[str]:
    """The same before the first step, for rows of that shape. UsageError where a disk has too little room."""
    out, needed = [], dict[Path, float]()
    for lane in (lane for lane in lanes if lane.per_sample):
        memory = lane.memory
        size = RamStore(memory.store).pack(torch.zeros(tuple(row))).nbytes
        line = f"{lane.name} ({lane.end}) will remember {show_bytes(size)} a sample in {memory.path or 'RAM'}"
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
    """A line per lane that remembers samples: bytes a sample, and for the whole data set where its size is known."""
    out = []
    for lane in lanes:
        stores = [channel.state.stores["h"] for channel in lane.coded.values() if lane.per_sample]
        kept = [(sum(store.size_of(key) for key in store), sum(1 for _ in store)) for store in stores]
        a_sample = sum(size / count for size, count in kept if count)
        if not a_sample:
            continue
        where = stores[0].path if hasattr(stores[0], "path") else "RAM"
        line = f"{lane.name} ({lane.end}) remembers {show_bytes(a_sample)} a sample in {where}"
        out.append(line if samples is None else f"{line}, {show_bytes(a_sample * samples)} for {samples} samples")
    return out
