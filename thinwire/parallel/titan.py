"""torchtitan: what its replicas and its pipeline stages send, compressed, by one line in a configuration.

    def llama3_8b_thin():
        return tw.parallel.compress_titan(llama3_8b(), "safe")      # --module MODULE --config llama3_8b_thin

The three functions of torchtitan's ModelSpec are wrapped, which are what it asks for a model's parallelism:
- `parallelize_fn` sees one site: FSDP shards over the site's ranks, and does not all-reduce between replicas.
- `pipelining_fn` makes CompressedStages, and brackets every step of the schedule.
- `post_optimizer_build_fn`, called when weights are there, hands the replicas' gradients to `compress_fsdp`.
torchtitan is not imported before one of its configurations is given.
"""

from __future__ import annotations

import atexit
import copy
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn

from thinwire.config.wire import Wire, WireLike
from thinwire.data_parallel.fsdp import CompressedFSDP, compress_fsdp
from thinwire.distributed.summary import Summary
from thinwire.errors import UsageError
from thinwire.pipeline.pipeline import Pipeline
from thinwire.pipeline.stage import CompressedStage

STAGES = "torchtitan.distributed.pipeline_parallel"  # the module that makes stages, by its name PipelineStage
BACKEND = "partial_dtensor"  # the one of torchtitan's three in which FSDP may shard without knowing of replicas
REPLICAS = "dp_replicate"  # torchtitan's name of the mesh dimension


class TitanWire:
    """The wrapped functions of one ModelSpec, and what they made.

    spec: torchtitan's ModelSpec. wire: of a run without sample ids. seed: the run's, equal on all ranks.
    """

    def __init__(self, spec: Any, wire: Wire, seed: int) -> None:
        self.original = spec
        self.wire = wire
        self.seed = seed
        self.handles: list[CompressedFSDP] = []
        self.pipeline: Pipeline | None = None

    def spec(self) -> Any:
        """The ModelSpec with its functions wrapped."""
        return replace(
            self.original, parallelize_fn=self.parallelize, post_optimizer_build_fn=self.attach,
            pipelining_fn=None if self.original.pipelining_fn is None else self.make_stages,
        )  # fmt: skip

    def parallelize(self, model: nn.Module, *, parallel_dims: Any, **named: Any) -> nn.Module:
        """torchtitan's own, of one site."""
        if parallel_dims.spmd_backend != BACKEND:
            raise UsageError(
                f"compress_titan: spmd_backend = {parallel_dims.spmd_backend}: must be {BACKEND}"
                f" (--parallelism.spmd_backend {BACKEND}): the others place parameters on replicas and shards at once"
            )
        sharded: nn.Module = self.original.parallelize_fn(model, parallel_dims=one_site(parallel_dims), **named)
        return sharded

    def make_stages(self, model: nn.Module, **named: Any) -> tuple[Any, list[nn.Module], bool, bool]:
        """torchtitan's own schedule over stages of ours."""
        link = self.wire.forward
        if link is not None and link.remembers_samples:
            raise UsageError(
                "compress_titan: this wire remembers samples along the pipeline, and torchtitan's samples have no ids:"
                ' take "safe" or "scratch"'
            )
        if self.wire.needs_tokens:
            raise UsageError(
                "compress_titan: this wire has token means along the pipeline, and torchtitan gives later stages no"
                ' token ids: take "scratch"'
            )
        make = functools.partial(CompressedStage, wire=self.wire, seed=self.seed)
        with stages_made_by(make) as stages:
            schedule, parts, first, last = self.original.pipelining_fn(model, **named)
        self.pipeline = Pipeline(stages)
        plain = schedule.step

        def step(*arguments: Any, **more: Any) -> Any:
            assert self.pipeline is not None
            with self.pipeline.step(), ExitStack() as reductions:
                for handle in self.handles:
                    reductions.enter_context(handle.outside_backward())
                return plain(*arguments, **more)

        schedule.step = step
        return schedule, parts, first, last

    def attach(self, optimizers: Any, parts: Sequence[nn.Module], parallel_dims: Any) -> None:
        """Compress between replicas; the parts' weights are real, and there is no step yet."""
        if self.original.post_optimizer_build_fn is not None:
            self.original.post_optimizer_build_fn(optimizers, parts, parallel_dims)
        if parallel_dims.dp_replicate_enabled:
            group = parallel_dims.get_mesh(REPLICAS)
            self.handles = [
                compress_fsdp(part, self.wire, replicas=group, seed=self.seed + number)
                for number, part in enumerate(parts)
            ]
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self.refuse_lost_step)
        if dist.get_rank() == 0:
            atexit.register(self.tell)

    def refuse_lost_step(self, *_: Any) -> None:
        """RuntimeError where the step was rolled back: its gradients are NaN, and torchtitan would apply them."""
        lost = [handle.skipped for handle in self.handles]
        if any(lost) or (self.pipeline is not None and self.pipeline.skipped):
            raise RuntimeError(
                "compress_titan: this step was rolled back (NaN, Inf or a damaged message; the log has the reason), and"
                " torchtitan cannot leave out a step: go on from its last checkpoint"
            )

    def tell(self) -> None:
        """What was saved on this rank, a line per kind of traffic."""
        found: dict[str, Summary] = {f"replicas, part {n}": h.summary() for n, h in enumerate(self.handles)}
        if self.pipeline is not None:
            found["pipeline"] = self.pipeline.summary()
        for name, summary in found.items():
            print(f"thinwire, {name}: {summary}", flush=True)


