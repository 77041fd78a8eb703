"""Cases of the pipeline tests: steps that give the same bits as torch's own stage, or as a run without the feature."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from pipeline_support import (
    DELTA,
    IDENTITY,
    Block,
    Data,
    Run,
    batch,
    block,
    check_counts,
    check_mirrors,
    check_same_step,
    fitting,
    loss_of,
    train,
)
from rank_cases import check, check_equal, differences, refused
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from thinwire.codecs import LowRank, Quantize
from thinwire.collectives import flows
from thinwire.config.wire import Link, Wire
from thinwire.memory import Delta, ErrorFeedback
from thinwire.pipeline import early_receives


def identity_gives_the_bits_of_the_plain_stage(name: str) -> None:
    """Under a schedule, with several numbers of micro-batches, two steps each."""
    for microbatches in fitting(name, torch.distributed.get_world_size()):
        plain, ours = Run(name, microbatches, None), Run(name, microbatches, IDENTITY)
        for step in range(2):
            check_same_step(f"{microbatches} micro-batches, step {step}", plain, ours, *batch(2 * microbatches, step))
        check(not ours.pipe.stats.skips, f"{microbatches} micro-batches: {ours.pipe.stats.skips} steps were skipped")


def one_rank_has_no_wire() -> None:
    """World size 1: one stage, and both arms of a V."""
    for name in ("GPipe", "1F1B", "ZBV"):
        check_same_step(name, Run(name, 4, None), Run(name, 4, DELTA), *batch(8), list(range(8)))


def early_receives_change_no_bit(name: str) -> None:
    """From the second step on every receive is posted at its start."""
    taken: list[bool] = []
    take = early_receives.EarlyReceives.take

    def counted(self: early_receives.EarlyReceives, *place: Any) -> Any:
        arrivals = take(self, *place)
        taken.append(arrivals is not None)
        return arrivals

    ahead, late = Run(name, 4, DELTA), Run(name, 4, DELTA)
    for number in range(4):
        x, y = batch(8, number)
        rows = 7 if number == 3 else 8  # a short last batch: of other sizes, so as torch asks
        for run, limit in ((ahead, early_receives.LIMIT), (late, 0)):
            taken.clear()
            with (
                mock.patch.object(early_receives.EarlyReceives, "take", counted),
                mock.patch.object(early_receives, "LIMIT", limit),
            ):
                run.step(x[:rows], y[:rows], list(range(rows)))
            expected = run is ahead and number in (1, 2)
            check(set(taken) == {expected}, f"step {number}, limit {limit}: {sum(taken)} of {len(taken)} early")
        check_equal(f"step {number}", ahead.gradients(), late.gradients())


def steps_announced_ahead_change_no_bit() -> None:
    """Some steps announce the next one and some do not; samples come again in the next step; one is rolled back."""
    ahead, plain = Run("1F1B", 4, DELTA), Run("1F1B", 4, DELTA)
    order = [list(range(start, start + 8)) for start in (0, 8, 4, 0, 8, 2, 0)]
    certain = (True, True, False, True, True, False, False)
    for number, (ids, sure) in enumerate(zip(order, certain)):
        x, y = batch(8, number)
        if number == 3:
            x = x * torch.nan
        following = order[number + 1] if sure else None
        more = {"next_ids": following, "next_certain": sure} if ahead.first else {}
        ahead.step(x, y, ids, **more)
        plain.step(x, y, ids)
        if number != 3:
            check_equal(f"step {number}", ahead.gradients(), plain.gradients())
    check(ahead.pipe.skips == 1 and ahead.pipe.healed == plain.pipe.healed == 0, f"{ahead.pipe.stats}")
    check_mirrors("at the end", ahead, list(range(16)))
    first, second = batch(8)
    ahead.step(first, second, order[0], **({"next_ids": order[1], "next_certain": True} if ahead.first else {}))
    if ahead.first:
        with refused("next_certain=True announced"), ahead.pipe.step(ids=order[2]):
            pass


def streams_change_no_bit(overlap: bool) -> None:
    """Frames over three flows, pieces of seven bytes, and over one."""
    with mock.patch.object(flows, "LEAST", 7):
        three = Run("1F1B", 4, Wire(DELTA.forward, DELTA.backward, streams=3), overlap=overlap)
        one = Run("1F1B", 4, DELTA, overlap=overlap)
        for number in range(3):
            x, y = batch(8, number)
            three.step(x, y, list(range(8)))
            one.step(x, y, list(range(8)))
            check_equal(f"step {number}", three.gradients(), one.gradients())
        check(three.pipe.stats.forward_bytes == one.pipe.stats.forward_bytes, "other bytes were counted")
        used = next(iter(three.stages[0].transports.values())).flows if overlap else three.stages[0].flows
        check(used is not None and used.count == 3, "the frames went over one flow")


class Recomputed(Block):
    """Its forward is computed again in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def recomputed(index: int) -> nn.Module:
    return block(index, Recomputed)


