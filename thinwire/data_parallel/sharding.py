"""What `compress_fsdp` asks of a model: every parameter that trains is sharded over one 1-D mesh, that of a site."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from thinwire.errors import UsageError
from thinwire.torch_private.fsdp import has_gradient_hook


def sharded_parameters(model: nn.Module) -> dict[str, DTensor]:
    """name → parameter, of those that train. UsageError where one is not sharded over a 1-D mesh, or is hooked."""
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        raise UsageError(f"compress_fsdp wants a model after fully_shard(model, mesh=…), not {type(model).__name__}")
    found: dict[str, DTensor] = {}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if not isinstance(p, DTensor) or p.is_meta:
            raise UsageError(
                f"compress_fsdp: {name} is not sharded: call it after fully_shard of all that trains, with real"
                " weights, and before the first forward"
            )
        if p.device_mesh.ndim != 1 or not p.placements[0].is_shard():
            raise UsageError(
                f"compress_fsdp: {name} is placed as {p.placements}: shard it over a 1-D mesh of one site"
                " (fully_shard(…, mesh=mesh['shard'])), replicas=… is the other dimension"
            )
        if has_gradient_hook(p):
            raise UsageError(
                f"compress_fsdp: {name} has a post-accumulate-grad hook already: compress_fsdp's own (call it once"
                " per model), or one that would see gradients of one site"
            )
        found[name] = p
    if not found:
        raise UsageError("compress_fsdp: no parameter requires a gradient: there is nothing to reduce")
    return found


def site_mesh(parameters: dict[str, DTensor], replicas: dist.ProcessGroup | None) -> DeviceMesh:
    """The mesh that all parameters are sharded over. Its ranks and the replicas have this rank in common, and no other;
    None: replicas are of another world.

    UsageError otherwise.
    """
    meshes = {p.device_mesh for p in parameters.values()}
    if len(meshes) > 1:
        raise UsageError(f"compress_fsdp: the parameters are sharded over {len(meshes)} meshes; one is supported")
    mesh = meshes.pop()
    if replicas is None:
        return mesh
    site, others = set(mesh.mesh.flatten().tolist()), set(dist.get_process_group_ranks(replicas))
    if site & others != {dist.get_rank()}:
        raise UsageError(
            f"compress_fsdp: replicas = {sorted(others)}: must hold this rank, {dist.get_rank()}, and no other of its"
            f" site, {sorted(site)}"
        )
    return mesh


def padded_numel(parameter: DTensor) -> int:
    """How many values of FSDP's flat reduced gradient are its own: every rank has as many rows as the first."""
    placement = parameter.placements[0]
    assert isinstance(placement, Shard)
    rows = parameter.shape[placement.dim]
    return -(-rows // parameter.device_mesh.size()) * (parameter.numel() // rows) if rows else 0