def compress_titan(config: Any, wire: WireLike = "safe", *, seed: int = 0) -> Any:
    """A torchtitan configuration whose replicas and pipeline stages send compressed; the configuration itself. Its
    parallelism.spmd_backend becomes "partial_dtensor", and CUDA graphs are switched off.

    config: a `Trainer.Config`, from a function of a config_registry.
    wire: as in compress_ddp; with a pipeline one that remembers no samples ("safe", "scratch", or a table).
    seed: of stochastic rounding and of random choices, equal on all ranks.

    UsageError where it is no such configuration, or the wire needs sample ids.
    """
    spec = getattr(config, "model_spec", None)
    if not hasattr(spec, "parallelize_fn"):
        raise UsageError(
            f"compress_titan wants a torchtitan Trainer.Config with its model_spec, not {type(config).__name__}"
        )
    config.parallelism.spmd_backend = BACKEND
    config.training.disable_cuda_graphs = True  # frames are exchanged from another thread, which a graph cannot hold
    config.model_spec = TitanWire(spec, Wire.of(wire), seed).spec()
    return config


def one_site(parallel_dims: Any) -> Any:
    """These ParallelDims as one site sees them: without the dimension of replicas. Meshes are shared."""
    parallel_dims.get_optional_mesh(REPLICAS)  # they are built before they are shared
    known = type(parallel_dims)

    class OneSite(known):  # type: ignore[misc, valid-type]
        @property
        def dp_replicate_enabled(self) -> bool:
            return False

        def get_optional_mesh(self, dims: str | list[str], **named: Any) -> Any:
            return (
                None
                if REPLICAS in ([dims] if isinstance(dims, str) else dims)
                else known.get_optional_mesh(self, dims, **named)
            )

    view = copy.copy(parallel_dims)
    view.__class__ = OneSite
    return view


@contextmanager
def stages_made_by(make: Callable[..., CompressedStage]) -> Iterator[list[CompressedStage]]:
    """While this lasts torchtitan's stages are made by this; gives those that were made."""
    home = importlib.import_module(STAGES)
    made: list[CompressedStage] = []

    def stage(*arguments: Any, **named: Any) -> CompressedStage:
        made.append(make(*arguments, **named))
        return made[-1]

    original, home.PipelineStage = home.PipelineStage, stage  # type: ignore[attr-defined]
    try:
        yield made
    finally:
        home.PipelineStage = original  # type: ignore[attr-defined]
