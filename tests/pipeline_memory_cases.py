"""Cases of the pipeline tests: what the two ends of a boundary remember of samples."""

from __future__ import annotations

import io
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from pipeline_support import (
    DELTA,
    EIGHT,
    IDENTITY,
    LENGTH,
    WIDTH,
    Block,
    Data,
    Run,
    batch,
    block,
    check_counts,
    check_mirrors,
    fitting,
    gathered,
    total,
    train,
)
from rank_cases import check, check_equal, differences
from torch import Tensor, nn

from thinwire.codecs import LowRank, Quantize
from thinwire.collectives.groups import Group
from thinwire.config.wire import Link, Wire
from thinwire.memory import Delta, ErrorFeedback, FileStore


def mirrors_stay_equal_over_shuffled_epochs(name: str, steps: int) -> None:
    """Under a schedule, nothing healed or skipped; in short runs also the loss of the plain stage."""
    microbatches = max(fitting(name, dist.get_world_size())[0], dist.get_world_size())
    data = Data(4 * microbatches, 2 * microbatches)
    run, epochs = Run(name, microbatches, DELTA), range(steps // 2)
    loss = train(run, data, epochs)
    check_mirrors("after training", run, list(range(data.samples)))
    check_counts("after training", run, skips=0, healed=0)
    cold, warm = total(run, "cold", "warm")
    check(cold * (len(epochs) - 1) == warm, f"{cold} cold and {warm} warm in {len(epochs)} epochs")
    if len(epochs) <= 10:
        exact = train(Run(name, microbatches, None), data, epochs)
        check(not run.last or abs(loss - exact) < 0.02 * exact, f"loss {loss} against {exact}")


def batches_of_other_shapes() -> None:
    """Short last batch, other lengths, texts as ids; sizes of messages as announced (else Gloo would end the rank)."""
    quantised = Wire(forward=EIGHT, backward=Link(Quantize(4, block=16), ErrorFeedback()))
    for name, wire in (("delta", DELTA), ("identity", IDENTITY), ("quantised", quantised)):
        plain, run = Run("1F1B", 4, None), Run("1F1B", 4, wire)
        plain.step(*batch(8))
        x, y = batch(600, 1)
        run.step(x, y, list(range(-600, 0)), shape=x.shape)  # more ids than one announcement holds
        for length, rows in ((LENGTH, 8), (LENGTH, 7), (12, 8), (5, 5), (LENGTH, 8), (12, 8), (12, 7)):
            x, y = batch(rows, 3, length)
            losses = run.step(x, y, [f"sample {i}" for i in range(rows)], shape=x.shape)
            if wire is IDENTITY and (length, rows) == (LENGTH, 8):
                exact = plain.step(x, y)
                check(losses == exact, f"losses {losses}, not {exact}, after batches of other shapes")
                check_equal("after batches of other shapes", run.gradients(), plain.gradients())
        if wire is DELTA:  # a sample of another length is cold
            both = 2 * (dist.get_world_size() - 1)
            check_counts(name, run, warm=both * (7 + 7), cold=both * (600 + 8 + 8 + 5 + 8 + 8))
        check_counts(name, run, skips=0, rejected=0)


RESUMED = Wire(
    forward=Link(Quantize(3, block=16, rounding="stochastic"), Delta(cold=Quantize(8, block=16))),
    backward=Link(LowRank(2), ErrorFeedback()),
)


def resumed_run(stores: bool) -> None:
    """Saved after six steps and loaded into new stages: the same bits as without stopping; without stores only cold."""
    data, whole, again = Data(24, 8), Run("ZBV", 4, RESUMED), Run("ZBV", 4, RESUMED)
    train(whole, data, range(2))
    for stage, new in zip(whole.stages, again.stages):
        new.submod.load_state_dict(stage.submod.state_dict())
    file = io.BytesIO()
    torch.save(whole.pipe.state_dict(stores=stores), file)
    train(whole, data, range(2, 4))
    heard = _load(again, file)
    train(again, data, range(2, 4))
    check_mirrors("whole run", whole, list(range(data.samples)))
    check_mirrors("resumed run", again, list(range(data.samples)))
    cold = total(again, "cold")[0]
    if stores:
        check_equal("resumed", again.gradients(), whole.gradients())
        check(not cold and not heard, f"resumed: {cold} cold, warned {heard}")
        _other_shape(file)
    else:
        check(cold and len(heard) == 1, f"resumed without stores: {cold} cold, warned {heard}")
        check(differences(again.gradients(), whole.gradients()), "the stores do not matter, so nothing was tested")


def _load(run: Run, file: io.BytesIO) -> list[str]:
    """What was warned of."""
    file.seek(0)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        run.pipe.load_state_dict(torch.load(file, weights_only=True))
    return [str(one.message) for one in heard]


def _other_shape(file: io.BytesIO) -> None:
    """Resume with shorter samples of the same ids."""
    run = Run("ZBV", 4, RESUMED)
    _load(run, file)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for ids, x, y in Data(24, 8, LENGTH - 2).epoch(0):
            run.step(x, y, ids)
    said = [str(one.message) for one in heard if "of another shape" in str(one.message)]
    check(len(said) == 1, f"resumed with shorter samples: warned {said}, not once")


class Dropping(nn.Module):
    """A block whose output loses values at random."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = Block(), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.inner(x))


def dropping(index: int) -> nn.Module:
    return block(index, Dropping)


def dropout_before_a_boundary() -> None:
    """It is warned of; with masks by sample the change of an unchanged sample vanishes."""
    warned, seeded = _error_with_dropout("warn"), _error_with_dropout("seed")
    check(seeded is None or seeded < 0.3 * warned, f"relative error {seeded} by sample, {warned} otherwise")


def _error_with_dropout(choice: str) -> float | None:
    """The relative error of what the first stage sends; None on other ranks."""
    wire = Wire(forward=Link(Quantize(2, block=16), Delta(store="fp32", cold=Quantize(8, block=16), gate=False)))
    run = Run("GPipe", 2, wire, make=dropping, stage_options={"dropout": choice})
    x, y = batch(4)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        run.step(x, y, [1, 2, 3, 4])
    said = any("drops values at random (drop)" in str(w.message) for w in heard)
    check(said is (choice == "warn" and run.first), f"dropout {choice!r}: warned is {said}")
    for lane in run.pipe.lanes():
        if lane.end == "send" and lane.per_sample:
            for channel in lane.coded.values():
                channel.stats.measure_every = 1
    for _ in range(3):
        run.step(x, y, [1, 2, 3, 4])
    errors = [c.stats.relative_error for lane in run.pipe.lanes() if lane.end == "send" for c in lane.coded.values()]
    return errors[0] if run.first else None


def mirrors_in_files_or_of_half_the_ids() -> None:
    """In files, with prefetch, gradients are those of RAM; where half the ids are kept, half are warm at most."""
    with tempfile.TemporaryDirectory() as folder:
        ram = _stored()
        file = _stored(path=str(Path(folder) / f"rank{dist.get_rank()}"))
        half = _stored(capacity=0.5)
        data = Data(32, 8)
        for number in range(3):
            epoch = data.epoch(number)
            for at, (ids, x, y) in enumerate(epoch):
                ram.step(x, y, ids)
                following = epoch[at + 1][0] if at + 1 < len(epoch) and file.first else None
                file.step(x, y, ids, next_ids=following)
                half.step(x, y, ids)
                check_equal(f"epoch {number}", file.gradients(), ram.gradients())
        check(list(Path(folder).rglob("*.store")), "no file was written")
        check_counts("half the ids", half, healed=0)
        check(0.2 < half.pipe.stats.hit_rate < 0.5, f"half the ids: hit rate {half.pipe.stats.hit_rate}")
        check(abs(ram.pipe.stats.hit_rate - 2 / 3) < 1e-6, f"all ids: hit rate {ram.pipe.stats.hit_rate}")


def _stored(group: Group = None, **store: object) -> Run:
    memory = Delta(cold=Quantize(8, block=16), **store)
    return Run("1F1B", 4, Wire(forward=Link(Quantize(4, block=16), memory), backward=EIGHT), group=group)


def replicas_and_runs_share_a_folder() -> None:
    """Two pipelines of two stages, and two runs of each, with one path: files for every end, gradients those of RAM."""
    mine = dist.get_rank() // 2
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][mine]
    with tempfile.TemporaryDirectory() as own:
        folder = Path(gathered(own)[0]) / "mirrors"
        ram, one, other = _stored(group), _stored(group, path=str(folder)), _stored(group, path=str(folder))
        for number in range(3):
            for ids, x, y in Data(16, 8).epoch(number):
                ram.step(x + mine, y, ids)
                for run in (one, other):
                    run.step(x + mine, y, ids)
                    check_equal(f"epoch {number}", run.gradients(), ram.gradients())
                check(not ram.pipe.skipped, f"epoch {number} was skipped")
        check_counts("one path", one, healed=0, lost=0)
        dist.barrier()
        files = sorted(path.name for path in folder.iterdir())
        check(len(files) == 2 * dist.get_world_size(), f"files {files}, not one per rank and run")
        dist.barrier()


def store_changed_by_somebody_else_is_healed() -> None:
    """What somebody writes into a file of mirrors is seen: those samples are cold, and counted at both ends."""
    data = Data(16, 8)
    with tempfile.TemporaryDirectory() as folder:
        run = _stored(path=folder)
        train(run, data, range(2))
        stores = [channel.state.stores["h"] for lane in run.pipe.lanes() for channel in lane.coded.values()]
        for store in stores:
            if isinstance(store, FileStore) and run.first:
                store.path.write_bytes(bytes(store.end))
        train(run, data, range(2, 3))
        check_counts("changed", run, skips=0, lost=data.samples, healed=2 * data.samples)
        check_mirrors("changed", run, list(range(data.samples)))


def size_of_the_stores_is_said_once() -> None:
    """By sample and for the data set; before the first step where the shape of a sample is given. Whether kernels have
    to be compiled, which is said too, depends on what ran before."""
    lines: list[str] = []
    run = Run("1F1B", 4, DELTA, samples=1000, say=lines.append)
    for _ in range(3):
        run.step(*batch(8), list(range(8)))
    lines = [line for line in lines if not line.startswith("kernels")]
    ends = len([lane for lane in run.pipe.lanes() if lane.per_sample])
    check(len(lines) == ends, f"said {lines}, not once at each of {ends} ends")
    for line in lines:
        check(f"{LENGTH * WIDTH * 2} B per sample" in line and "for 1000 samples" in line, f"said {line}")
    early: list[str] = []
    run = Run("1F1B", 4, DELTA, samples=1000, row=(LENGTH, WIDTH), say=early.append)
    with run.pipe.step(ids=list(range(8)) if run.first else None):
        expected = [line.replace("remembers", "will remember") for line in lines]
        early = [line for line in early if not line.startswith("kernels")]
        check(early == expected, f"before the first step: {early}, not {expected}")
        run.torch_step(*batch(8), [])


def replicas_remember_their_own_samples() -> None:
    """Two pipelines of two stages: a sample that moves to the other is cold there, no more."""
    mine = dist.get_rank() // 2
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    run = Run("1F1B", 4, DELTA, group=pairs[mine])
    x, y = batch(16)
    halves = [list(range(8)), list(range(8, 16))]
    for visit, (moved, cold) in enumerate(((0, 8), (0, 8), (1, 16), (1, 16), (0, 16))):
        ids = halves[mine ^ moved]
        run.step(x[ids], y[ids], ids)
        stats = run.pipe.stats
        check(not run.pipe.skipped and not stats.healed, f"visit {visit}: {stats}")
        check(stats.cold == cold, f"visit {visit}: {stats.cold} cold, not {cold}")
