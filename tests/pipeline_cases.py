"""Cases of the pipeline tests that several ranks run together; each returns a list of what is wrong on this rank."""

from __future__ import annotations

import functools
import io
import math
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pipeline_ranks import (  # noqa: F401
    DELTA,
    IDENTITY,
    LENGTH,
    SCHEDULES,
    WIDTH,
    Block,
    Run,
    batch,
    block,
    fitting,
    identity,
    loss_of,
    same,
    start,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from thinwire.codecs import LowRank, Quantize
from thinwire.config.wire import Link, Wire
from thinwire.errors import UsageError
from thinwire.memory import Delta, ErrorFeedback, Plain
from thinwire.memory.channel import Channel
from thinwire.parallel import Plan
from thinwire.pipeline import early_receives as early
from thinwire.pipeline import lane as boundary
from thinwire.pipeline.lazy_error import STEPS
from thinwire.pipeline.overlap import run_ahead

EIGHT = Link(Quantize(8, block=16))


class Data:
    """`samples` rows with ids; `epoch(e)` gives batches of them in a new order each epoch."""

    def __init__(self, samples: int, rows: int, length: int = LENGTH) -> None:
        self.x, self.y = batch(samples, 7, length)
        self.y = torch.tanh(self.x.roll(1, dims=1))
        self.samples, self.rows = samples, rows

    def epoch(self, number: int) -> list[tuple[list[int], Tensor, Tensor]]:
        order = torch.randperm(self.samples, generator=torch.Generator().manual_seed(number))
        return [(part.tolist(), self.x[part], self.y[part]) for part in order.split(self.rows)]


def everything(cases: list[tuple[str, tuple[Any, ...]]]) -> dict[str, Any]:
    """Run the cases in turn on one process group; name → what it returned."""
    start()
    out = {f"{name}{arguments or ''}": globals()[name](*arguments) for name, arguments in cases}
    dist.barrier()
    dist.destroy_process_group()
    return out


def total(run: Run, *names: str) -> list[int]:
    """Counters summed over all ranks."""
    stats = run.pipe.stats
    counts = torch.tensor([getattr(stats, name) for name in names])
    dist.all_reduce(counts)
    return counts.tolist()


def gathered(value: Any) -> list[Any]:
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


def mirrors_differ(run: Run, ids: list[int]) -> list[str]:
    """Names of the boundaries whose two ends do not hold the same digests, or hold none."""
    mine = {(lane.name, lane.end): lane.digests(ids).tolist() for lane in run.pipe.lanes() if lane.per_sample}
    ends = {key: value for theirs in gathered(mine) for key, value in theirs.items()}
    names = {name for name, _ in ends}
    return [n for n in sorted(names) if ends[n, "send"] != ends[n, "recv"] or min(ends[n, "send"]) < 0]


def mean_loss(losses: list[float]) -> float:
    return sum(losses) / len(losses) if losses else math.nan


def train(run: Run, data: Data, epochs: range, **more: Any) -> float:
    """The last epoch's mean loss, on the last stage's rank."""
    losses = []
    for number in epochs:
        losses = [mean_loss(run.step(x, y, ids, update=True, **more)) for ids, x, y in data.epoch(number)]
    return mean_loss(losses)


def mirrors(steps: int) -> list[str]:
    """Every schedule: mirrors equal after many steps in shuffled order, nothing healed or skipped, loss as in fp32."""
    ranks, _ = start()
    wrong = []
    for name in SCHEDULES:
        microbatches = max(fitting(name, ranks)[0], ranks)
        data = Data(4 * microbatches, 2 * microbatches)
        run, epochs = Run(name, microbatches, DELTA), range(steps // 2)
        loss = train(run, data, epochs)
        wrong += [f"{name}: mirrors of {where} differ" for where in mirrors_differ(run, list(range(data.samples)))]
        skips, healed, cold, warm = total(run, "skips", "healed", "cold", "warm")
        if skips or healed or cold * (len(epochs) - 1) != warm:
            wrong.append(f"{name}: {skips} skips, {healed} healed, {cold} cold, {warm} warm")
        plain = Run(name, microbatches, None)
        exact = train(plain, data, range(min(len(epochs), 10)))
        if run.last and len(epochs) <= 10 and not abs(loss - exact) < 0.02 * exact:
            wrong.append(f"{name}: loss {loss} against {exact}")
    return wrong


def shapes() -> list[str]:
    """Short last batch, other lengths, texts as ids; sizes of messages as announced (else Gloo would end the rank)."""
    start()
    wrong = []
    for wire in (DELTA, IDENTITY, Wire(forward=EIGHT, backward=Link(Quantize(4, block=16), ErrorFeedback()))):
        plain, run = Run("1F1B", 4, None), Run("1F1B", 4, wire)
        plain.step(*batch(8))
        x, y = batch(600, 1)
        run.step(x, y, list(range(-600, 0)), shape=x.shape)  # more ids than one announcement holds
        for length, rows in ((LENGTH, 8), (LENGTH, 7), (12, 8), (5, 5), (LENGTH, 8), (12, 8), (12, 7)):
            x, y = batch(rows, 3, length)
            ids = [f"sample {i}" for i in range(rows)]
            losses = run.step(x, y, ids, shape=x.shape)
            if length != LENGTH or rows != 8 or wire is not IDENTITY:
                continue
            if losses != plain.step(x, y) or not same(run.gradients(), plain.gradients()):
                wrong.append("gradients differ after batches of other shapes")
        both = 2 * (dist.get_world_size() - 1)
        if wire is DELTA and total(run, "warm", "cold") != [both * (7 + 7), both * (600 + 8 + 8 + 5 + 8 + 8)]:
            wrong.append(f"{total(run, 'warm', 'cold')} warm and cold: a sample of another length must be cold")
        if total(run, "skips", "rejected") != [0, 0]:
            wrong.append("a step was skipped")
    return wrong


def flip(run: Run, boundary: str) -> None:
    """Flip a bit of the next frame that leaves over a boundary."""
    for lane in run.pipe.lanes():
        if lane.name == boundary and lane.end == "send":
            original = lane.send

            def send(part: Any, index: int, x: Tensor, lane: Any = lane, original: Any = original) -> Tensor:
                frame = original(part, index, x)
                lane.send = original
                frame[40] ^= 4
                return frame

            lane.send = send


def remembered(run: Run, ids: list[int]) -> list[Any]:
    """Digests of this rank's mirrors, and its residuals."""
    mirrors = [lane.digests(ids).tolist() for lane in run.pipe.lanes() if lane.per_sample]
    channels = [c for lane in run.pipe.lanes() for _, c in lane.channels()]
    return [mirrors, [c.state.read("e", key).tolist() for c in channels for key in c.state.stores["e"]]]


def faults() -> list[str]:
    """A flipped bit, a NaN, a lost store, a stage restarted from old state: found, rolled back everywhere, healed."""
    start()
    wrong: list[str] = []
    wire = Wire(forward=DELTA.forward, backward=Link(Quantize(4, block=16), ErrorFeedback()))
    for option, spoiled in (("nan", torch.isnan), ("zero", lambda g: g == 0)):
        run = Run("1F1B", 4, wire, nonfinite=option)
        x, y = batch(8)
        ids = list(range(8))
        for _ in range(3):
            run.step(x, y, ids)
        before = remembered(run, ids)
        flip(run, "forward 0→1")
        run.step(x, y, ids)
        after = remembered(run, ids)
        if not run.pipe.skipped or not all(bool(spoiled(g).all()) for g in run.gradients().values()):
            wrong.append(f"a flipped bit was not rolled back ({option})")
        if dist.get_rank() != 1 and before != after:
            wrong.append("mirrors or residuals moved in a step that was rolled back")
        if total(run, "rejected") != [1]:
            wrong.append(f"{total(run, 'rejected')} frames were refused, not 1")
        cold = total(run, "cold")[0]
        run.step(x, y, ids)
        if run.pipe.skipped or total(run, "cold")[0] - cold != 2 * 2 or mirrors_differ(run, ids):
            wrong.append("the damaged micro-batch's samples (2 at 2 ends) were not cold once")
    wrong += _nonfinite(run, x, y, ids) + _lost(run, x, y, ids)
    return wrong


def unseen() -> list[str]:
    """The same where the host looks at nothing before a step's end, as it does on a card."""
    boundary.Channel = functools.partial(Channel, defer=True)  # type: ignore[misc]
    try:
        return faults()
    finally:
        boundary.Channel = Channel  # type: ignore[misc]


def overlapped() -> list[str]:
    """Frames beside the computation: the same bits as torch's stage, equal mirrors, faults found and healed."""
    ranks, _ = start()
    wrong = []
    for name in ("GPipe", "1F1B"):
        for microbatches in fitting(name, ranks):
            plain, ours = Run(name, microbatches, None), Run(name, microbatches, IDENTITY, overlap=True)
            for step in range(3):
                if step == 2 and name == "1F1B":
                    run_ahead(ours.schedule)
                x, y = batch(2 * microbatches, step)
                losses = [run.step(x, y) for run in (plain, ours)]
                if losses[0] != losses[1] or not same(plain.gradients(), ours.gradients()):
                    wrong.append(f"{name}, {microbatches} micro-batches, step {step}")
        data = Data(24, 12)
        run = Run(name, 12, DELTA, overlap=True)
        train(run, data, range(3))
        wrong += [f"{name}: mirrors of {where} differ" for where in mirrors_differ(run, list(range(24)))]
        if total(run, "skips", "healed") != [0, 0]:
            wrong.append(f"{name}: {total(run, 'skips', 'healed')} skips and healed")
        flip(run, "forward 0→1")
        ids, x, y = data.epoch(0)[0]
        run.step(x, y, ids)
        if not run.pipe.skipped:
            wrong.append(f"{name}: a flipped bit was not rolled back")
        run.step(x, y, ids)
        if run.pipe.skipped or mirrors_differ(run, ids):
            wrong.append(f"{name}: not healed")
    return wrong


def _nonfinite(run: Run, x: Tensor, y: Tensor, ids: list[int]) -> list[str]:
    before = remembered(run, ids)
    bad = x.clone()
    bad[3, 0, 0] = math.nan
    run.step(bad, y, ids)
    wrong = [] if run.pipe.skipped and before == remembered(run, ids) else ["a NaN was not rolled back"]
    run.step(x, y, ids)
    return wrong + (["no step after a NaN"] if run.pipe.skipped or mirrors_differ(run, ids) else [])


def _lost(run: Run, x: Tensor, y: Tensor, ids: list[int]) -> list[str]:
    """One end loses its store; then one end gets an old one back."""
    wrong, old = [], {k: v.clone() for k, v in run.pipe.state_dict().items()}
    for restore in (False, True):
        run.step(x + 0.1, y, ids)
        healed = total(run, "healed")[0]
        for lane in run.pipe.lanes():
            if lane.name == "forward 0→1" and lane.end == "recv":
                if restore:
                    prefix = f"rank1of{dist.get_world_size()}/stage1/forward 0→1/recv/"
                    lane.load_state_dict({k.removeprefix(prefix): v for k, v in old.items() if k.startswith(prefix)})
                else:
                    for channel in lane.coded.values():
                        for key in ids:
                            channel.state.forget(key)
        run.step(x, y, ids)
        if run.pipe.skipped or total(run, "healed")[0] - healed != 2 * len(ids) or mirrors_differ(run, ids):
            wrong.append(f"a store that was {'old' if restore else 'lost'} at one end was not healed")
    return wrong


def lazy_error() -> list[str]:
    """Σ of what arrives = Σ of what was computed − the last residual, over micro-batches and steps; and `when`."""
    start()
    wrong: list[str] = []
    for codec in (Quantize(3, block=16), LowRank(2)):
        for when in ("always", "epilogue", "critical", lambda stage, microbatch: microbatch % 2 == 0):
            wire = Wire(backward=Link(codec, ErrorFeedback(), when))
            run = Run("1F1B", 5, wire, plan=Plan("1F1B"))
            sums: dict[str, Any] = {"sent": {}, "come": {}, "left": {}, "coded": {}}
            run.step(*batch(5))
            for lane in run.pipe.lanes():
                _record(lane, sums)
            for step in range(3):
                run.step(*batch(5, step))
            for lane in run.pipe.lanes():
                if lane.name.startswith("backward") and lane.end == "send":
                    (channel,) = lane.coded.values()
                    sums["left"][lane.name] = channel.state.read("e", f"{lane.name}/0").clone()
            wrong += _telescopes(sums, f"{codec}, {when}")
    return wrong


def _record(lane: Any, sums: dict[str, Any]) -> None:
    if not lane.name.startswith("backward"):
        return
    send, recv, name = lane.send, lane.recv, lane.name
    if lane.end == "send":
        (channel,) = lane.coded.values()
        sums["sent"][name] = channel.state.read("e", f"{name}/0").clone()  # what the first step left

    def sending(part: Any, index: int, x: Tensor) -> Tensor:
        sums["sent"][name] = sums["sent"][name] + x
        sums["coded"].setdefault(name, []).append(part.coded)
        return send(part, index, x)

    def receiving(part: Any, *rest: Any) -> Tensor:
        y = recv(part, *rest)
        sums["come"][name] = sums["come"].get(name, 0) + y
        return y

    lane.send, lane.recv = sending, receiving


def _telescopes(sums: dict[str, Any], what: str) -> list[str]:
    ends: dict[str, Any] = {"sent": {}, "come": {}, "left": {}, "coded": {}}
    for theirs in gathered(sums):
        for kind, values in theirs.items():
            ends[kind] |= values
    wrong = []
    for name, sent in ends["sent"].items():
        gap = (ends["come"][name] + ends["left"][name] - sent).norm() / sent.norm()
        if not gap < 1e-5 or not ends["left"][name].norm() > 0:
            wrong.append(f"{what}, {name}: what arrived and the residual miss the sum by {gap}")
        if "epilogue" in what and ends["coded"][name][:5] != [
            m >= 5 - (len(ends["sent"]) + 1 - int(name[9])) for m in range(5)
        ]:
            wrong.append(f"{what}, {name}: coded {ends['coded'][name][:5]}")
    return wrong


class Biased(nn.Module):
    """A block whose output has a large part common to all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.common = Block(), nn.Parameter(torch.linspace(-8, 8, LENGTH * WIDTH).view(LENGTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.common


def biased(index: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(index)
        return Biased()


def auto() -> list[str]:
    """memory="auto": lazy error is tried at every boundary, and kept only where it made gradients better."""
    start()
    wrong = []
    three = Quantize(3, block=16)
    for codec, make, kept in ((three, block, False), (LowRank(2), biased, False), (three, biased, True)):
        run = Run("1F1B", 8, Wire(backward=Link(codec, "auto")), make=make)
        for step in range(2 * STEPS + 1):
            run.step(*batch(16, step))
        for lane in run.pipe.lanes():
            if lane.trial is None:
                continue
            (channel,) = lane.coded.values()
            if lane.trial.lazy is not kept or lane.trial.on or lane.trial.step != 2 * STEPS + 1:
                wrong.append(f"{codec}, {make.__name__}, {lane.name}: {vars(lane.trial)}")
            left = channel.state.read("e", f"{lane.name}/0")
            if channel.memory != (ErrorFeedback() if kept else Plain()) or (left is not None) is not kept:
                wrong.append(f"{codec}, {make.__name__}, {lane.name}: {channel.memory.name}")
    return wrong


def resume(stores: bool) -> list[str]:
    """Saved after six steps and loaded into new stages: the same bits as without stopping; without stores only cold."""
    start()
    wire = Wire(
        forward=Link(Quantize(3, block=16, rounding="stochastic"), Delta(cold=Quantize(8, block=16))),
        backward=Link(LowRank(2), ErrorFeedback()),
    )
    data, whole = Data(24, 8), Run("ZBV", 4, wire)
    train(whole, data, range(2))
    weights = [{k: v.clone() for k, v in s.submod.state_dict().items()} for s in whole.stages]
    file = io.BytesIO()
    torch.save(whole.pipe.state_dict(stores=stores), file)
    file.seek(0)
    train(whole, data, range(2, 4))
    again = Run("ZBV", 4, wire)
    for stage, state in zip(again.stages, weights):
        stage.submod.load_state_dict(state)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        again.pipe.load_state_dict(torch.load(file, weights_only=True))
    train(again, data, range(2, 4))
    equal, ids = same(whole.gradients(), again.gradients()), list(range(data.samples))
    cold = total(again, "cold")[0]
    if mirrors_differ(whole, ids) or mirrors_differ(again, ids):
        return ["mirrors differ with stochastic rounding"]
    if stores:
        good = equal and not cold and not heard and _other_shape(Run("ZBV", 4, wire), file) == 1
        return [] if good else [f"resumed run differs: equal {equal}, {cold} cold, {heard}"]
    return [] if cold and not equal and len(heard) == 1 else [f"without stores: {cold} cold, {heard}"]


def _other_shape(run: Run, file: io.BytesIO) -> int:
    """How often a run is warned that resumes with shorter samples of the same ids."""
    file.seek(0)
    run.pipe.load_state_dict(torch.load(file, weights_only=True))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for ids, x, y in Data(24, 8, LENGTH - 2).epoch(0):
            run.step(x, y, ids)
    return sum("of another shape" in str(one.message) for one in heard)


def evaluation() -> list[str]:
    """Evaluation, exact or on the same path, leaves memory alone; exact equals torch's own."""
    start()
    wrong = []
    for how in ("exact", "same"):
        plain, run = Run("1F1B", 4, None), Run("1F1B", 4, DELTA, evaluate=how)
        x, y = batch(8)
        ids = list(range(8))
        for _ in range(2):
            run.step(x, y, ids)
        state = run.pipe.state_dict()
        theirs, ours = plain.eval(x, y), run.eval(x, y, ids=ids if run.first else None)
        if run.last and not (torch.equal(theirs, ours) if how == "exact" else torch.allclose(theirs, ours, atol=0.1)):
            wrong.append(f"{how}: evaluation differs by {(theirs - ours).abs().max()}")
        if how == "same" and run.last and torch.equal(theirs, ours):
            wrong.append("the same path was exact")
        after = run.pipe.state_dict()
        mirrored = [k for k in state if "/h/" in k or "/e/" in k]
        if [k for k in after if "/h/" in k or "/e/" in k] != mirrored or not all(
            torch.equal(state[k], after[k]) for k in mirrored
        ):
            wrong.append(f"{how}: evaluation moved the memory")
        run.step(x, y, ids)
        if run.pipe.skipped or total(run, "rollbacks") != [0]:
            wrong.append(f"{how}: training after evaluation was rolled back")
    return wrong


def complaints() -> dict[str, str]:
    """One clear line each, on every rank alike."""
    _, rank = start()
    x, y = batch(8)
    out: dict[str, str] = {}

    def hear(name: str, run: Run, **arguments: Any) -> None:
        try:
            run.step(x, y, **arguments)
            out[name] = "nothing was said"
        except UsageError as error:
            out[name] = str(error)

    run = Run("1F1B", 4, DELTA)
    hear("missing", run)
    hear("twice", run, ids=[0, 1, 2, 3, 4, 5, 6, 1])
    hear("type", run, ids=[0.5] * 8)
    hear("number", run, ids=8)
    hear("text", run, ids="abcdefgh")
    hear("length", run, ids=list(range(8)), shape=8)
    run.step(x, y, list(range(8)))
    hear("rows", run, ids=list(range(8)), shape=(9, LENGTH, WIDTH))
    hear("few", run, ids=[0, 1, 2, 3])
    hear("many", Run("1F1B", 4, DELTA), ids=list(range(12)))  # in its first step
    hear("another", run, ids=list(range(8)), shape=(8, LENGTH + 1, WIDTH))
    run.step(x, y, list(range(8)))
    out["after"] = f"{run.pipe.stats.skips} skips, {run.pipe.stats.healed} healed"
    looped = Run("Interleaved1F1B", 4, DELTA)
    hear("looped", looped, ids=[0, 1, 2, 3])
    other = Wire(forward=Link(Quantize(4, block=16), Delta()), backward=EIGHT)
    hear("codec", Run("1F1B", 4, DELTA if rank else other), ids=list(range(8)))
    odd = Wire(backward=Link(Quantize(8), Plain(), lambda stage, microbatch: microbatch > rank))
    hear("when", Run("1F1B", 4, odd))
    example = torch.zeros(2, LENGTH, WIDTH, requires_grad=True)
    static = {"input_args": example[:, rank:], "output_args": example}
    hear("shape", Run("1F1B", 4, IDENTITY, stage_options=static))
    try:
        run.schedule.step(*((x,) if run.first else ()), **({"target": y} if run.last else {}))
    except UsageError as error:
        out["bracket"] = str(error)
    return out


class Dropping(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.inner, self.drop = Block(), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.inner(x))


def dropping(index: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(index)
        return Dropping(0.1)


def dropout() -> list[str]:
    """Dropout above a boundary is warned of; with masks by sample the change of an unchanged sample vanishes."""
    start()
    wrong, errors = [], {}
    wire = Wire(forward=Link(Quantize(2, block=16), Delta(store="fp32", cold=Quantize(8, block=16), gate=False)))
    for choice in ("warn", "seed"):
        run = Run("GPipe", 2, wire, make=dropping, stage_options={"dropout": choice})
        x, y = batch(4)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            run.step(x, y, [1, 2, 3, 4])
        said = any("drops values at random (drop)" in str(w.message) for w in heard)
        if said is not (choice == "warn" and run.first):
            wrong.append(f"{choice}: warned {said}")
        sizes = []
        for lane in run.pipe.lanes():
            if lane.end == "send" and lane.per_sample:
                for channel in lane.coded.values():
                    channel.visits.measure_every = 1
        for _ in range(3):
            run.step(x, y, [1, 2, 3, 4])
        sizes = [c.stats.relative_error for lane in run.pipe.lanes() if lane.end == "send" for c in lane.coded.values()]
        errors[choice] = sizes[0] if run.first else 0.0
    if run.first and not errors["seed"] < 0.3 * errors["warn"]:
        wrong.append(f"relative error {errors}")
    return wrong


def file_stores() -> list[str]:
    """Mirrors in files, with prefetch: the same gradients as in RAM, half the ids where half are kept."""
    _, rank = start()
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        codec = Quantize(4, block=16)
        ram, file, half = (
            Run("1F1B", 4, Wire(forward=Link(codec, Delta(cold=Quantize(8, block=16), **more)), backward=EIGHT))
            for more in ({}, {"path": str(Path(folder) / f"r{rank}")}, {"capacity": 0.5})
        )
        data = Data(32, 8)
        for number in range(3):
            epoch = data.epoch(number)
            for at, (ids, x, y) in enumerate(epoch):
                ram.step(x, y, ids)
                following = epoch[at + 1][0] if at + 1 < len(epoch) and file.first else None
                file.step(x, y, ids, next_ids=following)
                half.step(x, y, ids)
                if not same(ram.gradients(), file.gradients()):
                    wrong.append(f"epoch {number}: gradients differ")
        if not list(Path(folder).rglob("*.store")):
            wrong.append("no file was written")
        if total(half, "healed") != [0] or not 0.2 < half.pipe.stats.hit_rate < 0.5:
            wrong.append(f"half the ids: hit rate {half.pipe.stats.hit_rate}, {total(half, 'healed')} healed")
        if abs(ram.pipe.stats.hit_rate - 2 / 3) > 1e-6:
            wrong.append(f"hit rate {ram.pipe.stats.hit_rate}")
    return wrong


def early_receives() -> list[str]:
    """From the second step on every receive is posted at its start, under every schedule; the same bits as without."""
    start()
    wrong, limit, taken = [], early.LIMIT, []
    take = early.EarlyReceives.take

    def counted(self: Any, *place: Any) -> Any:
        arrivals = take(self, *place)
        taken.append(arrivals is not None)
        return arrivals

    early.EarlyReceives.take = counted
    for name in SCHEDULES:
        ahead, late = Run(name, 4, DELTA), Run(name, 4, DELTA)
        for number in range(4):
            x, y = batch(8, number)
            rows = 7 if number == 3 else 8  # a short last batch: of other sizes, so as torch asks
            for run, bound in ((ahead, limit), (late, 0)):
                early.LIMIT, ids = bound, list(range(rows))
                taken.clear()
                run.step(x[:rows], y[:rows], ids)
                if set(taken) != {run is ahead and number in (1, 2)}:
                    wrong.append(f"{name}, step {number}, limit {bound}: {sum(taken)} of {len(taken)} early")
            if not same(ahead.gradients(), late.gradients()):
                wrong.append(f"{name}, step {number}: other bits")
    early.EarlyReceives.take, early.LIMIT = take, limit
    return wrong


class Recomputed(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def recomputed(index: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(100 + index)
        return Recomputed()


def repeats() -> list[str]:
    """Recomputation, a step that failed and is tried again, and accumulation read one version and commit once."""
    start()
    wrong = []
    usual, again, failing = Run("1F1B", 4, DELTA), Run("1F1B", 4, DELTA, make=recomputed), Run("1F1B", 4, DELTA)
    for number in range(3):
        x, y = batch(8, number)
        ids = list(range(8))
        usual.step(x, y, ids)
        again.step(x, y, ids)
        try:
            with failing.pipe.step(ids=ids if failing.first else None):
                if number != 1:  # else with all receives posted and none matched
                    failing._torch(x + 1, y, [])
                raise KeyError("the user's code fails before or after torch's step")
        except KeyError:
            pass
        failing.step(x, y, ids)
        for name, run in (("recomputed", again), ("tried again", failing)):
            if not same(usual.gradients(), run.gradients()):
                wrong.append(f"{name}: gradients differ in step {number}")
    before = usual.gradients()
    with usual.pipe.step(ids=list(range(8, 16)) if usual.first else None):
        usual._torch(*batch(8, 9), [])
    if same(before, usual.gradients()) or total(usual, "skips", "healed") != [0, 0] or mirrors_differ(usual, ids):
        wrong.append("accumulation")
    return wrong


def narrow(index: int) -> nn.Module:
    return block(index).bfloat16()


def half_precision() -> list[str]:
    """bf16 activations and gradients: mirrored, and a loss near fp32's."""
    start()
    wire = Wire(forward=Link(Quantize(4, block=16), Delta()), backward=Link(LowRank(4), ErrorFeedback()))
    run, data = Run("1F1B", 4, wire, make=narrow), Data(16, 8)
    data.x, data.y = data.x.bfloat16(), data.y.bfloat16()
    loss = train(run, data, range(4))
    plain = Run("1F1B", 4, None, make=narrow)
    exact = train(plain, data, range(4))
    wrong = mirrors_differ(run, list(range(16)))
    return wrong + ([f"loss {loss} against {exact}"] if run.last and abs(loss - exact) > 0.05 * exact else [])


def loss_scale() -> list[str]:
    """A scale that changes between steps changes nothing but the unit: what arrives, unscaled, is the same."""
    start()
    wrong = []
    wire = Wire(backward=Link(Quantize(3, block=16), ErrorFeedback()))
    scale = {"now": 1.0}
    still, moving = Run("1F1B", 4, wire), Run("1F1B", 4, wire, scale=lambda: scale["now"])
    for step, factor in enumerate((1.0, 8.0, 8.0, 0.5)):
        scale["now"] = factor
        x, y = batch(8, step)
        still.step(x, y)
        moving.schedule._loss_fn = lambda output, target: scale["now"] * loss_of(output, target)
        moving.step(x, y)
        scaled = {name: g / factor for name, g in moving.gradients().items()}
        if not same(still.gradients(), scaled):
            wrong.append(f"step {step}: gradients differ")
    return wrong


def told() -> list[str]:
    """The stores' size is said once, by sample and for the data set."""
    start()
    lines: list[str] = []
    run = Run("1F1B", 4, DELTA, samples=1000, say=lines.append)
    for _ in range(3):
        run.step(*batch(8), list(range(8)))
    size = LENGTH * WIDTH * 2
    ends = len([lane for lane in run.pipe.lanes() if lane.per_sample])
    good = len(lines) == ends and all(f"{size} B per sample" in line and "for 1000 samples" in line for line in lines)
    wrong = [] if good else lines or ["nothing was said"]
    before: list[str] = []
    run = Run("1F1B", 4, DELTA, samples=1000, row=(LENGTH, WIDTH), say=before.append)
    with run.pipe.step(ids=list(range(8)) if run.first else None):
        if before != [line.replace("remembers", "will remember") for line in lines]:
            wrong.append(f"before the first step: {before}, after it {lines}")
        run._torch(*batch(8), [])
    return wrong


def replicas() -> list[str]:
    """Two pipelines of two stages: each remembers its own samples, and one that moves is cold, no more."""
    _, rank = start()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    run, mine = Run("1F1B", 4, DELTA, group=groups[rank // 2]), rank // 2
    x, y = batch(16)
    halves = [list(range(8)), list(range(8, 16))]
    wrong = []
    for visit, moved in enumerate((0, 0, 1, 1, 0)):
        ids = halves[mine ^ moved]
        run.step(x[ids], y[ids], ids)
        wanted = [8, 8, 16, 16, 16][visit]
        if run.pipe.skipped or run.pipe.stats.cold != wanted or run.pipe.stats.healed:
            wrong.append(f"visit {visit}: {run.pipe.stats}")
    return wrong


def alone() -> list[str]:
    """World size 1: one stage, and both arms of a V, without a wire."""
    start()
    wrong = []
    for name in ("GPipe", "1F1B", "ZBV"):
        plain, run = Run(name, 4, None), Run(name, 4, DELTA)
        x, y = batch(8)
        if plain.step(x, y) != run.step(x, y, list(range(8))) or not same(plain.gradients(), run.gradients()):
            wrong.append(name)
    return wrong
