"""FSDP2 inside sites, compressed averaging between them:

    fully_shard(model, mesh=sites["shard"])
    handle = tw.parallel.compress_fsdp(model, "max", replicas=sites["replica"])

`fully_shard` over a 1-D mesh reduce-scatters gradients within a site; what HSDP would all-reduce between the replicas
of a site goes through the wire instead. FSDP's all-reduce hook gets one flat, padded tensor a parameter group, of the
parameters that had a gradient, without their names: here it only says that a reduction begins. The gradients are taken
one by one from post-accumulate-grad hooks, which FSDP calls next, and so units, residuals, exclusions and low rank know
parameters, in the shape of this rank's shard. The means are added to `.grad` when backward ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from thinwire.collectives import Collective
from thinwire.config.wire import Wire
from thinwire.data_parallel.checkpoint import read_state
from thinwire.data_parallel.handle import Handle
from thinwire.data_parallel.reducer import Reducer
from thinwire.data_parallel.sharding import padded_numel, sharded_parameters, site_mesh
from thinwire.distributed.config_check import check_agreement
from thinwire.errors import UsageError
from thinwire.torch_private.fsdp import at_end_of_backward, reduction_of


class CompressedFSDP(Handle):
    """The handle of a compressed FSDP model: whether the last step was rolled back (`skipped`), and its state."""

    stream: torch.cuda.Stream | None  # the one that FSDP hands gradients over on

    def __init__(
        self, parameters: dict[str, DTensor], reducer: Reducer, mesh: DeviceMesh, replicas: Any, auto: bool
    ) -> None:
        super().__init__(reducer, auto)
        self.parameters, self.replicas = parameters, replicas
        self.padded = {name: padded_numel(p) for name, p in parameters.items()}
        self.shard = f"shard{mesh.get_local_rank()}of{mesh.size()}"
        self._reset()

    @contextmanager
    def step(self, ids: Any = None, train: bool = True) -> Iterator[Any]:
        try:
            with super().step(ids, train):
                yield self
        finally:
            self._reset()

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """This rank's, under the names of its shard and of its replica of it."""
        return {self.shard: self.reducer.state_dict()}

    def load_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        if self.shard not in state:
            raise UsageError(f"this rank is {self.shard}, the state is of {', '.join(state) or 'none'}")
        self.reducer.load_state_dict(state[self.shard])
        if self.auto is not None:
            self.auto.owes = True

    def read_state(self, path: str | PathLike[str], prefix: str) -> dict[str, dict[str, Tensor]]:
        """What load_state_dict needs, from dcp.save({prefix: handle.state_dict(), …}, checkpoint_id=path)."""
        return {self.shard: read_state(path, f"{prefix}.{self.shard}", self.replicas)}

    # --- called by FSDP during backward

    def begin(self, module: FSDPModule, reduced: Tensor) -> None:
        """FSDP has reduce-scattered a parameter group, and will hand over its gradients next."""
        reduction = reduction_of(module)
        if not reduction.between_sites:
            raise UsageError("compress_fsdp: set_requires_all_reduce(False): use set_requires_gradient_sync(False)")
        self._check_complete()
        if not self.open:
            self._open()
        self.left = reduced.numel()
        self.times = 1 if reduction.divide_factor is None else self.reducer.size
        if reduced.is_cuda:
            self.stream = torch.cuda.current_stream(reduced.device)

    def take(self, name: str, parameter: DTensor) -> None:
        """One parameter's gradient, the mean of this site (or its sum, divided as the user said)."""
        if name in self.arrived:
            raise UsageError(f"compress_fsdp: FSDP reduced {name} twice in one backward, which is not supported")
        gradient = parameter.grad
        assert isinstance(gradient, DTensor)
        self.left -= self.padded[name]
        self.arrived[name] = self.times
        self.reducer.put(name, gradient.to_local())

    # --- inside

    def _open(self) -> None:
        """A pass begins. What .grad held before is set aside: only this backward's gradients are to be averaged."""
        self.open = True
        if self.auto is not None:
            self.auto.begin_pass()
        for name, parameter in self.parameters.items():
            self.held[name], parameter.grad = parameter.grad, None
        at_end_of_backward(self._finish)

    def _finish(self) -> None:
        """Backward has ended, on FSDP's part too: its own callback is older."""
        try:
            self._check_complete()
            if self.stream is not None:
                torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
            for name in self.parameters:
                if name not in self.arrived:
                    self.reducer.put(name, None)
            delivered: list[dict[str, Tensor | None]] = []
            self.reducer.end(delivered.append)
            self.reducer.thread.wait()
            for name, mean in delivered[0].items():
                self._store(name, mean)
        finally:
            self._reset()

    @torch.no_grad()
    def _store(self, name: str, mean: Tensor | None) -> None:
        """.grad ← what it held + mean; of a parameter that no replica used only what it held."""
        parameter, held = self.parameters[name], self.held[name]
        if mean is None:
            parameter.grad = held
            return
        if name not in self.arrived:  # but another replica used it
            parameter.grad = torch.zeros_like(parameter)
        gradient, times = parameter.grad, self.arrived.get(name, self.times)
        assert isinstance(gradient, DTensor)
        gradient.to_local().copy_(mean).mul_(times)
        if held is not None:
            parameter.grad = held.add_(gradient)

    def _check_complete(self) -> None:
        """Every value that FSDP reduced came here: a parameter thawed or replaced since would be averaged by nobody."""
        if self.left:
            raise UsageError(
                f"compress_fsdp: {self.left} values of a gradient are of parameters that it does not know: thaw or"
                " replace parameters before it is called"
            )

    def _reset(self) -> None:
        self.arrived: dict[str, int] = {}  # by parameter: what its mean is multiplied by
        self.held: dict[str, Any] = {}
        self.stream = None
        self.open, self.left, self.times = False, 0, 1


def compress_fsdp(
    model: nn.Module, wire: Wire | Collective | str | dict[str, Any] = "auto", *, replicas: Any, seed: int = 0,
    nonfinite: str = "nan", scaler: Any = None,
) -> CompressedFSDP:  # fmt: skip
    """Average this model's gradients between the replicas of a site, compressed. Call it on all ranks, after
    `fully_shard` over a 1-D mesh and before the first forward.

    replicas: the process group, or 1-D mesh, of the ranks that hold the same shard as this one, one a site.
    wire, scaler: as in compress_ddp.
    """
    parameters = sharded_parameters(model)
    group = replicas.get_group() if isinstance(replicas, DeviceMesh) else replicas
    mesh = site_mesh(parameters, group)
    wire = Wire.of(wire)
    mine = {"wire": repr(wire), "seed": repr(seed), "nonfinite": repr(nonfinite), "parameters": str(list(parameters))}
    check_agreement("compress_fsdp", mine, mesh.get_group())
    local = {name: nn.Parameter(p.to_local().detach()) for name, p in parameters.items()}
    weights = {f"the weights of {n}": repr(float(p.detach().sum(dtype=torch.float64))) for n, p in local.items()}
    check_agreement("compress_fsdp", {"shard": str(mesh.get_local_rank())} | weights, group)
    reducer = Reducer(
        local.items(), wire, group, seed=seed * mesh.size() + mesh.get_local_rank(), nonfinite=nonfinite,
        scale=scaler.get_scale if scaler is not None else None, beside=mesh.get_group(),
    )  # fmt: skip
    handle = CompressedFSDP(parameters, reducer, mesh, group, wire.auto)
    for name, parameter in parameters.items():
        parameter.register_post_accumulate_grad_hook(partial(handle.take, name))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(partial(handle.begin, module))
    return handle
