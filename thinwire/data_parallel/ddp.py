"""One line for DistributedDataParallel: `handle = tw.parallel.compress_ddp(model, "max")`.

DDP's buckets are only where gradients come from and go back to; what is exchanged are the Reducer's units. The future
of a bucket is done when the pass is: backward still overlaps with the exchange, and DDP waits for all of them anyway.
(No `from __future__ import annotations` here: DDP refuses hooks whose annotations are strings.)
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from thinwire.collectives import Collective
from thinwire.config.wire import Wire
from thinwire.data_parallel.handle import Handle
from thinwire.data_parallel.reducer import Reducer
from thinwire.distributed.config_check import dense
from thinwire.errors import UsageError
from thinwire.torch_private.ddp import hook_state

Buckets = list[tuple[dist.GradBucket, torch.futures.Future[Tensor]]]


class CompressedDDP(Handle):
    """The handle of a compressed DDP model: whether the last step was rolled back (`skipped`), and its state."""

    def __init__(self, model: DistributedDataParallel, reducer: Reducer, auto: bool) -> None:
        super().__init__(reducer, auto)
        self.model = model
        self.names = {id(p): name for name, p in reducer.parameters.items()}
        self.finds_unused = bool(model.find_unused_parameters or model.static_graph)
        self.pending: Buckets = []
        self.arrived, self.plain = 0, False

    def state_dict(self) -> dict[str, Tensor]:
        return self.reducer.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.reducer.load_state_dict(state)
        if self.auto is not None:
            self.auto.owes = True

    # --- called by DDP during backward

    def take(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        for parameter in bucket.parameters() if bucket.buffer().is_sparse else ():
            dense(self.names[id(parameter)], bucket.buffer())
        if self.arrived == 0:
            self.plain = self.auto is not None and self.auto.begin_pass() and not self.reducer.bracketed
        if self.plain:
            return self._all_reduce(bucket)
        buffer = bucket.buffer()
        future: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.device.type == "cuda" else None
        )
        self.pending.append((bucket, future))
        for parameter, gradient in _gradients(bucket):
            unused = self.finds_unused and not bool(gradient.any())
            self.reducer.put(self.names[id(parameter)], None if unused else gradient)
        self._advance(bucket)
        return future

    def _advance(self, bucket: dist.GradBucket) -> None:
        self.arrived += len(bucket.parameters())
        if self.arrived < len(self.names):
            return
        pending, self.pending, self.arrived = self.pending, [], 0
        self.reducer.end(lambda means: self._deliver(pending, means), lambda error: _fail(pending, error))

    def _deliver(self, pending: Buckets, means: dict[str, Tensor | None]) -> None:
        """The means into DDP's buckets; what nobody used stays as it is, and DDP leaves its .grad alone."""
        for bucket, _ in pending:
            for parameter, gradient in _gradients(bucket):
                mean = means[self.names[id(parameter)]]
                if mean is not None:
                    gradient.copy_(mean.view(gradient.shape))
        for bucket, future in pending:
            future.set_result(bucket.buffer())

    def _all_reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """As DDP without a hook would, NaN included: nothing is skipped here."""
        self.reducer.skipped = False
        self.arrived += len(bucket.parameters())
        if self.arrived == len(self.names):
            self.arrived = 0
            self.reducer.exchange.steps += 1
        buffer = bucket.buffer().div_(self.reducer.size)
        self.reducer.exchange.count_plain(buffer)
        work = dist.all_reduce(buffer, group=self.model.process_group, async_op=True)
        future: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
        return future


def _gradients(bucket: dist.GradBucket) -> Iterator[tuple[Tensor, Tensor]]:
    """(parameter, its gradient in the bucket). DDP lays a dense parameter's values out as the parameter lies in memory,
    and shows them as if it were contiguous: of a transposed or channels-last one that is another order."""
    for parameter, shown in zip(bucket.parameters(), bucket.gradients()):
        yield parameter, shown.as_strided(parameter.shape, parameter.stride()) if _is_dense(parameter) else shown


def _is_dense(x: Tensor) -> bool:
    """Do its values fill their memory, each its own place?"""
    place = 1
    for stride, length in sorted(pair for pair in zip(x.stride(), x.shape) if pair[1] != 1):
        if stride != place:
            return False
        place *= length
    return True


def _fail(pending: Buckets, error: BaseException) -> None:
    for _, future in pending:
        future.set_exception(RuntimeError(f"thinwire could not exchange the gradients: {error}"))  # type: ignore[arg-type]


def _hook(state: CompressedDDP, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state.take(bucket)


def compress_ddp(
    model: DistributedDataParallel, wire: Wire | Collective | str | dict[str, Any] = "auto", *, seed: int = 0,
    nonfinite: str = "nan", scaler: Any = None,
) -> CompressedDDP:  # fmt: skip
    """Compress this model's gradients from now on. Call it on all ranks, once per DDP model.

    wire: a tw.Wire, a preset's name, a collective, a table, or "auto": measure a few steps both ways and keep the
    faster. `scaler`: the GradScaler in use, if any, so that residuals do not change with the loss scale.
    """
    if not isinstance(model, DistributedDataParallel):
        raise UsageError(f"compress_ddp wants a DistributedDataParallel model, not {type(model).__name__}")
    hooked, state = hook_state(model)
    if hooked:
        raise UsageError(
            "compress_ddp: this model is compressed already: call it once per DDP model, and keep its handle"
            if isinstance(state, CompressedDDP)
            else "compress_ddp: this model has a communication hook already, and DDP takes one: wrap it anew without"
        )
    wire = Wire.of(wire)
    scale: Callable[[], float] | None = scaler.get_scale if scaler is not None else None
    ignored = set(model.parameters_to_ignore)
    named = [(name, p) for name, p in model.module.named_parameters() if name not in ignored]
    reducer = Reducer(named, wire, model.process_group, seed=seed, nonfinite=nonfinite, scale=scale)
    handle = CompressedDDP(model, reducer, wire.auto)
    model.register_comm_hook(handle, _hook)
    return handle
