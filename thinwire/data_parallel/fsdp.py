"""FSDP2 inside sites, compressed averaging between them:

    fully_shard(model, mesh=sites["shard"])
    handle = tw.parallel.compress_fsdp(model, "max", replicas=sites["replica"])

`fully_shard` over a 1-D mesh reduce-scatters gradients within a site; what HSDP would all-reduce between the replicas
of a site goes through the wire instead. FSDP's all-reduce hook gets one flat, padded tensor per group of
parameters, of those that had a gradient, without names: here it only says that a reduction begins. The gradients are
taken one by one from post-accumulate-grad hooks, which FSDP calls next. So units, residuals, exclusions and low rank
know parameters, in the shape of this rank's shard. The means are added to `.grad` when backward ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from thinwire.collectives.groups import elastic
from thinwire.collectives.members import Members
from thinwire.config.wire import Wire, WireLike
from thinwire.data_parallel.checkpoint import read_state
from thinwire.data_parallel.handle import Handle, LossScaler
from thinwire.data_parallel.reducer import Reducer
from thinwire.data_parallel.sharding import padded_numel, sharded_parameters, site_mesh
from thinwire.distributed.config_check import check_agreement
from thinwire.errors import UsageError
from thinwire.torch_private.fsdp import at_end_of_backward, reduction_of


@dataclass
class Backward:
    """One backward pass, from FSDP's first reduction to the end of backward."""

    held: dict[str, Tensor | None]  # what .grad held before it
    summed: dict[str, bool] = field(default_factory=dict)  # of parameters that arrived: is the sum wanted, not the mean
    sums: bool = False  # of the parameter group that FSDP hands over now
    values_left: int = 0  # of that group, not handed over yet
    stream: torch.cuda.Stream | None = None  # the one that FSDP hands gradients over on


class CompressedFSDP(Handle):
    """The handle of a compressed FSDP model, made by `compress_fsdp`.

    parameters: the sharded ones that train, by name. reducer: of this rank's shards of them. mesh: of the shards of a
    site. replicas: the process group, or quorum, of the ranks that hold the same shard. auto: measure, and stay exact
    where that is faster.
    """

    def __init__(
        self, parameters: dict[str, DTensor], reducer: Reducer, mesh: DeviceMesh,
        replicas: dist.ProcessGroup | Members, auto: bool,
    ) -> None:  # fmt: skip
        super().__init__(reducer, auto)
        self.parameters = parameters
        self.replicas = replicas
        self.padded = {name: padded_numel(p) for name, p in parameters.items()}
        self.shard = f"shard{mesh.get_local_rank()}of{mesh.size()}"
        self.backward: Backward | None = None
        self.ends_later = False  # in outside_backward

    @contextmanager
    def outside_backward(self) -> Iterator[None]:
        """Bracket a `schedule.step` of torch's pipelining: it lets FSDP reduce after backward, not within it. The means
        are in `.grad` when the bracket ends."""
        self.ends_later = True
        try:
            yield
            if self.backward is not None:
                self._end_backward()
        finally:
            self.ends_later, self.backward = False, None

    @contextmanager
    def step(self, ids: Sequence[int] | None = None, train: bool = True) -> Iterator[Self]:
        """As Handle.step; a backward that an exception broke off is forgotten."""
        try:
            with super().step(ids, train):
                yield self
        finally:
            self.backward = None

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """This rank's, under the names of its shard and of its replica of it."""
        return {self.shard: self.reducer.state_dict()}

    def load_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        """What state_dict gave, or what `read_state` read. UsageError where it is of another shard."""
        if self.shard not in state:
            raise UsageError(f"this rank is {self.shard}, the state is of {', '.join(state) or 'none'}")
        self._load(state[self.shard])

    def read_state(self, path: str | PathLike[str], prefix: str) -> dict[str, dict[str, Tensor]]:
        """What load_state_dict needs, from dcp.save({prefix: handle.state_dict(), …}, checkpoint_id=path).

        path: the checkpoint's folder. prefix: the state's name in it.
        """
        return {self.shard: read_state(path, f"{prefix}.{self.shard}", self.replicas)}

    # --- called by FSDP during backward

    def begin_group(self, module: FSDPModule, reduced: Tensor) -> None:
        """FSDP has reduce-scattered a parameter group, and will hand over its gradients next."""
        reduction = reduction_of(module)
        if not reduction.between_sites:
            raise UsageError("compress_fsdp: set_requires_all_reduce(False): use set_requires_gradient_sync(False)")
        if self.backward is None:
            self.backward = self._begin_backward()
        self._check_complete(self.backward)
        self.backward.values_left = reduced.numel()
        self.backward.sums = reduction.divide_factor is not None
        if reduced.is_cuda:
            self.backward.stream = torch.cuda.current_stream(reduced.device)

    def put_gradient(self, name: str, parameter: DTensor) -> None:
        """One parameter's gradient, the mean of this site (or its sum, divided as the user said)."""
        backward, gradient = self.backward, parameter.grad
        assert backward is not None and isinstance(gradient, DTensor)
        if name in backward.summed:
            raise UsageError(f"compress_fsdp: FSDP reduced {name} twice in one backward, which is not supported")
        backward.values_left -= self.padded[name]
        backward.summed[name] = backward.sums
        self.reducer.put(name, gradient.to_local())

    # --- inside

    def _begin_backward(self) -> Backward:
        """What .grad held before is set aside: only this backward's gradients are to be averaged."""
        if self.auto is not None:
            self.auto.begin_pass()
        held = {name: parameter.grad for name, parameter in self.parameters.items()}
        for parameter in self.parameters.values():
            parameter.grad = None
        if not self.ends_later:
            at_end_of_backward(self._end_backward)
        return Backward(held)

    def _end_backward(self) -> None:
        """Backward has ended, on FSDP's part too: its own callback is older."""
        backward, self.backward = self.backward, None
        assert backward is not None
        self._check_complete(backward)
        if backward.stream is not None:
            torch.cuda.current_stream(backward.stream.device).wait_stream(backward.stream)
        self.reducer.put_all(dict.fromkeys(name for name in self.parameters if name not in backward.summed))
        for name, mean in self.reducer.collect().items():
            self._store(backward, name, mean)

    @torch.no_grad()
    def _store(self, backward: Backward, name: str, mean: Tensor | None) -> None:
        """.grad ← what it held + mean; of a parameter that no replica used only what it held."""
        parameter, held = self.parameters[name], backward.held[name]
        if mean is None:
            parameter.grad = held
            return
        if name not in backward.summed:  # but another replica used it
            parameter.grad = torch.zeros_like(parameter)
        gradient, sums = parameter.grad, backward.summed.get(name, backward.sums)
        assert isinstance(gradient, DTensor)
        gradient.to_local().copy_(mean).mul_(self.reducer.size if sums else 1)
        if held is not None:
            parameter.grad = held.add_(gradient)

    def _check_complete(self, backward: Backward) -> None:
        """Every value that FSDP reduced came here: a parameter thawed or replaced since would be averaged by nobody."""
        if backward.values_left:
            raise UsageError(
                f"compress_fsdp: {backward.values_left} values of a gradient are of parameters that it does not know:"
                " thaw or replace parameters before it is called"
            )


