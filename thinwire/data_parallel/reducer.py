"""Gradient reduction over fixed units, on a communication thread and process group of its own.

    reducer = Reducer(model.named_parameters(), "max")
    loss.backward()
    reducer.finish()          # every .grad is now the mean; reducer.ready(unit) earlier overlaps with backward

Two words, used so everywhere in this room:

- A **pass** takes every parameter's gradient once and gives every parameter's mean: one reducing backward. Its course
  is in gradient_pass.py.
- A **step** is what all ranks commit or roll back as a whole: one pass, or those in `with reducer.step():`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

from thinwire.collectives import Dense
from thinwire.collectives.groups import ALONE, Group, destroy, elastic, twin, world
from thinwire.config.wire import Reduction, Wire, WireLike, warmup_steps
from thinwire.data_parallel.checkpoint import RankState
from thinwire.data_parallel.exchange import Exchange
from thinwire.data_parallel.gradient_pass import Deliver, Failed, Means, Pass, PassSetup
from thinwire.data_parallel.gradient_units import Unit
from thinwire.data_parallel.parameters import (
    buffer_dtype,
    check_frozen,
    describe_parameters,
    store_gradient,
    trainable_parameters,
)
from thinwire.data_parallel.precompile import precompile_averaging
from thinwire.data_parallel.quorum import Following
from thinwire.data_parallel.step_state import StepState
from thinwire.distributed.config_check import check_agreement, describe
from thinwire.distributed.streams import settled_streams
from thinwire.distributed.summary import Summary
from thinwire.distributed.thread import CommunicationThread
from thinwire.errors import UsageError

log = logging.getLogger("thinwire")
NONFINITE = ("nan", "zero")  # what gradients are after a step that was rolled back


class Reducer:
    """Averages the gradients of parameters over a group, compressed. Made on all its ranks, with equal arguments.

        reducer = tw.parallel.Reducer(model.named_parameters(), "max")
        loss.backward(); reducer.finish(); optimizer.step()

    named_parameters: pairs such as model.named_parameters() gives; those that require no gradient are left out.
    wire: a tw.Wire, a preset's name, a collective, or a table as TOML gives it; its gradient section is used.
    group: the process group that is averaged over; None is torch's default. A quorum (tw.elastic.Quorum) is taken too;
    its vote then decides whether a pass counts. seed: of stochastic and random choices.
    nonfinite: what gradients are after a step that was rolled back: "nan", as plain DDP would leave them, or "zero".
    scale: gives the loss scale of a pass (a GradScaler's get_scale), so that residuals are kept in the gradient's unit.
    shard_group: ranks that reduce other parts of the same parameters in the same passes, as the shards of a model do;
    a step counts on all of them or on none.
    agrees: False: its user asks all ranks whether a step counts, between `exchanged` and `settle`. name: in its quorum.
    thread: another reducer's, whose exchanges then come before or after this one's, in one order on all ranks.

    UsageError where an argument is not allowed, nothing is to be reduced, or ranks differ in configuration.
    """

    def __init__(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]], wire: WireLike, group: Group = None, *,
        seed: int = 0, nonfinite: str = "nan", scale: Callable[[], float] | None = None, shard_group: Group = None,
        agrees: bool = True, name: str = "gradients", thread: CommunicationThread | None = None,
    ) -> None:  # fmt: skip
        everything = list(named_parameters)
        self.parameters = trainable_parameters(everything)
        self.frozen = {name: p for name, p in everything if not p.requires_grad}
        wire = Wire.of(wire)
        self.reduction = wire.gradient or Reduction(Dense())
        self.loss_scale = scale or (lambda: 1.0)
        config = describe(self.reduction, "gradient") | {
            "auto": repr(wire.auto), "streams": repr(wire.streams), "seed": repr(seed), "nonfinite": repr(nonfinite),
            "scaler": "none" if scale is None else "one", "shards": repr(world(shard_group)[0] if shard_group else 1),
        } | describe_parameters(self.parameters)  # fmt: skip
        quorum = elastic(group)
        if quorum is None:  # a member of a quorum is asked when it comes
            check_agreement("thinwire", config, group)
        if nonfinite not in NONFINITE:  # asked after they agreed: a rank that leaves earlier lets the others wait
            raise UsageError(f"nonfinite = {nonfinite!r}: allowed are {', '.join(NONFINITE)}")
        self.warmup = warmup_steps("gradient", self.reduction)
        if not self.parameters:
            raise UsageError("no parameter requires a gradient: there is nothing to reduce")
        self.size, self.rank = world(group) if quorum is None else (1, 0)
        own = twin(group) if self.size > 1 else None
        shards = twin(shard_group) if shard_group is not None and world(shard_group)[0] > 1 else None
        self.is_first = self.rank == 0 and (shards is None or world(shards)[1] == 0)  # of all ranks that agree
        precompile_averaging("gradients", self.reduction, self.parameters, self.size if quorum is None else 2)
        shapes = {name: tuple(p.shape) for name, p in self.parameters.items()}
        streams = settled_streams(wire.streams, own or ALONE)
        self.exchange = Exchange(shapes, self.reduction, own or ALONE, seed, own_group=True, streams=streams)
        self.thread = thread or CommunicationThread("thinwire gradients")
        self.checkpoint = RankState(self.exchange, self.rank, self.size, quorum is not None)
        agreeing = tuple(g for g in (own or quorum, shards) if g is not None)
        device = next(iter(self.parameters.values())).device
        following = None if quorum is None else Following(quorum, self.exchange, f"thinwire {name}", config, device)
        self.step_state = StepState(self.exchange, agreeing, device, following)
        self.setup = PassSetup(
            parameters=self.parameters,
            places={name: (unit, span, shape) for unit in self.units for name, span, shape in unit.spans()},
            dtype=buffer_dtype(self.parameters.values()),
            exchange=self.exchange, thread=self.thread, step=self.step_state, nonfinite=nonfinite,
        )  # fmt: skip
        self.current_pass: Pass | None = None
        self.closed = False
        self.exact = False
        self.agrees = agrees

    @property
    def units(self) -> list[Unit]:
        """In declaration order. They are sent last first, since backward completes them in that order."""
        return self.exchange.units

    @property
    def skipped(self) -> bool:
        """Was the last step rolled back, for a NaN or Inf on any rank?"""
        return self.step_state.skipped

    @property
    def skips(self) -> int:
        """How many steps were rolled back so."""
        return self.step_state.skips

    @property
    def bracketed(self) -> bool:
        """Is a step open that ends with its bracket?"""
        return self.step_state.bracketed

    @property
    def compressing(self) -> bool:
        """Will the next pass be compressed? Not in the warm-up, where it was turned off, or the wire is exact."""
        return self.size > 1 and bool(self.exchange.compressed) and not self._exact_pass()

    def summary(self) -> Summary:
        """What compression has saved on this rank so far."""
        return self.exchange.summary(self.skips)

    # --- a pass

    def put(self, name: str, gradient: Tensor | None) -> None:
        """One parameter's gradient of this pass; None: this rank did not use it."""
        self.put_all({name: gradient})

    def put_all(
        self, gradients: Mapping[str, Tensor | None], deliver: Deliver | None = None, failed: Failed | None = None
    ) -> None:
        """Some gradients of the pass, by parameter; the first ones open it, the last ones conclude it.

        gradients: None for a parameter that this rank did not use. deliver: gets the means when the pass is through,
        on the communication thread; without it `collect` waits for them. failed: is told where the exchange broke.
        Both are taken from the call that opens the pass.
        """
        if self.current_pass is None:
            self.check_usable()
            self._follow()
            scale = float(self.loss_scale())
            self.current_pass = Pass(self.setup, scale, self._exact_pass(), deliver, failed, self.agrees)
        for name, gradient in gradients.items():
            self.current_pass.add(name, gradient)
        if deliver is not None and self.current_pass.is_complete:
            self.current_pass = None

    def check_usable(self) -> None:
        """UsageError where it was closed, or a parameter trains that did not when it was made: nobody averages it."""
        if self.closed:
            raise UsageError("thinwire was closed here: its gradients are averaged by nobody; attach it again")
        check_frozen(self.frozen)

    def _follow(self) -> None:
        """In a quorum: its members of now."""
        if self.step_state.quorum is not None:
            self.thread.submit(self.step_state.follow)
            self.thread.wait()
            self.size, self.rank = self.checkpoint.follow()

    def ready(self, unit: Unit) -> None:
        """The unit's .grad are complete: exchange it while others are still computed."""
        self.put_all(self._gradients(unit.parameters))

    def finish(self) -> bool:
        """Exchange what is left, wait, and set every .grad to its mean. False: the step was rolled back."""
        self.put_rest()
        for name, mean in self.collect().items():
            store_gradient(self.parameters[name], mean)
        return not self.skipped

    def collect(self) -> Means:
        """Wait for the pass whose gradients have all been put, and end it: its means by parameter."""
        ending, self.current_pass = self.current_pass, None
        if ending is None or not ending.is_complete:
            missing = [] if ending is None else ending.missing_names()
            raise RuntimeError(f"a pass ends, but {len(missing)} gradients are missing: {', '.join(missing[:3])}")
        self.thread.wait()
        return ending.means

    def exchanged(self) -> bool:
        """For agrees = False: as `finish`, but nothing is kept before `settle`; False: this rank saw a fault."""
        ending = self.put_rest()
        self.thread.wait()
        unused = [name for name in self.parameters if name not in ending.used]
        if unused:  # whether others used them is not asked here
            raise RuntimeError(f"{len(unused)} parameters got no gradient in this step: {', '.join(unused[:3])}")
        for name, (unit, span, shape) in self.setup.places.items():
            store_gradient(self.parameters[name], ending.unit_means[unit][span].view(shape))
        return self.exchange.later.all_good() and ending.finite

    def settle(self, skipped: bool) -> None:
        """For agrees = False: keep what the pass wrote, or drop it where the step is `skipped`; on all ranks alike."""
        ending, self.current_pass = self.current_pass, None
        assert ending is not None
        ending.settle(skipped, set())

    def message_table(self) -> Tensor:
        """uint8 on the CPU: checksums of this rank's messages since the last one (collectives/transit.py)."""
        return self.exchange.transit.table(self.step_state.device).cpu()

    def put_rest(self) -> Pass:
        """The gradients of the pass that were not put yet: those in .grad."""
        self.put_all({})
        assert self.current_pass is not None
        self.put_all(self._gradients(self.current_pass.missing_names()))
        return self.current_pass

    def _gradients(self, names: Iterable[str]) -> dict[str, Tensor | None]:
        return {name: self.parameters[name].grad for name in names}

    def use_exact(self, exact: bool) -> None:
        """From the next pass on compress nothing (True), or as the wire says (False)."""
        self.exact = exact

    def _exact_pass(self) -> bool:
        return self.exact or self.exchange.steps < self.warmup

    # --- steps

    @contextmanager
    def step(self) -> Iterator[Reducer]:
        """State written inside is kept or dropped as a whole, by all ranks together.

        An exception on one rank drops it on all: the others learn of it before their next pass or at the end of the
        step, where `skipped` is then true. Where the exchange itself is broken they cannot be told, and run into the
        time-out of their group.
        """
        with self.step_state.bracket():
            try:
                yield self
            except BaseException:
                self._give_up_step()
                raise
            self.thread.wait()
            self.thread.submit(partial(self.step_state.announce_end, False))
            self.thread.wait()

    def _give_up_step(self) -> None:
        """Tell the other ranks, after what is under way. The exception that is being raised is the one to see."""
        giving_up, self.current_pass = self.current_pass, None
        if self.thread.broken:
            log.warning("thinwire: the exchange broke, so the other ranks cannot be told: they wait for their time-out")
            return
        try:
            if giving_up is not None:
                giving_up.give_up()
            self.thread.submit(partial(self.step_state.announce_end, True))
            self.thread.wait()
        except Exception as error:
            log.warning("thinwire: the other ranks could not be told that this step is dropped here: %s", error)

    def end_plain_step(self, means: Sequence[Tensor]) -> None:
        """A step went another way, through the backend's all-reduce; `means`: all of it (StepState.end_plain_pass)."""
        self.step_state.end_plain_pass(means, self.setup.fill_of_skipped)

    def maximum(self, values: Tensor) -> Tensor:
        """Entry by entry over all ranks on which a step counts or does not."""
        return self.step_state.maximum(values)

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's residuals, shifts and thresholds, under names that hold its rank (for torch's checkpoints)."""
        return self.checkpoint.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """What state_dict gave on this rank (in a quorum, on one member), or, from another number, on all of them."""
        self.checkpoint.load_state_dict(state)

    def close(self) -> None:
        """End the thread, and destroy the process groups that were made here. No pass is possible after it."""
        self.closed = True
        self.thread.close()
        for group in (*self.step_state.agreeing, *self.reduction.collective.leave_groups(self.exchange.group)):
            destroy(group)
        self.step_state.agreeing = ()
        self.exchange.leave_group()
