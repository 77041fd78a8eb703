"""Pipeline: the stages of one rank as one adapter. It checks once that all ranks fit, and brackets every step.

    pipe = tw.parallel.Pipeline(stages)
    with pipe.step(ids=ids):                 # ids on the first stage's rank; elsewhere they may be left out
        schedule.step(x, target=y)
    if pipe.skipped: …

A step: the first stage's rank announces it (announce.py; shapes.py for batches of another shape) · every stage plans it
and opens its lanes (planned_stage.py) · both ends compare mirrors (mirror_check.py) · torch's schedule runs, whose
messages are frames (framed_stage.py) · the ranks count their faults · all of them commit, or all roll back.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.flows import Flows
from thinwire.collectives.groups import world
from thinwire.distributed.streams import settled_streams
from thinwire.distributed.summary import Summary
from thinwire.errors import UsageError
from thinwire.pipeline.announce import Announcement, Ids, announcement
from thinwire.pipeline.checkpoint import own_part, restore, state_of
from thinwire.pipeline.counters import Counters, StoreReport
from thinwire.pipeline.framed_stage import FramedStage
from thinwire.pipeline.handshake import Handshake, shake_hands
from thinwire.pipeline.lane import Lane
from thinwire.pipeline.message_choice import Plan
from thinwire.pipeline.mirror_check import Prefetch
from thinwire.pipeline.overlap import make_transports
from thinwire.pipeline.precompile import precompile_messages
from thinwire.pipeline.shapes import Shapes, Spec

logger = logging.getLogger("thinwire.pipeline")

NONFINITE = ("nan", "zero")  # what gradients are after a step that was rolled back
EVALUATE = ("exact", "same")  # how activations travel in step(train=False)


class Pipeline:
    """All CompressedStages of this rank.

    stages: in any order.
    nonfinite: what gradients are after a step that was rolled back: "nan" or "zero".
    evaluate: how activations travel in evaluation: "exact", or "same" as in training; memory is left alone either way.
    plan: for when = "critical".
    scale: gives the loss scale of the step, so that residuals are kept in the gradient's own unit.
    samples: in the data set; for the estimate of the stores' size.
    row: the shape of one sample's activation. With it that estimate and the kernels are made before the first step (a
    disk without room for the stores is then an error).
    say: takes the lines about stores and kernels, and one where no sample comes again.
    overlap: frames travel while the stages compute (overlap.py).
    """

    def __init__(
        self, stages: Sequence[FramedStage], *, nonfinite: str = "nan", evaluate: str = "exact",
        plan: Plan | None = None, scale: Callable[[], float] | None = None, samples: int | None = None,
        row: Sequence[int] | None = None, say: Callable[[str], None] = logger.info, overlap: bool = False,
    ) -> None:  # fmt: skip
        for name, value, allowed in (("nonfinite", nonfinite, NONFINITE), ("evaluate", evaluate, EVALUATE)):
            if value not in allowed:
                raise UsageError(f"{name} = {value!r}: allowed are {', '.join(allowed)}")
        if not stages or not all(isinstance(stage, FramedStage) for stage in stages):
            raise UsageError(f"a Pipeline takes the CompressedStages of this rank, at least one, not {stages!r:.80}")
        self.stages = sorted(stages, key=lambda stage: stage.stage_index)
        self.group: dist.ProcessGroup | None = stages[0].group
        self.device = torch.device(stages[0].device)
        self.nonfinite = nonfinite
        self.evaluate = evaluate
        self.plan = plan or Plan()
        self.scale = scale or (lambda: 1.0)
        self.report = StoreReport(samples, row, say)
        self.overlap = overlap
        self.handshake: Handshake | None = None
        self.announced: Announcement | None = None  # the open step
        self.skipped = False
        self.steps = 0
        self.skips = 0
        self.healed = 0
        self._resumed = 0  # of the steps, those that a loaded state had made
        self._scale = self._step_scale = 1.0  # the unit of the residuals, and in the open step
        self._shapes: Shapes | None = None
        self._prefetch = Prefetch()
        self._warm_when_loaded: int | None = None  # warm visits when state was loaded, until samples are found again
        self._found_mirrors = False  # of any sample of this step
        for stage in self.stages:
            stage.owner = self
        if row is not None:
            precompile_messages(self.stages[0].wire, self.stages[0].submod, tuple(row), say)

    # --- a step

    @contextmanager
    def step(
        self, ids: Ids | None = None, train: bool = True, *, shape: Sequence[int] | None = None,
        next_ids: Ids | None = None, next_certain: bool = False, settles: bool = True,
    ) -> Iterator[Pipeline]:  # fmt: skip
        """Bracket one schedule.step, or with train=False one schedule.eval. All ranks of the pipeline call it together.

        train: equal on all ranks; False: evaluate, and memory is left alone. The others are needed on the first stage's
        rank only.
        ids: one per row of the batch.
        shape: x.shape, whenever it differs from the step before.
        next_ids: the next batch's, to be read from a file store during backward.
        next_certain: the next step trains, with these ids and this shape: it is announced with this one, and waits for
        no message of its own. If it differs, that is a UsageError here, and other ranks wait for their time-out.
        settles: equal on all ranks; False: the step stays open behind the bracket, until whoever asks all ranks for
        their `faults` calls `settle`.
        """
        self._open(ids, train, shape, next_ids, next_certain and next_ids is not None)
        try:
            yield self
        except BaseException:
            self._end(keep=False, count=False, failed=True)
            raise
        self._close()
        if settles:
            self.settle(self._handshake().control.any_faults(len(self.faults)))

    def _open(
        self, ids: Ids | None, train: bool, shape: Sequence[int] | None, next_ids: Ids | None, certain: bool
    ) -> None:
        if self.announced is not None:
            raise UsageError("a step of this pipeline is open already: one bracket per schedule.step")
        handshake = self._handshake()
        coded = train or self.evaluate == "same"
        own = None
        if self.stages[0].is_first:
            own = announcement(self.steps + 1, train, ids, shape, next_ids, handshake.per_sample if coded else "")
        announced = handshake.control.open(own, certain)
        self.steps = announced.step
        self.skipped = False
        inputs = None if announced.shape is None else self._inputs(announced.shape)
        repeated = announced.shape is None or self._shapes is None or self._shapes.repeated
        self.announced = announced
        for stage in self.stages:
            stage.begin_step(announced, coded, None if inputs is None else inputs[stage.stage_index], repeated)
        self._step_scale = self.scale() if train else self._scale
        self._rescale()
        if coded and announced.ids is not None:
            check = handshake.control.compare_mirrors(announced.ids)
            self._found_mirrors = check.found
            self.healed += check.differing
        for stage in self.stages:
            stage.start_messages()

    def _handshake(self) -> Handshake:
        """The first time, all ranks of the pipeline together."""
        if self.handshake is None:
            found = shake_hands(self.stages, self.group, self._options(), self.plan)
            streams = settled_streams(self.stages[0].wire.streams, self.group)
            overlaps = self.overlap and world(self.group)[0] > 1
            first = self.stages[0].stage_index
            transports = make_transports(first, found.rank_of, self.group, self.device, streams) if overlaps else None
            alone = streams == 1 or overlaps or self.device.type != "cpu"  # NCCL opens flows by itself
            flows = None if alone else Flows(self.group, streams)
            for stage in self.stages:
                stage.connect(found.connections[stage.stage_index], transports, flows)
            modules = {stage.stage_index: stage.submod for stage in self.stages}
            self._shapes = Shapes(modules, found.rank_of, self.group, self.device)
            self.handshake = found
            self.report.before(self.lanes())
        return self.handshake

    def _inputs(self, shape: tuple[int, ...]) -> list[list[Spec]] | None:
        """The inputs of every stage in this step, where torch may not know them: see Shapes.changed."""
        assert self._shapes is not None
        seen = next(iter(self.stages[0].batch_inputs.values()), None) if self.stages[0].is_first else []
        dtypes = [torch.float32] if seen is None else [dtype for _, dtype in seen]
        first = not any(stage.microbatches for stage in self.stages)
        return self._shapes.changed(shape, first, dtypes)

    def _close(self) -> None:
        for stage in self.stages:
            stage.finish_sends()
        for lane in self.lanes():
            lane.resolve_checks()
        self._prefetch.join()
        if self.announced is not None and self.device.type == "cpu":
            self._handshake().control.prepare_next(self.announced)

    @property
    def faults(self) -> list[str]:
        """What went wrong on this rank in the open step."""
        return [fault for lane in self.lanes() for fault in lane.faults]

    def settle(self, skipped: bool) -> None:
        """End the open step: keep what it wrote, or drop it where it is `skipped`; on all ranks alike."""
        announced = self.announced
        assert announced is not None and self.handshake is not None
        self.skipped = skipped
        for fault in self.faults[:3]:
            logger.warning("step %d is rolled back: %s", announced.step, fault)
        self._end(keep=announced.train and not skipped, count=skipped, failed=False)
        if skipped:
            self.skips += announced.train
            for stage in self.stages if announced.train else ():
                stage.fill_gradients(torch.nan if self.nonfinite == "nan" else 0.0)
            self.handshake.control.restart()
        elif self.device.type != "cpu":
            self.handshake.control.prepare_next(announced)

    def _end(self, keep: bool, count: bool, failed: bool) -> None:
        """Commit or roll back on this rank; `count` and `failed` as of Lane.end_step and PlannedStage.end_step."""
        self._prefetch.join()
        self.announced = None
        with ExitStack() as ending:  # of all stages and lanes, also where a store cannot be written (a full disk)
            for stage in self.stages:
                ending.callback(stage.end_step, failed)
            for lane in self.lanes():
                ending.callback(lane.end_step, keep, count)
        if keep:
            self.report.after(self.lanes(), first=self.steps == 1)
            self._scale = self._step_scale
            self._warn_of_shape()

    def _rescale(self) -> None:
        """Where the loss scale has changed, residuals and both ends' means of gradients are in another unit; from now
        on, if the step is kept."""
        if self._step_scale == self._scale:
            return
        for ends in (end for stage in self.stages for end in (stage.lanes.outgoing, stage.lanes.incoming)):
            if (lane := ends.get("backward")) is not None:
                lane.rescale(self._step_scale / self._scale)

    # --- what stages call (planned_stage.Owner)

    def raise_on_all_ranks(self, wrong: str) -> None:
        """Called by stages of all ranks together: raise what the first stage's rank has found `wrong`."""
        self._handshake().control.announcer.fail(wrong)

    def backward_began(self) -> None:
        """Called by a stage: from here on the next batch's mirrors may be read."""
        ids = None if self.announced is None else self._handshake().control.next_ids(self.announced)
        if ids is not None:
            coded = [channel for lane in self.lanes() if lane.per_sample for channel in lane.coded.values()]
            self._prefetch.start([channel.state.stores["h"] for channel in coded], ids)

    # --- what is known of it

    def lanes(self) -> list[Lane]:
        """All lanes of this rank's stages."""
        return [lane for stage in self.stages for lane in stage.lanes.all()]

    @property
    def stats(self) -> Counters:
        """Counters of this rank: bytes in each direction, visits, faults."""
        return Counters.of(self.lanes(), self.steps, self.skips, self.healed)

    def summary(self) -> Summary:
        """What compression has saved on this rank so far; `print(pipe.summary())` is one line."""
        s = self.stats
        return Summary(s.steps - self._resumed, s.forward_bytes + s.backward_bytes, s.raw_bytes, s.skips)

    def _options(self) -> dict[str, str]:
        """What has to be equal on all ranks, in words."""
        own = {"nonfinite": self.nonfinite, "evaluate": self.evaluate, "plan": self.plan, "overlap": self.overlap}
        return {name: str(value) for name, value in own.items()} | {"streams": str(self.stages[0].wire.streams)}

    def _warn_of_shape(self) -> None:
        """Once after loading: this step had samples of the loaded stores, and none of them could be used."""
        if self._warm_when_loaded is not None and self._found_mirrors:
            if self.stats.warm == self._warm_when_loaded:
                warnings.warn("the loaded samples' memory is of another shape: samples start cold", stacklevel=4)
            self._warm_when_loaded = None

    def close(self) -> None:
        """Forget all memory; files of stores are removed, and what was saved is logged."""
        for stage in self.stages:
            stage.disconnect()
        if self.handshake is not None:
            self.handshake.control.close()
        if self.steps > self._resumed:
            logger.info("stage %s: %s", ", ".join(str(stage.stage_index) for stage in self.stages), self.summary())

    # --- checkpoints

    def state_dict(self, stores: bool = True) -> dict[str, Tensor]:
        """This rank's state: residuals, factors, counters, and with `stores` the mirrors of samples."""
        return state_of(self.stages, self.steps, self._scale, stores)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over a `state` of the same stages: this rank's part of several, or the only part there is. What is
        missing starts empty: samples cold, residuals zero."""
        own = own_part(state)
        self._handshake().control.restart()
        made = self.steps - self._resumed
        self.steps, self._scale = restore(self.stages, own)
        self._resumed = self.steps - made
        self._warm_when_loaded = self.stats.warm
        if self.steps and any(lane.per_sample and not lane.remembers() for lane in self.lanes()):
            warnings.warn("the loaded state has no samples' memory: every sample starts cold", stacklevel=2)
