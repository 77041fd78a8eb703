"""Cases of the pipeline tests: damaged frames, NaN and lost memory are found, rolled back everywhere and healed."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist
from pipeline_support import (
    DELTA,
    IDENTITY,
    Data,
    Run,
    batch,
    check_counts,
    check_mirrors,
    check_same_step,
    fitting,
    total,
    train,
)
from rank_cases import check
from torch import Tensor

from thinwire.codecs import Quantize
from thinwire.config.wire import Link, Wire
from thinwire.memory import ErrorFeedback
from thinwire.memory.channel import Channel
from thinwire.pipeline import lane as lane_module
from thinwire.pipeline.lane import Lane
from thinwire.pipeline.overlap import run_ahead

WIRE = Wire(forward=DELTA.forward, backward=Link(Quantize(4, block=16), ErrorFeedback()))
IDS = list(range(8))


def ends(run: Run, end: str) -> list[Lane]:
    """This rank's end, "send" or "recv", of the first boundary."""
    return [lane for lane in run.pipe.lanes() if lane.name == "forward 0→1" and lane.end == end]


@contextlib.contextmanager
def flipped_bit(run: Run) -> Iterator[None]:
    """In the first frame that leaves over the first boundary."""
    with contextlib.ExitStack() as patches:
        for lane in ends(run, "send"):
            patches.enter_context(mock.patch.object(lane, "send", _flipping_once(lane.send)))
        yield


def _flipping_once(send: Any) -> Any:
    flipped: list[bool] = []

    def damaged(part: Any, index: int, x: Tensor) -> Tensor:
        frame = send(part, index, x)
        if not flipped:
            frame[40] ^= 4
            flipped.append(True)
        return frame

    return damaged


def remembered(run: Run) -> list[Any]:
    """Digests of this rank's mirrors, and its residuals."""
    mirrors = [lane.digests(IDS).tolist() for lane in run.pipe.lanes() if lane.per_sample]
    channels = [c for lane in run.pipe.lanes() for _, c in lane.channels()]
    return [mirrors, [c.state.read("e", key).tolist() for c in channels for key in c.state.stores["e"]]]


def trained(nonfinite: str = "nan") -> tuple[Run, Tensor, Tensor]:
    """A pipeline that has seen its samples three times, and a batch of them."""
    run = Run("1F1B", 4, WIRE, nonfinite=nonfinite)
    x, y = batch(8)
    for _ in range(3):
        run.step(x, y, IDS)
    return run, x, y


def flipped_bit_is_rolled_back_and_healed(nonfinite: str) -> None:
    """The damaged micro-batch's two samples are cold once, at both ends; gradients of the step are NaN, or zero."""
    run, x, y = trained(nonfinite)
    before = remembered(run)
    with flipped_bit(run):
        run.step(x, y, IDS)
    check(run.pipe.skipped, "the step was not skipped")
    for name, g in run.gradients().items():
        check((g.isnan() if nonfinite == "nan" else g == 0).all(), f"the gradient of {name} is {g.flatten()[:3]}")
    unchanged = before == remembered(run)
    check(dist.get_rank() == 1 or unchanged, "mirrors or residuals moved in a step that was rolled back")
    check_counts("flipped bit", run, rejected=1)
    cold = total(run, "cold")[0]
    run.step(x, y, IDS)
    check(not run.pipe.skipped, "the next step was skipped too")
    check_counts("flipped bit", run, cold=cold + 2 * 2)
    check_mirrors("flipped bit", run, IDS)


def nan_is_rolled_back() -> None:
    run, x, y = trained()
    before = remembered(run)
    bad = x.clone()
    bad[3, 0, 0] = math.nan
    run.step(bad, y, IDS)
    check(run.pipe.skipped, "the step was not skipped")
    check(before == remembered(run), "mirrors or residuals moved in a step that was rolled back")
    run.step(x, y, IDS)
    check(not run.pipe.skipped, "the next step was skipped too")
    check_mirrors("after the NaN", run, IDS)


def lost_store_at_one_end_is_healed() -> None:
    run, x, y = trained()
    for lane in ends(run, "recv"):
        for channel in lane.coded.values():
            for key in IDS:
                channel.state.forget(key)
    _check_healed(run, x, y)


def old_store_at_one_end_is_healed() -> None:
    """As of a stage that is restarted from an old state."""
    run, x, y = trained()
    old = {k: v.clone() for k, v in run.pipe.state_dict().items()}
    run.step(x + 0.1, y, IDS)
    for lane in ends(run, "recv"):
        prefix = f"rank1of{dist.get_world_size()}/stage1/forward 0→1/recv/"
        lane.load_state_dict({k.removeprefix(prefix): v for k, v in old.items() if k.startswith(prefix)})
    _check_healed(run, x, y)


def _check_healed(run: Run, x: Tensor, y: Tensor) -> None:
    healed = total(run, "healed")[0]
    run.step(x, y, IDS)
    check(not run.pipe.skipped, "the step was skipped")
    check_counts("after the loss", run, healed=healed + 2 * len(IDS))
    check_mirrors("after the loss", run, IDS)


FAULTS = [
    functools.partial(flipped_bit_is_rolled_back_and_healed, "nan"),
    functools.partial(flipped_bit_is_rolled_back_and_healed, "zero"),
    nan_is_rolled_back,
    lost_store_at_one_end_is_healed,
    old_store_at_one_end_is_healed,
]


def faults_are_found_at_the_end_of_a_step() -> None:
    """All of them, where the host looks at nothing before a step's end, as it does on a card."""
    with mock.patch.object(lane_module, "Channel", functools.partial(Channel, defer=True)):
        for fault in FAULTS:
            fault()


def overlapped_frames_change_no_bit(name: str) -> None:
    """Frames beside the computation: the same bits as torch's stage."""
    for microbatches in fitting(name, dist.get_world_size()):
        plain, ours = Run(name, microbatches, None), Run(name, microbatches, IDENTITY, overlap=True)
        for step in range(3):
            if step == 2 and name == "1F1B":
                run_ahead(ours.schedule)
            check_same_step(f"{microbatches} micro-batches, step {step}", plain, ours, *batch(2 * microbatches, step))


def overlapped_frames_are_mirrored_and_healed(name: str) -> None:
    data, run = Data(24, 12), Run(name, 12, DELTA, overlap=True)
    train(run, data, range(3))
    check_mirrors("after training", run, list(range(24)))
    check_counts("after training", run, skips=0, healed=0)
    ids, x, y = data.epoch(0)[0]
    with flipped_bit(run):
        run.step(x, y, ids)
    check(run.pipe.skipped, "a flipped bit was not rolled back")
    run.step(x, y, ids)
    check(not run.pipe.skipped, "the next step was skipped too")
    check_mirrors("after a flipped bit", run, ids)
