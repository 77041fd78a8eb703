"""Gradient reduction over fixed units, on a communication thread and process group of its own.

    reducer = Reducer(model.named_parameters(), "max")
    loss.backward()
    reducer.finish()          # every .grad is now the mean; reducer.ready(unit) earlier overlaps with backward

A pass: gradients are put in (by `ready`, or by DDP's hook one by one); a unit that is complete and whose predecessors
are is exchanged on the thread, last declared first, in the same order on every rank; then all ranks agree on what went
wrong and which parameters nobody used, and state and results are committed or dropped together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.codecs.base import is_finite
from thinwire.collectives import Collective, Dense
from thinwire.collectives.groups import twin, world
from thinwire.config.wire import Reduction, Wire
from thinwire.data_parallel.checkpoint import RankState
from thinwire.data_parallel.exchange import Exchange
from thinwire.data_parallel.gradient_units import Unit
from thinwire.data_parallel.precompile import precompile_averaging
from thinwire.distributed.config_check import by_name, check_agreement, dense, describe, describe_parameters
from thinwire.distributed.summary import Summary
from thinwire.distributed.thread import CommunicationThread
from thinwire.errors import UsageError

NONFINITE = ("nan", "zero")  # what gradients are after a step that was rolled back


class Reducer:
    """Owns the reduction of the parameters' gradients. `scale` gives the loss scale of the step (a GradScaler's), so
    that residuals are kept in the gradient's own unit. After a rolled back step gradients are NaN, as plain DDP would
    leave them, or zero; `skipped` says so. `beside`: a group of ranks that reduce other parts of the same parameters in
    the same passes, as the shards of a model do; a step counts on all of them or on none."""

    def __init__(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]], wire: Wire | Collective | str | dict[str, Any],
        group: Any = None, *, seed: int = 0, nonfinite: str = "nan", scale: Callable[[], float] | None = None,
        beside: Any = None,
    ) -> None:  # fmt: skip
        if nonfinite not in NONFINITE:
            raise UsageError(f"nonfinite = {nonfinite!r}: allowed are {', '.join(NONFINITE)}")
        self.parameters = by_name(named_parameters)
        if not self.parameters:
            raise UsageError("no parameter requires a gradient: there is nothing to reduce")
        self.reduction = Wire.of(wire).gradient or Reduction(Dense())
        self.nonfinite, self.scale = nonfinite, scale or (lambda: 1.0)
        shapes = {name: tuple(p.shape) for name, p in self.parameters.items()}
        config = describe(self.reduction, "gradient") | {"seed": repr(seed)}
        check_agreement("thinwire", config | describe_parameters(self.parameters), group)
        self.size, self.rank = world(group)
        self.group = twin(group) if self.size > 1 else None
        self.beside = twin(beside) if beside is not None and world(beside)[0] > 1 else None
        self.first = self.rank == 0 and (self.beside is None or world(self.beside)[1] == 0)
        precompile_averaging("gradients", self.reduction, self.parameters, self.size)
        self.exchange = Exchange(shapes, self.reduction, self.group, seed)
        self.order = list(reversed(self.exchange.units))
        self.home = {p: (unit, span) for unit in self.order for p, span, _ in unit.spans()}
        self.names = list(self.parameters)
        double = any(p.dtype == torch.float64 for p in self.parameters.values())
        self.dtype = torch.float64 if double else torch.float32
        self.thread = CommunicationThread("thinwire gradients")
        self.checkpoint = RankState(self.exchange, self.rank, self.size)
        self.skipped, self.skips, self.exact = False, 0, False
        self.bracketed = self.opened = self.failed = self.pass_open = False
        self._reset()

    @property
    def units(self) -> list[Unit]:
        return self.exchange.units

    def summary(self) -> Summary:
        """What compression has saved on this rank so far."""
        return self.exchange.summary(self.skips)

    # --- a pass

    def put(self, name: str, gradient: Tensor | None) -> None:
        """One parameter's gradient of this pass; None: this rank did not use it."""
        unit, span = self.home[name]
        self._open()
        if unit not in self.buffers:
            device = self.parameters[name].device if gradient is None else gradient.device
            self.buffers[unit] = torch.empty(unit.numel, dtype=self.dtype, device=device)
            self.missing[unit] = set(unit.parameters)
        if name not in self.missing[unit]:
            raise RuntimeError(f"the gradient of {name} came twice in one pass")
        if gradient is None:
            self.buffers[unit][span] = 0
        else:
            self._check_shape(name, gradient, span)
            self.used.add(name)
            self.buffers[unit][span] = dense(name, gradient).reshape(-1)
        self.missing[unit].discard(name)
        while self.next < len(self.order) and self.missing.get(self.order[self.next]) == set():
            self._send(self.order[self.next])
            self.next += 1

    def ready(self, unit: Unit) -> None:
        """The unit's .grad are complete: exchange it while others are still computed."""
        for name in unit.parameters:
            self.put(name, self.parameters[name].grad)

    def finish(self) -> bool:
        """Exchange what is left, wait, and set every .grad to its mean. False: the step was rolled back."""
        for unit in self.order:
            if unit not in self.buffers:
                self.ready(unit)
        delivered: list[dict[str, Tensor | None]] = []
        self.end(delivered.append)
        self.thread.wait()
        for name, mean in delivered[0].items():
            _store(self.parameters[name], mean)
        return not self.skipped

    def end(
        self, deliver: Callable[[dict[str, Tensor | None]], None],
        failed: Callable[[BaseException], None] = lambda error: None,
    ) -> None:  # fmt: skip
        """Close a pass whose gradients are all in; `deliver` gets the means, on the communication thread.

        A parameter that nobody used has the mean None. `failed` is told instead where the exchange broke.
        """
        if self.next < len(self.order):
            lacking = sorted(n for unit in self.order for n in self.missing.get(unit, unit.parameters))
            raise RuntimeError(f"a pass ends, but {len(lacking)} gradients are missing: {', '.join(lacking[:3])}")
        means, used, scale, bad = self.means, self.used, self.pass_scale, self.bad
        device = next(iter(self.buffers.values())).device
        self.thread.submit(lambda: deliver(self._conclude(means, used, scale, bad)), device, failed)
        self._reset()

    # --- steps

    @contextmanager
    def step(self) -> Any:
        """State written inside is kept or dropped as a whole, by all ranks together; an exception drops it."""
        if self.bracketed:
            raise RuntimeError("a step is open already")
        self.bracketed = True
        try:
            yield self
            self.thread.wait()
        except BaseException:
            self.failed = True
            self._reset()
            raise
        finally:
            self.bracketed = False
            self._close()

    def close(self) -> None:
        """End the thread. The process group is torch's to destroy."""
        self.thread.close()

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's residuals, shifts and thresholds, under names that hold its rank (for torch's checkpoints)."""
        return self.checkpoint.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.checkpoint.load_state_dict(state)

    def maximum(self, values: Tensor) -> Tensor:
        """Entry by entry over all ranks that a step counts on or not, in place."""
        for group in (self.group, self.beside):
            if group is not None:
                dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
        return values

    # --- inside

    def _open(self) -> None:
        if self.pass_open:
            return
        self.pass_open, self.pass_scale = True, float(self.scale())
        self.exact_now = self.exact or self.exchange.steps < self.reduction.warmup
        if not self.opened:
            self.thread.submit(self.exchange.begin)
            self.opened, self.failed = True, False

    def _reset(self) -> None:
        self.buffers: dict[Unit, Tensor] = {}
        self.missing: dict[Unit, set[str]] = {}
        self.means: dict[Unit, tuple[Tensor, Tensor | None]] = {}
        self.used: set[str] = set()
        self.bad: list[Unit] = []
        self.next, self.pass_open, self.pass_scale, self.exact_now = 0, False, 1.0, False

    def _send(self, unit: Unit) -> None:
        """Queue one unit's exchange."""
        x, means, bad, exact, scale = self.buffers[unit], self.means, self.bad, self.exact_now, self.pass_scale

        def work() -> None:
            finite = bool(is_finite(x))
            if not finite:
                bad.append(unit)
            before = self.exchange.channels[unit].state.read("e", unit.name)
            value = x.div_(scale) if scale != 1 and finite else x if finite else torch.zeros_like(x)
            means[unit] = (value if self.size == 1 else self.exchange.reduce(unit, value, exact)), before

        self.thread.submit(work, x.device)

    def _conclude(
        self, means: dict[Unit, tuple[Tensor, Tensor | None]], used: set[str], scale: float, bad: list[Unit]
    ) -> dict[str, Tensor | None]:
        """Agree with the other ranks, then commit or roll back; the means by parameter."""
        flags = torch.tensor([bool(bad), *(name in used for name in self.names)], dtype=torch.uint8)
        flags = self.maximum(flags.to(next(iter(means.values()))[0].device)).cpu()
        if self.size > 1:
            self.exchange.finish_step()
        self.skipped = bool(flags[0])
        unused = {name for name, flag in zip(self.names, flags[1:].tolist()) if not flag}
        out: dict[str, Tensor | None] = {}
        for unit, (mean, before) in means.items():
            for name, span, shape in unit.spans():
                if name in unused and self.size > 1 and not self.skipped:
                    self.exchange.take_back(unit, span, before)
                value = mean[span].view(shape)
                if self.skipped:
                    value.fill_(torch.nan if self.nonfinite == "nan" else 0)
                elif scale != 1:
                    value *= scale
                out[name] = None if name in unused else value
        self.failed |= self.skipped
        self.skips += self.skipped
        if not self.bracketed:
            self._close()
        return out

    def _close(self) -> None:
        if self.opened:
            (self.exchange.rollback if self.failed else self.exchange.commit)()
        self.opened = False

    def _check_shape(self, name: str, gradient: Tensor, span: slice) -> None:
        if gradient.numel() != span.stop - span.start:
            raise UsageError(
                f"{name} has changed to shape {tuple(gradient.shape)} since thinwire was attached: attach it again"
            )


def _store(parameter: nn.Parameter, mean: Tensor | None) -> None:
    """.grad ← mean; a parameter that nobody used keeps what it has."""
    if mean is None:
        return
    if parameter.grad is None:
        parameter.grad = torch.empty_like(parameter)
    parameter.grad.copy_(mean)
