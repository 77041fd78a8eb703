"""One line for DistributedDataParallel: `handle = tw.parallel.compress_ddp(model, "max")`.

DDP's buckets are only where gradients come from and go back to; what is exchanged are the Reducer's units. The future
of a bucket is done when the pass is: backward still overlaps with the exchange, and DDP waits for all of them anyway.
(No `from __future__ import annotations` here: DDP refuses hooks whose annotations are strings.)
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from thinwire.collectives.groups import Group
from thinwire.config.wire import Wire, WireLike
from thinwire.data_parallel.gradient_pass import Means
from thinwire.data_parallel.handle import Handle, LossScaler
from thinwire.data_parallel.parameters import refuse_capture, sparse_gradient
from thinwire.data_parallel.reducer import Reducer
from thinwire.errors import UsageError
from thinwire.torch_private.ddp import hook_state, leave_hooks_behind


class CompressedDDP(Handle):
    """The handle of a compressed DDP model, made by `compress_ddp`.

    model: whose gradients are compressed. reducer: of its parameters. auto: measure, and stay exact where that is
    faster.
    """

    def __init__(self, model: DistributedDataParallel, reducer: Reducer, auto: bool) -> None:
        super().__init__(reducer, auto)
        self.model = model
        self.names = {id(p): name for name, p in reducer.parameters.items()}
        self.finds_unused = bool(model.find_unused_parameters or model.static_graph)
        self.one_device = len({p.device for p in reducer.parameters.values()}) == 1  # a pass ends with one future
        self.wire_is_exact = not reducer.exchange.compressed
        self.pending: list[tuple[dist.GradBucket, torch.futures.Future[Tensor]]] = []  # of this pass
        self.arrived = 0  # parameters of this pass
        self.all_reduces: list[torch.futures.Future[list[Tensor]]] = []  # of this pass, where it is plain
        self.residual_loaded = False  # an exact wire has to send it first, through the units
        self.plain = False  # this pass goes through DDP's own all-reduce

    @contextmanager
    def step(self, ids: Sequence[int] | None = None, train: bool = True) -> Iterator[Self]:
        """As Handle.step; a backward that an exception broke off is forgotten."""
        try:
            with super().step(ids, train):
                yield self
        finally:
            self.arrived = 0
            self.pending.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's residuals, shifts and thresholds, under names that hold its rank (for torch's checkpoints)."""
        return self.reducer.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """What state_dict gave on this rank, or, from another number of ranks, on all of them (`read_state`)."""
        self._load(state)
        self.residual_loaded = True

    # --- called by DDP during backward

    def reduce_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """DDP's hook: the bucket's gradients go into the pass; the future is done when the pass is."""
        buffer = bucket.buffer()
        if buffer.is_sparse:
            raise sparse_gradient(self.names[id(bucket.parameters()[0])], buffer)
        if self.arrived == 0:
            self.reducer.check_usable()
            self.plain = self._is_plain()
        self.arrived = (self.arrived + len(bucket.parameters())) % len(self.names)
        if self.plain:
            return self._all_reduce(bucket)
        future = self._future_of(bucket)
        gradients: Means = {self.names[id(parameter)]: gradient for parameter, gradient in _gradients(bucket)}
        if self.finds_unused:
            gradients = {name: g if g is not None and bool(g.any()) else None for name, g in gradients.items()}
        self.reducer.put_all(gradients, self._deliver, self._fail)
        return future

    def _is_plain(self) -> bool:
        """Will DDP's own all-reduce do for the pass that begins? Where it is exact, and no residual is left."""
        exact = self.wire_is_exact and not self.residual_loaded
        if self.auto is not None:
            exact = self.auto.begin_pass()
        in_quorum = self.reducer.step_state.quorum is not None
        return exact and self.one_device and not self.reducer.bracketed and not in_quorum

    def _deliver(self, means: Means) -> None:
        """The means into DDP's buckets; what nobody used stays as it is, and DDP leaves its .grad alone."""
        for bucket, _ in self.pending:
            for parameter, gradient in _gradients(bucket):
                mean = means[self.names[id(parameter)]]
                if mean is not None:
                    gradient.copy_(mean.view(gradient.shape))
        if self.residual_loaded and not self.reducer.skipped and not self.reducer.bracketed:
            self.residual_loaded = False
        self._complete()

    def _fail(self, error: BaseException) -> None:
        pending, self.pending = self.pending, []
        for _, future in pending:
            future.set_exception(RuntimeError(f"thinwire could not exchange the gradients: {error}"))  # type: ignore[arg-type]

    def _all_reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """As DDP without a hook would; but no bucket is handed over before all are there, since a NaN in the last one
        decides about the first one too."""
        buffer = bucket.buffer().div_(self.reducer.size)
        self.reducer.exchange.count_plain(buffer)
        work = dist.all_reduce(buffer, group=self.model.process_group, async_op=True)
        self.all_reduces.append(work.get_future())
        future = self._future_of(bucket)
        if self.arrived == 0:  # the last bucket of the pass
            under_way, self.all_reduces = self.all_reduces, []
            torch.futures.collect_all(under_way).then(self._end_plain_pass)
        return future

    def _end_plain_pass(self, all_reduces: torch.futures.Future[list[torch.futures.Future[list[Tensor]]]]) -> None:
        try:
            all_reduces.value()
            self.reducer.end_plain_step([bucket.buffer() for bucket, _ in self.pending])
        except Exception as error:  # handed to DDP, which raises it in backward
            self._fail(error)
        else:
            self._complete()

    def _future_of(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Done with the pass (`_complete`, `_fail`): the bucket's buffer, or the error."""
        device = bucket.buffer().device
        done: torch.futures.Future[Tensor] = torch.futures.Future(devices=[device] if device.type == "cuda" else None)
        self.pending.append((bucket, done))
        return done.then(lambda future: future.value())  # DDP shows an error raised here, not one set by set_exception

    def _complete(self) -> None:
        pending, self.pending = self.pending, []
        for bucket, future in pending:
            future.set_result(bucket.buffer())


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


def _hook(state: CompressedDDP, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state.reduce_bucket(bucket)


def _before_forward(model: DistributedDataParallel, _: object) -> None:
    """Before anything is captured, since an error in backward would be hidden by CUDA's own about the capture."""
    still_ours = isinstance(hook_state(model)[1], CompressedDDP)  # copies keep this hook and not the other one
    if still_ours and torch.is_grad_enabled() and model.require_backward_grad_sync:
        refuse_capture()


def compress_ddp(
    model: DistributedDataParallel, wire: WireLike = "auto", *, seed: int = 0, nonfinite: str = "nan",
    scaler: LossScaler | None = None, group: Group = None,
) -> CompressedDDP:  # fmt: skip
    """Compress this model's gradients from now on. Call it on all ranks, once per DDP model.

        model = DistributedDataParallel(model)
        handle = tw.parallel.compress_ddp(model, "max")

    model: the wrapped model; its process group is averaged over.
    wire: a tw.Wire, a preset's name, a collective, a table as TOML gives it, or "auto": measure a few steps both ways
    and keep the faster. Its gradient section is used.
    seed: of stochastic rounding and of random choices, equal on all ranks.
    nonfinite: what .grad is after a step that was rolled back for a NaN or Inf: "nan", as plain DDP would leave it, or
    "zero".
    scaler: the GradScaler in use, if any, so that residuals do not change with the loss scale.
    group: what is averaged over instead of the model's process group: a quorum (tw.elastic.Quorum), where every member
    wraps its model in a process group of its own.

    UsageError where the model is not DDP's, has a communication hook already, an argument is not allowed, or ranks
    differ in configuration.
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
    scale = None if scaler is None else scaler.get_scale
    ignored = set(model.parameters_to_ignore)
    named = [(name, p) for name, p in model.module.named_parameters() if name not in ignored]
    among = model.process_group if group is None else group
    reducer = Reducer(named, wire, among, seed=seed, nonfinite=nonfinite, scale=scale)
    handle = CompressedDDP(model, reducer, wire.auto)
    model.register_comm_hook(handle, _hook)
    model.register_forward_pre_hook(_before_forward)
    leave_hooks_behind(model)
    return handle