def recomputed_and_retried_steps_change_no_bit() -> None:
    """Recomputation, and a step that failed and is tried again, read one version and commit once."""
    usual, again, failing = Run("1F1B", 4, DELTA), Run("1F1B", 4, DELTA, make=recomputed), Run("1F1B", 4, DELTA)
    ids = list(range(8))
    for number in range(3):
        x, y = batch(8, number)
        usual.step(x, y, ids)
        again.step(x, y, ids)
        try:
            with failing.pipe.step(ids=ids if failing.first else None):
                if number != 1:  # else with all receives posted and none matched
                    failing.torch_step(x + 1, y, [])
                raise KeyError("the user's code fails before or after torch's step")
        except KeyError:
            pass
        failing.step(x, y, ids)
        check_equal(f"recomputed, step {number}", again.gradients(), usual.gradients())
        check_equal(f"tried again, step {number}", failing.gradients(), usual.gradients())


def accumulated_step_adds_to_the_gradients() -> None:
    run, ids = Run("1F1B", 4, DELTA), list(range(8))
    run.step(*batch(8), ids)
    before = run.gradients()
    with run.pipe.step(ids=list(range(8, 16)) if run.first else None):
        run.torch_step(*batch(8, 9), [])
    check(differences(before, run.gradients()), "the second step added nothing")
    check_counts("accumulated", run, skips=0, healed=0)
    check_mirrors("accumulated", run, list(range(16)))


def changing_loss_scale_changes_no_bit() -> None:
    """What arrives, unscaled, is the same; also after steps that were dropped while the scale changed."""
    wire = Wire(backward=Link(Quantize(3, block=16), ErrorFeedback()))
    scale = {"now": 1.0}
    still, moving = Run("1F1B", 4, wire), Run("1F1B", 4, wire, scale=lambda: scale["now"])
    moving.schedule._loss_fn = lambda output, target: scale["now"] * loss_of(output, target)
    for step, factor in enumerate((1.0, 8.0, 8.0, 0.5)):
        scale["now"] = factor
        x, y = batch(8, step)
        still.step(x, y)
        moving.step(x, y)
        check_equal(f"step {step}", {name: g / factor for name, g in moving.gradients().items()}, still.gradients())
        scale["now"] = 4 * factor
        moving.step(torch.full_like(x, torch.nan), y)
        check(moving.pipe.skipped, f"a step of NaN after step {step} was kept")


def narrow(index: int) -> nn.Module:
    return block(index).bfloat16()


def bf16_trains_to_the_loss_of_the_plain_stage() -> None:
    wire = Wire(forward=Link(Quantize(4, block=16), Delta()), backward=Link(LowRank(4), ErrorFeedback()))
    run, plain, data = Run("1F1B", 4, wire, make=narrow), Run("1F1B", 4, None, make=narrow), Data(16, 8)
    data.x, data.y = data.x.bfloat16(), data.y.bfloat16()
    loss, exact = train(run, data, range(4)), train(plain, data, range(4))
    check_mirrors("bf16", run, list(range(16)))
    check(not run.last or abs(loss - exact) <= 0.05 * exact, f"loss {loss} against {exact}")


def evaluation_leaves_memory_alone(how: str) -> None:
    """Exact, it equals torch's own; on the same path it is near."""
    plain, run = Run("1F1B", 4, None), Run("1F1B", 4, DELTA, evaluate=how)
    x, y = batch(8)
    ids = list(range(8))
    for _ in range(2):
        run.step(x, y, ids)
    before = run.pipe.state_dict()
    theirs, ours = plain.eval(x, y), run.eval(x, y, ids=ids if run.first else None)
    if run.last:
        off = float((theirs - ours).abs().max())
        check(off == 0 if how == "exact" else 0 < off < 0.1, f"evaluation differs by {off}")
    after = run.pipe.state_dict()
    kept = [k for k in before if "/h/" in k or "/e/" in k]
    check([k for k in after if "/h/" in k or "/e/" in k] == kept, "evaluation remembers other keys")
    check_equal("memory after evaluation", {k: before[k] for k in kept}, after)
    run.step(x, y, ids)
    check(not run.pipe.skipped, "training after evaluation was skipped")
    check_counts("after evaluation", run, rollbacks=0)
