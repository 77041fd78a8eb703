"""Cases of compress_titan: what torchtitan asks of a model's spec, asked here by stand-ins for it (torchtitan itself is
not installed where tests run), beside plain HSDP and plain stages."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fsdp_support import gradients
from rank_cases import check, check_equal, check_ranks_agree, refused
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import thinwire as tw
from thinwire.parallel import titan


@dataclass
class Spec:
    parallelize_fn: Any
    pipelining_fn: Any
    post_optimizer_build_fn: Any


class Dims:
    """ParallelDims, as far as it is asked."""

    spmd_backend = titan.BACKEND

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    @property
    def dp_replicate_enabled(self) -> bool:
        return True

    def get_optional_mesh(self, dims: str | list[str]) -> DeviceMesh | None:
        return self.mesh[dims if isinstance(dims, str) else tuple(dims)]

    def get_mesh(self, dims: str | list[str]) -> DeviceMesh:
        mesh = self.get_optional_mesh(dims)
        assert mesh is not None
        return mesh


def parallelize(model: nn.Module, *, parallel_dims: Dims) -> nn.Module:
    names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    fully_shard(model[0], mesh=parallel_dims.get_mesh(names))
    return fully_shard(model, mesh=parallel_dims.get_mesh(names))


def pipeline(model: nn.Module, *, parallel_dims: Dims, parallelize_fn: Any) -> tuple:
    """Two stages of the same form, two micro-batches."""
    group = parallel_dims.get_mesh("pp")
    home: Any = sys.modules[titan.STAGES]
    stage = home.PipelineStage(model, group.get_local_rank(), 2, torch.device("cpu"), group=group.get_group())
    stage.submod = parallelize_fn(model, parallel_dims=parallel_dims)
    schedule = Schedule1F1B(stage, 2, loss_fn=lambda out, target: ((out - target) ** 2).mean(), scale_grads=False)
    return schedule, [stage.submod], stage.is_first, stage.is_last


@contextmanager
def torchtitan() -> Any:
    home = ModuleType(titan.STAGES)
    home.PipelineStage = PipelineStage  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, {titan.STAGES: home}):
        yield
        check(home.PipelineStage is PipelineStage, "torchtitan's own stage was not put back")


def config(wire: Any = None) -> Any:
    made = SimpleNamespace(
        parallelism=SimpleNamespace(), training=SimpleNamespace(), model_spec=Spec(parallelize, pipeline, None)
    )
    return made if wire is None else tw.parallel.compress_titan(made, wire)


def block(seed: int) -> nn.Module:
    g = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=g) * 0.1
    return model


def rows(step: int, of: int) -> Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + of))


def replicas(wire: Any = None) -> tuple[dict[str, Tensor | None], Any]:
    """Gradients of two steps on two sites of two shards, and the spec."""
    dims = Dims(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "fsdp")))
    spec = config(wire).model_spec
    model = spec.parallelize_fn(block(0), parallel_dims=dims)
    if spec.post_optimizer_build_fn is not None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        spec.post_optimizer_build_fn([optimizer], [model], dims)
    for step in range(2):
        (model(rows(step, dist.get_rank())) ** 2).mean().backward()
    found = gradients(model)
    if wire is not None:
        optimizer.step()
        (model(torch.full((8, 64), torch.inf)) ** 2).mean().backward()
        with refused("this step was rolled back", RuntimeError):
            optimizer.step()
    return found, spec


def replicas_are_as_in_plain_hsdp() -> None:
    plain, _ = replicas()
    exact, _ = replicas("off")
    check_equal("off", exact, plain, 1e-6)
    _, spec = replicas("max")
    saved = spec.parallelize_fn.__self__.handles[0].summary()
    check(saved.ratio > 6, f"max: {saved}")


def staged(wire: Any = None) -> tuple[dict[str, Tensor | None], Any]:
    """Gradients of two steps of a pipeline of two stages, twice, and the spec."""
    dims = Dims(init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pp", "dp_replicate", "fsdp")))
    spec = config(wire).model_spec
    with torchtitan():
        schedule, parts, first, last = spec.pipelining_fn(
            block(dims.get_mesh("pp").get_local_rank()), parallel_dims=dims, parallelize_fn=spec.parallelize_fn
        )
    if spec.post_optimizer_build_fn is not None:
        spec.post_optimizer_build_fn([], parts, dims)
    replica = dims.get_mesh("dp_replicate").get_local_rank()
    for step in range(2):
        given = (rows(step, replica),) if first else ()
        schedule.step(*given, **({"target": rows(step, 50 + replica), "losses": []} if last else {}))
    check_ranks_agree("replicas", gradients(parts[0]), dims.get_mesh("dp_replicate").get_group())
    return gradients(parts[0]), spec


def stages_and_replicas_are_as_in_plain_torch() -> None:
    plain, _ = staged()
    exact, _ = staged("off")
    check_equal("off", exact, plain, 1e-6)
    _, spec = staged("scratch")
    made = spec.parallelize_fn.__self__
    for saved in (made.handles[0].summary(), made.pipeline.summary()):
        check(saved.ratio > 3, f"scratch: {saved}")
    with refused("torchtitan's samples have no ids"):
        staged("max")
    with refused("torchtitan gives later stages no token ids"):
        staged("scratch-tokens")


CASES = [replicas_are_as_in_plain_hsdp, stages_and_replicas_are_as_in_plain_torch]
