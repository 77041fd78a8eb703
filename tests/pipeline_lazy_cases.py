"""Cases of the pipeline tests: lazy error propagation conserves the sum of gradients, and is kept where it helps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from unittest import mock

import torch
from pipeline_support import LENGTH, WIDTH, Block, Run, batch, block, gathered
from rank_cases import check
from torch import Tensor, nn

from thinwire.codecs import Codec, LowRank, Quantize
from thinwire.config.wire import Link, Wire
from thinwire.memory import ErrorFeedback, Plain
from thinwire.parallel import Plan
from thinwire.pipeline.lane import Lane
from thinwire.pipeline.lazy_error import STEPS

MICROBATCHES = 5


def every_second(stage: int, microbatch: int) -> bool:
    return microbatch % 2 == 0


def arrivals_and_residual_sum_to_what_was_computed(codec: Codec, when: object) -> None:
    """Over micro-batches and steps, at every boundary; and `when` says which micro-batches are coded."""
    run = Run("1F1B", MICROBATCHES, Wire(backward=Link(codec, ErrorFeedback(), when)), plan=Plan("1F1B"))
    run.step(*batch(MICROBATCHES))
    sums = Sums()
    with recording(run, sums):
        for step in range(3):
            run.step(*batch(MICROBATCHES, step))
    for lane in backward_lanes(run, "send"):
        sums.left[lane.name] = residual(lane)
    everyone = Sums()
    for theirs in gathered(sums):
        for name, values in vars(theirs).items():
            getattr(everyone, name).update(values)
    _check_sums(everyone)
    if when == "epilogue":
        _check_epilogue(everyone)


@dataclass
class Sums:
    """By boundary: what was given to it (with the residual at the start), what came out, what is left, and which
    micro-batches were coded."""

    sent: dict[str, Tensor] = field(default_factory=dict)
    come: dict[str, Tensor] = field(default_factory=dict)
    left: dict[str, Tensor] = field(default_factory=dict)
    coded: dict[str, list[bool]] = field(default_factory=dict)


def backward_lanes(run: Run, end: str) -> list[Lane]:
    return [lane for lane in run.pipe.lanes() if lane.name.startswith("backward") and lane.end == end]


def residual(lane: Lane) -> Tensor:
    (channel,) = lane.coded.values()
    return channel.state.read("e", f"{lane.name}/0").clone()


@contextlib.contextmanager
def recording(run: Run, sums: Sums) -> Iterator[None]:
    """Record what crosses this rank's ends of the backward boundaries."""
    with contextlib.ExitStack() as patches:
        for lane in backward_lanes(run, "send"):
            sums.sent[lane.name], sums.coded[lane.name] = residual(lane), []
            patches.enter_context(mock.patch.object(lane, "send", _sending(lane, sums)))
        for lane in backward_lanes(run, "recv"):
            patches.enter_context(mock.patch.object(lane, "recv", _receiving(lane, sums)))
        yield


def _sending(lane: Lane, sums: Sums):
    send, name = lane.send, lane.name

    def sending(part, index: int, x: Tensor) -> Tensor:
        sums.sent[name] = sums.sent[name] + x
        sums.coded[name].append(part.coded)
        return send(part, index, x)

    return sending


def _receiving(lane: Lane, sums: Sums):
    recv, name = lane.recv, lane.name

    def receiving(part, *rest) -> Tensor:
        y = recv(part, *rest)
        sums.come[name] = sums.come.get(name, 0) + y
        return y

    return receiving


def _check_sums(sums: Sums) -> None:
    check(sums.sent, "no boundary was recorded")
    for name, sent in sums.sent.items():
        gap = float((sums.come[name] + sums.left[name] - sent).norm() / sent.norm())
        check(gap < 1e-5, f"{name}: what arrived and the residual miss the sum by {gap}")
        check(sums.left[name].norm() > 0, f"{name}: no residual is left, so nothing was tested")


def _check_epilogue(sums: Sums) -> None:
    """The last micro-batches, as many as stages follow."""
    stages = len(sums.sent) + 1
    for name, coded in sums.coded.items():
        follow = stages - int(name.removeprefix("backward ").partition("→")[0])
        expected = [m >= MICROBATCHES - follow for m in range(MICROBATCHES)]
        check(coded[:MICROBATCHES] == expected, f"{name}: coded {coded[:MICROBATCHES]}, not {expected}")


class Biased(nn.Module):
    """A block whose output has a large part common to all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()
        self.common = nn.Parameter(torch.linspace(-8, 8, LENGTH * WIDTH).view(LENGTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.common


def biased(index: int) -> nn.Module:
    return block(index, Biased)


def auto_keeps_lazy_error_only_where_it_helps() -> None:
    """memory="auto": it is tried at every boundary, and kept where it made gradients better."""
    three = Quantize(3, block=16)
    for codec, make, kept in ((three, block, False), (LowRank(2), biased, False), (three, biased, True)):
        run = Run("1F1B", 8, Wire(backward=Link(codec, "auto")), make=make)
        for step in range(2 * STEPS + 1):
            run.step(*batch(16, step))
        for lane in run.pipe.lanes():
            if lane.trial is None:
                continue
            what, (channel,) = f"{codec}, {make.__name__}, {lane.name}", lane.coded.values()
            ended = not lane.trial.on and lane.trial.step == 2 * STEPS + 1
            check(ended and lane.trial.lazy is kept, f"{what}: {vars(lane.trial)}")
            memory = ErrorFeedback() if kept else Plain()
            check(channel.memory == memory, f"{what}: the memory is {channel.memory.name}, not {memory.name}")
            left = channel.state.read("e", f"{lane.name}/0")
            check((left is not None) is kept, f"{what}: a residual is {'left' if left is not None else 'not left'}")
