"""The stages of one rank as one adapter: they meet their neighbours once, and bracket every step together.

    pipe = tw.parallel.Pipeline(stages)
    with pipe.step(ids=ids):                 # ids on the first stage's rank; elsewhere they may be left out
        schedule.step(x, target=y)
    if pipe.skipped: …

A step: announce (announce.py, and shapes.py for batches unlike the first) · begin on every lane · torch's schedule,
whose frames the lanes make and read · one all-reduce of the faults found · commit everywhere, or roll back everywhere.
Checkpoints: saved.py.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.groups import world
from thinwire.distributed.summary import Summary
from thinwire.errors import UsageError
from thinwire.memory.store import Key
from thinwire.pipeline.announce import Announcement, Ids, Pair, announcement, swap_words
from thinwire.pipeline.checkpoint import own_part, restore, state_of
from thinwire.pipeline.counters import Counters, store_estimate, store_forecast
from thinwire.pipeline.framed_stage import FramedStage
from thinwire.pipeline.handshake import Handshake, shake_hands
from thinwire.pipeline.lane import Lane
from thinwire.pipeline.message_choice import Plan
from thinwire.pipeline.overlap import Transport, make_transports
from thinwire.pipeline.precompile import precompile_messages
from thinwire.pipeline.prefetch import Prefetch
from thinwire.pipeline.shapes import Shapes

logger = logging.getLogger("thinwire.pipeline")

NONFINITE = ("nan", "zero")  # what gradients are after a step that was rolled back
EVALUATE = ("exact", "same")  # how activations travel in step(train=False)


class Pipeline:
    """All CompressedStages of this rank, in any order.

    `nonfinite`: gradients after a step that was rolled back. `evaluate`: uncompressed, or on the path of training;
    memory is left alone either way. `plan`: for when="critical". `scale` gives the loss scale of the step, so that
    residuals are kept in the gradient's own unit. `samples` in the data set: for the estimate of the stores' size,
    which goes through `say`: before the first step if `row`, the shape of one sample's activation, is given (a disk
    without room for it is then an error), else after it. With `row` kernels are compiled here, without it in the steps
    that first need them. `overlap`: frames travel beside the computation (overlap.py).
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
        self.group, self.device = stages[0].group, torch.device(stages[0].device)
        self.nonfinite, self.evaluate, self.plan = nonfinite, evaluate, plan or Plan()
        self.scale, self.say, self.overlap = scale or (lambda: 1.0), say, overlap
        self.samples, self.row = samples, None if row is None else tuple(row)
        self.handshake: Handshake | None = None
        self.announced: Announcement | None = None
        self.skipped = False
        self.steps, self.skips, self.healed = 0, 0, 0
        self._resumed = 0  # of the steps, those that a loaded state had made
        self._scale = 1.0
        self._loaded: int | None = None  # warm visits when state was loaded, until samples are met again
        self._shapes = Shapes()
        self._prefetch, self._met = Prefetch(), False
        for stage in self.stages:
            stage.pipeline = self
        if self.row is not None:
            precompile_messages(self.stages[0].wire, self.stages[0].submod, self.row, say)

    # --- the bracket

    @contextmanager
    def step(
        self, ids: Ids | None = None, train: bool = True, *, shape: Sequence[int] | None = None,
        next_ids: Ids | None = None,
    ) -> Iterator[Pipeline]:  # fmt: skip
        """One schedule.step, or with train=False one schedule.eval.

        `ids`: one a row of the batch, on the first stage's rank. `shape`: x.shape, there too, whenever it differs from
        the step before. `next_ids`: the next batch's, to be read from a file store during backward.
        """
        self._open(ids, train, shape, next_ids)
        try:
            yield self
        except BaseException:
            for stage in self.stages:
                stage.early.known = {}  # what was expected need not be true
            self._end(keep=False, count=False)
            raise
        self._close()

    def _open(self, ids: Ids | None, train: bool, shape: Sequence[int] | None, next_ids: Ids | None) -> None:
        if self.announced is not None:
            raise UsageError("a step of this pipeline is open already: one bracket a schedule.step")
        handshake, mine, coded = self._handshake(), None, train or self.evaluate == "same"
        if self.stages[0].is_first:
            mine = announcement(self.steps + 1, train, ids, shape, next_ids, handshake.per_sample if coded else "")
        said = handshake.announcer.announce(mine)
        self.steps, self.skipped = said.step, False
        self._shapes.match(said, self.stages, handshake.place, self.group)
        self.announced = said
        for stage in self.stages:
            stage.announced, stage.coded = said, coded
        for lane in self.lanes():
            lane.begin(said.step)
        self._rescale(train)
        if coded and said.ids is not None:
            self._agree(said.ids, handshake)
        for transport in self._transports():
            transport.begin()
        if train:
            for stage in self.stages:
                stage.post_receives()

    def _handshake(self) -> Handshake:
        """The first time, all ranks of the pipeline together."""
        if self.handshake is None:
            found = shake_hands(self.stages, self.group, self._options(), self.plan)
            if self.overlap and world(self.group)[0] > 1:
                self.stages[0].transports = make_transports(
                    self.stages[0].stage_index, found.place, self.group, self.device
                )
            self.handshake = found
            for line in () if self.row is None else store_forecast(self.lanes(), self.samples, self.row):
                self.say(line)
        return self.handshake

    def _close(self) -> None:
        said = self.announced
        assert said is not None
        for transport in self._transports():
            transport.finish()
        for lane in self.lanes():
            lane.resolve_checks()
        faults = [fault for lane in self.lanes() for fault in lane.faults]
        count = torch.tensor([len(faults)], device=self.device)
        if world(self.group)[0] > 1:
            dist.all_reduce(count, group=self.group)
        self.skipped = bool(count)
        for fault in faults[:3]:
            logger.warning("step %d is rolled back: %s", said.step, fault)
        self._end(keep=said.train and not self.skipped, count=self.skipped)
        if self.skipped and said.train:
            self.skips += 1
            self._spoil_gradients()

    def _end(self, keep: bool, count: bool) -> None:
        self._prefetch.join()
        try:
            for lane in self.lanes():
                lane.end_step(keep, count)
        finally:  # a store that cannot be written (a full disk) is the error to show, not that a step is open
            self.announced = None
            for stage in self.stages:
                stage.announced = None
                stage.early.drop()
        if keep:
            self._estimate()
            self._warn_of_shape()

    def _spoil_gradients(self) -> None:
        for stage in self.stages:
            for parameter in stage.submod.parameters():
                if parameter.grad is not None:
                    parameter.grad.fill_(torch.nan if self.nonfinite == "nan" else 0.0)

    def _rescale(self, train: bool) -> None:
        scale = self.scale() if train else self._scale
        if scale != self._scale:
            for stage in self.stages:
                if stage.lanes.backward_out is not None:
                    stage.lanes.backward_out.rescale(scale / self._scale)
            self._scale = scale

    # --- samples

    def _agree(self, ids: tuple[int, ...], handshake: Handshake) -> None:
        """Digests over every boundary with per-sample memory; what differs is cold in this step."""
        lanes = [(lane, peer) for lane, peer in handshake.remote if lane.per_sample]
        for lane, _ in lanes:
            lane.load(ids)
        pairs = [Pair(peer, lane.digests(ids)) for lane, peer in lanes]
        self._met = any(bool((pair.mine >= 0).any()) for pair in pairs)
        for (lane, _), pair, theirs in zip(lanes, pairs, swap_words(pairs, self.group, self.device)):
            self.healed += lane.agree(ids, pair.mine, theirs)

    def complain(self, wrong: str) -> None:
        """Called by stages of all ranks: raise what the first one says is wrong with the batch."""
        assert self.handshake is not None
        self.handshake.announcer.announce(wrong)

    def backward_began(self) -> None:
        """Called by stages: from here on the next batch may be read."""
        if self.announced is not None and self.announced.next_ids is not None:
            following: tuple[Key, ...] = self.announced.next_ids
            stores = [c.state.stores["h"] for lane in self.lanes() if lane.per_sample for c in lane.coded.values()]
            self._prefetch.start(stores, following)

    # --- what is known of it

    def _transports(self) -> list[Transport]:
        return [transport for stage in self.stages for transport in stage.transports.values()]

    def lanes(self) -> list[Lane]:
        return [lane for stage in self.stages for lane in stage.lanes.all()]

    @property
    def stats(self) -> Counters:
        """Counters of this rank: bytes each way, visits, faults."""
        return Counters.of(self.lanes(), self.steps, self.skips, self.healed)

    def summary(self) -> Summary:
        """What compression has saved on this rank so far; `print(pipe.summary())` is one line."""
        stats = self.stats
        sent = stats.forward_bytes + stats.backward_bytes
        return Summary(stats.steps - self._resumed, sent, stats.raw_bytes, stats.skips)

    def _options(self) -> dict[str, str]:
        return {name: str(getattr(self, name)) for name in ("nonfinite", "evaluate", "plan", "overlap")}

    def _estimate(self) -> None:
        """Once, after the first step: how large the stores will become, if nothing was known before it."""
        if self.steps == 1 and self.row is None:
            for line in store_estimate(self.lanes(), self.samples):
                self.say(line)

    def _warn_of_shape(self) -> None:
        """Once after loading: this step met samples of the loaded stores, and none of them could be used."""
        if self._loaded is not None and self._met:
            if self.stats.warm == self._loaded:
                warnings.warn("the loaded samples' memory is of another shape: samples start cold", stacklevel=4)
            self._loaded = None

    def close(self) -> None:
        """Forget all memory; files of stores are removed, and what was saved is logged."""
        for lane in self.lanes():
            lane.close()
        if self.steps > self._resumed:
            logger.info("stage %s: %s", ", ".join(str(stage.stage_index) for stage in self.stages), self.summary())

    # --- checkpoints

    def state_dict(self, stores: bool = True) -> dict[str, Tensor]:
        """This rank's state: residuals, factors, counters, and with `stores` what is remembered of samples."""
        return state_of(self.stages, self.steps, self._scale, stores)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """State of the same stages: this rank's of several, or whichever is the only one. What is missing starts
        empty: samples cold, residuals zero."""
        mine = own_part(state)
        self._handshake()
        made = self.steps - self._resumed
        self.steps, self._scale = restore(self.stages, mine)
        self._resumed = self.steps - made
        self._loaded = self.stats.warm
        if self.steps and any(lane.per_sample and not lane.remembers() for lane in self.lanes()):
            warnings.warn("the loaded state has no samples' memory: every sample starts cold", stacklevel=2)
