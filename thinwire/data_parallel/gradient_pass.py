"""One pass of gradients through the exchange, and the step that it belongs to (both words: reducer.py).

A parameter's gradient is copied into the buffer of its unit. A unit is sent when it is complete and the units declared
after it have been sent, so the order is the same on every rank. After the last unit the ranks agree on two things:
was any gradient NaN or Inf or any exchange invalid, and which parameters did nobody use. Then the step is committed or
rolled back, and the means are delivered. `add` runs on the caller's thread; everything after it runs on the
communication thread.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from thinwire.codecs.base import is_finite
from thinwire.data_parallel.exchange import Exchange
from thinwire.data_parallel.gradient_units import Shape, Unit
from thinwire.data_parallel.parameters import sparse_gradient
from thinwire.data_parallel.step_state import StepState
from thinwire.distributed.thread import CommunicationThread
from thinwire.errors import InvalidExchange, UsageError
from thinwire.steps import Steps

log = logging.getLogger("thinwire")
MOST_IN_FLIGHT = {"cpu": 4, "cuda": 2}  # units whose exchanges wait for other ranks at a time
Means = dict[str, Tensor | None]  # by parameter; None: no rank used it
Deliver = Callable[[Means], None]
Failed = Callable[[BaseException], None]


@dataclass(frozen=True)
class PassSetup:
    """What all passes of one reducer share.

    parameters: by name. places: name → its unit, its span in the flat unit, its shape. dtype: of the buffers.
    step: that passes belong to. nonfinite: what means become in a step that is rolled back, "nan" or "zero".
    """

    parameters: dict[str, nn.Parameter]
    places: dict[str, tuple[Unit, slice, Shape]]
    dtype: torch.dtype
    exchange: Exchange
    thread: CommunicationThread
    step: StepState
    nonfinite: str

    @property
    def fill_of_skipped(self) -> float:
        """What every value of a gradient is after a step that was rolled back."""
        return math.nan if self.nonfinite == "nan" else 0.0


class Pass:
    """Every parameter's gradient once. It concludes by itself when the last one is in.

    scale: the loss scale of these gradients. exact: nothing is compressed. deliver: gets the means, on the
    communication thread. failed: is told instead where the exchange broke. agrees: False: after the last unit it waits
    for `settle`, whose caller has asked all ranks.
    """

    def __init__(
        self, setup: PassSetup, scale: float, exact: bool, deliver: Deliver | None, failed: Failed | None,
        agrees: bool = True,
    ) -> None:  # fmt: skip
        setup.step.open()
        self.setup = setup
        self.scale = scale
        self.exact = exact
        self.deliver = deliver
        self.failed = failed
        self.agrees = agrees
        self.missing = {unit: set(unit.parameters) for unit in setup.exchange.units}
        self.unsent = deque(reversed(setup.exchange.units))
        self.buffers: dict[Unit, Tensor] = {}
        self.used: set[str] = set()
        self.is_complete = False  # all gradients are in, and all units queued
        self.finite = True
        self.unit_means: dict[Unit, Tensor] = {}
        self.in_flight: deque[tuple[Unit, Steps[Tensor]]] = deque()  # exchanges that wait for other ranks
        self.means: Means = {}
        if setup.step.bracketed:
            setup.thread.submit(setup.step.announce_pass, failed=failed)

    def missing_names(self) -> list[str]:
        """Parameters whose gradient has not been added, in the order in which units are sent."""
        return [name for unit in self.unsent for name in unit.parameters if name in self.missing[unit]]

    def give_up(self) -> None:
        """This rank cannot go on: what is missing goes as zeros, so that the others come to the end of the pass, and
        learn there that it does not count."""
        self.finite = False
        for name in self.missing_names():
            self.add(name, None)

    def add(self, name: str, gradient: Tensor | None) -> None:
        """One parameter's gradient; None: this rank did not use it."""
        unit, span, _ = self.setup.places[name]
        if name not in self.missing[unit]:
            raise RuntimeError(f"the gradient of {name} came twice in one pass")
        if unit not in self.buffers:
            device = self.setup.parameters[name].device if gradient is None else gradient.device
            self.buffers[unit] = torch.empty(unit.numel, dtype=self.setup.dtype, device=device)
        if gradient is None:
            self.buffers[unit][span] = 0
        elif gradient.layout != torch.strided:
            raise sparse_gradient(name, gradient)
        elif gradient.numel() != span.stop - span.start:
            raise UsageError(
                f"{name} has changed to shape {tuple(gradient.shape)} since thinwire was attached: attach it again"
            )
        else:
            self.used.add(name)
            self.buffers[unit][span] = gradient.reshape(-1)
        self.missing[unit].discard(name)
        while self.unsent and not self.missing[self.unsent[0]]:
            self._send(self.unsent.popleft())

    def _send(self, unit: Unit) -> None:
        """Queue the unit's exchange, and the conclusion after the last one."""
        x = self.buffers[unit]
        self.setup.thread.submit(partial(self._exchange, unit, x), x.device)
        if not self.unsent:
            self.is_complete = True
            self.setup.thread.submit(self._conclude, x.device, self.failed)

    # --- on the communication thread

    def _exchange(self, unit: Unit, x: Tensor) -> None:
        """x: [unit.numel], this rank's gradients. Zeros stand in for NaN and Inf: the step will be rolled back."""
        self.unit_means[unit] = x
        if self.setup.step.dropped:
            return
        finite = is_finite(x)
        if finite.is_cuda:
            x.masked_fill_(~finite, 0.0)
        if not self.setup.exchange.later.leave(finite):
            self.finite = False
            x = torch.zeros_like(x)
        elif self.scale != 1:
            x = x.div_(self.scale)
        self.unit_means[unit] = x
        if self.setup.exchange.size > 1:
            with self.setup.step.losses():
                steps = self.setup.exchange.reduce_steps(unit, x, self.exact)
                if not self._proceed(unit, steps):
                    self.in_flight.append((unit, steps))
                while len(self.in_flight) > MOST_IN_FLIGHT.get(x.device.type, 0):
                    self._land()

    def _proceed(self, unit: Unit, steps: Steps[Tensor]) -> bool:
        """Run a unit's exchange until it has to wait for other ranks; is it at its end?"""
        try:
            next(steps)
            return False
        except StopIteration as end:
            self.unit_means[unit] = end.value
            self.finite &= self._fits(unit, end.value)
        except InvalidExchange as error:
            log.warning("thinwire: a step is dropped: %s", error)
            self.finite = False
        return True

    def _land(self) -> None:
        """One step of every exchange in flight, in the order in which they began: the same on all ranks."""
        self.in_flight = deque(item for item in self.in_flight if not self._proceed(*item))

    def _fits(self, unit: Unit, mean: Tensor) -> bool:
        """Will the mean, times the loss scale, be in range of its parameters' types? With a residual it may be larger
        than any rank's gradient."""
        limit = min(torch.finfo(self.setup.parameters[name].dtype).max for name in unit.parameters) / self.scale
        if limit >= torch.finfo(mean.dtype).max or not mean.numel():
            return True
        return self.setup.exchange.later.leave(mean.abs().max() <= limit)

    def _conclude(self) -> None:
        with self.setup.step.losses():
            while self.in_flight and not self.setup.step.dropped:
                self._land()
        self.in_flight.clear()
        if self.agrees:
            self.settle(*self._agree())

    def settle(self, skipped: bool, unused: set[str]) -> None:
        """Keep what the pass wrote, or drop it where the step is `skipped`; unused: parameters that no rank used."""
        self.buffers.clear()  # not before: agreeing has waited for a device that may still have been reading them
        self.means = {name: self._mean(name, skipped, name in unused) for name in self.setup.places}
        if self.setup.exchange.size > 1 and not self.setup.step.dropped:
            self.setup.exchange.finish_step()
        self.setup.step.end_pass(skipped)
        if self.deliver is not None:
            self.deliver(self.means)

    def _agree(self) -> tuple[bool, set[str]]:
        """(was a gradient NaN or Inf on any rank, parameters that no rank used): the same on all ranks. Where they have
        dropped the step already: parameters that this rank did not use."""
        names = list(self.setup.parameters)
        flags = torch.tensor([not self.finite, *(name in self.used for name in names)], dtype=torch.uint8)
        device = next(iter(self.unit_means.values())).device
        if not self.setup.step.dropped:
            with self.setup.step.losses():
                skipped, *used = self.setup.step.agree(flags.to(device)).tolist()
                return bool(skipped), {name for name, flag in zip(names, used) if not flag}
        return True, set(names) - self.used

    def _mean(self, name: str, skipped: bool, unused: bool) -> Tensor | None:
        unit, span, shape = self.setup.places[name]
        if unused and not skipped and self.setup.exchange.size > 1:
            self.setup.exchange.restore_residual(unit, span)
        if unused:
            return None
        mean = self.unit_means[unit][span].view(shape)
        if skipped:
            mean.fill_(self.setup.fill_of_skipped)
        elif self.scale != 1:
            mean *= self.scale
        return mean


