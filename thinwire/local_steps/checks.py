"""What is asked before the first step: do all ranks mean the same, and do they start from the same weights?"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from thinwire.collectives.groups import Group
from thinwire.config.local import Local, OuterFactory
from thinwire.data_parallel.parameters import describe_parameters
from thinwire.distributed.config_check import check_agreement, describe
from thinwire.errors import UsageError
from thinwire.local_steps.fragment import own_part


def check_trained(parameters: Mapping[str, Tensor], inner: object) -> None:
    """UsageError where nothing is trained, or by no optimiser, or by one of other parameters only."""
    if not parameters:
        raise UsageError("no parameter requires a gradient: there is nothing to average")
    if not isinstance(inner, Optimizer):
        raise UsageError(f"inner must be the optimiser of these parameters, not {type(inner).__name__}")
    if {id(p) for p in parameters.values()}.isdisjoint(id(p) for g in inner.param_groups for p in g["params"]):
        raise UsageError("inner must be the optimiser of these parameters: it has none of them")


def check_tokens(tokens: float) -> None:
    """UsageError where a step cannot weigh so much."""
    if not 0 <= tokens < math.inf:
        raise UsageError(f"step(tokens={tokens!r}): what a step weighs is 0 or more, and finite")


def check_alike(
    settings: Local, parameters: Mapping[str, Tensor], outer: OuterFactory | None, seed: int, groups: tuple[Group, ...]
) -> None:
    """UsageError on all ranks where some differ in settings, between sites or inside one, or sites in weights.

    settings, parameters, outer, seed: LocalSteps'. groups: of the sites; then, where there are any, of a site's parts
    and of its copies.
    """
    sites, parts, copies = groups
    how = describe(settings, "local") | {"seed": repr(seed), "outer": "by default" if outer is None else "given"}
    local = {name: own_part(p) for name, p in parameters.items()}
    weights = {f"the weights of {n}": repr(float(p.sum(dtype=torch.float64))) for n, p in local.items()}
    mine = how | describe_parameters(local) | weights
    check_agreement("LocalSteps", mine, sites)
    if parts is not None:
        check_agreement("LocalSteps, inside a site", how, parts)
    if copies is not None:
        check_agreement("LocalSteps, copies inside a site", mine, copies)


def shard_group(parameters: Mapping[str, Tensor]) -> ProcessGroup | None:
    """The process group that FSDP2 has sharded the parameters over; None: they are whole.

    UsageError where some are sharded and others not, or not over one 1-D mesh.
    """
    sharded = [p for p in parameters.values() if isinstance(p, DTensor)]
    if not sharded:
        return None
    meshes = {p.device_mesh for p in sharded}
    if len(sharded) < len(parameters) or len(meshes) > 1 or sharded[0].device_mesh.ndim != 1:
        raise UsageError(
            "LocalSteps: parameters must be whole, or all sharded over one 1-D mesh, that of a site "
            "(fully_shard(model, mesh=mesh['shard']))"
        )
    return meshes.pop().get_group()