def compress_fsdp(
    model: nn.Module, wire: WireLike = "auto", *, replicas: dist.ProcessGroup | DeviceMesh | Members, seed: int = 0,
    nonfinite: str = "nan", scaler: LossScaler | None = None,
) -> CompressedFSDP:  # fmt: skip
    """Average this model's gradients between the replicas of a site, compressed. Call it on all ranks, after
    `fully_shard` over a 1-D mesh and before the first forward.

        fully_shard(model, mesh=mesh["shard"])
        handle = tw.parallel.compress_fsdp(model, "max", replicas=mesh["replica"])

    model: after every `fully_shard`, with real weights that are equal on all replicas.
    wire, nonfinite, scaler: as in compress_ddp.
    replicas: the process group, or 1-D mesh, of the ranks that hold the same shard as this one, one per site. Where
    sites come and go: a tw.elastic.Quorum with the site's ranks `inside`.
    seed: of stochastic rounding and of random choices, equal on all ranks; shards derive their own from it.

    UsageError where parameters that train are not sharded over one 1-D mesh, `replicas` are not this shard's, an
    argument is not allowed, or ranks differ in configuration or weights.
    """
    parameters = sharded_parameters(model)
    group = replicas.get_group() if isinstance(replicas, DeviceMesh) else replicas
    quorum = elastic(group)
    mesh = site_mesh(parameters, None if isinstance(group, Members) else group)
    wire = Wire.of(wire)
    mine = {
        "wire": repr(wire), "seed": repr(seed), "nonfinite": repr(nonfinite),
        "scaler": "none" if scaler is None else "one", "parameters": str(list(parameters)),
    }  # fmt: skip
    check_agreement("compress_fsdp", mine, mesh.get_group())
    local = {name: nn.Parameter(p.to_local().detach()) for name, p in parameters.items()}
    weights = {f"the weights of {n}": repr(float(p.detach().sum(dtype=torch.float64))) for n, p in local.items()}
    if quorum is None:  # a site of a quorum is asked when it comes, and takes the others' weights
        check_agreement("compress_fsdp", {"shard": str(mesh.get_local_rank())} | weights, group)
    reducer = Reducer(
        local.items(), wire, group, seed=seed * mesh.size() + mesh.get_local_rank(), nonfinite=nonfinite,
        scale=None if scaler is None else scaler.get_scale, shard_group=mesh.get_group() if quorum is None else None,
    )  # fmt: skip
    handle = CompressedFSDP(parameters, reducer, mesh, group, wire.auto)
    for name, parameter in parameters.items():
        parameter.register_post_accumulate_grad_hook(partial(handle.put_gradient, name))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(partial(handle.begin_group, module))
    return handle