class GradientWatch:
    """Finds out which gradients are final while backward still runs, so that they can be sent at once.

    A gradient is final when it has been added to as often as in the step before: once per micro-batch, or more often
    where two stages share the parameter. The first step only counts. Whatever is not final so is when backward has
    ended.

    parameters: each with its name and whoever takes its gradient.
    """

    def __init__(self, parameters: Mapping[Tensor, tuple[str, Callable[[str, Tensor | None], None]]]) -> None:
        self.counts: Counter[Tensor] = Counter()
        self.usual: Mapping[Tensor, int] = {}
        self.parameters = parameters
        self.hooks = [p.register_post_accumulate_grad_hook(self._added) for p in parameters]

    def end_backward(self) -> None:
        """All gradients of the step are complete."""
        self.usual = dict(self.counts)
        self.counts.clear()

    def close(self) -> None:
        """Watch no more."""
        for hook in self.hooks:
            hook.remove()

    def _added(self, parameter: Tensor) -> None:
        self.counts[parameter] += 1
        usual = self.usual.get(parameter, 0)
        name, take = self.parameters[parameter]
        if self.counts[parameter] == usual:
            take(name, parameter.grad)
        elif usual and self.counts[parameter] > usual:
            raise RuntimeError(f"{name} got more gradients than in the step before, after it was sent")
