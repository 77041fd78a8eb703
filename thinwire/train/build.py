"""From run.toml to what one rank trains with. Everything that can be checked is checked before anything is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.collectives import Dense
from thinwire.config.stages import SLACK, chosen_stages
from thinwire.config.wire import Reduction, Wire
from thinwire.data_parallel.precompile import try_exchange
from thinwire.distributed.config_check import check_agreement
from thinwire.distributed.precompile import precompile
from thinwire.errors import UsageError
from thinwire.pipeline.message_choice import Plan
from thinwire.pipeline.precompile import try_link
from thinwire.train.config.sections import TrainConfig
from thinwire.train.data.batches import Batches
from thinwire.train.data.samples import Samples, make_samples
from thinwire.train.data.tokenizer import open_tokenizer
from thinwire.train.engine import Alone, Piped
from thinwire.train.learning_rate import total_steps
from thinwire.train.mesh import Mesh, make_mesh
from thinwire.train.model import tensor_parallel as tensor
from thinwire.train.model.blueprint import Blueprint, build_stages, named_parameters, plan_model
from thinwire.train.model.families import read_supported
from thinwire.train.model.stage import Stage
from thinwire.train.tune.auto import Decision, check_auto, decide, forms, is_asked
from thinwire.train.tune.layer_times import cut_by_time
from thinwire.train.tune.selection import select, with_fitting_rank
from thinwire.train.update import Update


@dataclass(frozen=True)
class Parts:
    """What one rank trains with: configuration, groups, its stages and parameters, data, and the number of steps."""

    config: TrainConfig
    mesh: Mesh
    blueprint: Blueprint
    stages: Mapping[int, Stage]
    named: dict[str, nn.Parameter]
    decision: Decision | None  # of the planner, where the wire leaves something to it
    engine: Alone | Piped
    update: Update
    samples: Samples
    batches: Batches
    steps: int

    def about(self) -> dict[str, Any]:
        """The first event of a run, "run": the name of its wire, mesh, wire, sizes."""
        mesh = self.config.mesh
        given = self.config.wire
        wire = given if self.decision is None else self.decision.wire
        name = given.get("preset", "auto" if given.get("auto") else "custom" if given else "off")
        return {
            "name": str(name),
            "mesh": {k: getattr(mesh, k) for k in ("dp", "pp", "tp", "schedule", "microbatches")},
            "wire": dict(wire), "parameters": sum(map(torch.Size.numel, self.blueprint.shapes.values())),
            "samples": len(self.samples.train), "steps": self.steps,
        }  # fmt: skip


@dataclass(frozen=True)
class Checked:
    """What is known, and has been checked, before ranks communicate."""

    wire: Wire
    samples: Samples
    blueprint: Blueprint


def check(config: TrainConfig) -> Checked:
    """Check wire, data, and that the model can be split as the mesh says; mistakes are UsageErrors."""
    wire = Wire.of(config.wire)
    check_auto(wire)
    if config.mesh.ahead > 1 and is_asked(wire):
        raise UsageError(
            f"[mesh] ahead = {config.mesh.ahead}: auto, critical and slack decide for torch's own order; take 1"
        )
    source = config.model.path or config.model.config
    if source:
        read_supported(source)  # before its tokenizer, whose faults would hide that the model is of another type
    tokenizer = open_tokenizer(config.data.tokenizer, config.model.path)
    samples = make_samples(config.data, tokenizer)
    Batches(samples, config.optim.batch, config.data.seed, 0, config.mesh.dp)
    stages = len(config.mesh.plan().rank_of)
    if wire.gradient is not None and wire.gradient.stages != SLACK:
        chosen_stages(wire.gradient.stages, stages)
    blueprint = plan_model(config.model, stages, tokenizer.size, config.data.seq_len)
    tensor.check(blueprint.config, config.model.lora is not None, config.mesh.tp)
    return Checked(_with_embedding(wire, config, blueprint), samples, blueprint)


def _with_embedding(wire: Wire, config: TrainConfig, blueprint: Blueprint) -> Wire:
    """Copies of a tied embedding that are split over tensor-parallel ranks need one exchange per slice (fused)."""
    rank_of = config.mesh.plan().rank_of
    apart = blueprint.config.tie_word_embeddings and rank_of[0] != rank_of[-1]
    if config.mesh.tp == 1 or not apart:
        return wire
    given = wire.embedding or Reduction(Dense(), sync="fused")
    if given.sync != "fused":
        raise UsageError(f"[wire.embedding] sync = {given.sync!r}: a tied model with tp = {config.mesh.tp} needs fused")
    return replace(wire, embedding=given)


def build(config: TrainConfig, checked: Checked, say: Callable[[str], None], kept: Tensor | None = None) -> Parts:
    """What this rank trains with; called by all ranks together.

    checked: what `check` returned. say: called with a line for the user. kept: the decision in a checkpoint.
    """
    samples = checked.samples
    mesh = make_mesh(config.mesh, config.run.device)
    check_agreement("thinwire train", {"the configuration": repr(config), "the data": samples.digest}, None)
    blueprint = cut_by_time(config, checked.blueprint, say)
    batches = Batches(samples, config.optim.batch, config.data.seed, mesh.replica, config.mesh.dp)
    mine = [stage for stage, rank in enumerate(config.mesh.plan().rank_of) if rank == mesh.position]
    cut = mesh.tp if config.mesh.tp > 1 else None
    stages = build_stages(blueprint, mine, config.run.seed, config.run.device, config.run.recompute, cut)
    named = tensor.local_parameters(named_parameters(stages))
    wire = with_fitting_rank(checked.wire, named, say)
    _precompile(config, wire, stages, named, say)
    decision = decide(config, wire, mesh, stages, named, kept, say)
    if decision is not None and wire.auto:
        wire = _with_embedding(with_fitting_rank(Wire.of(decision.wire), named, say), config, blueprint)
    plan = Plan(config.mesh.schedule, sends=None if decision is None else decision.picked())
    engine: Alone | Piped = (
        Alone(config, stages[0])
        if config.mesh.pp == 1
        else Piped(config, wire, plan, mesh, stages, len(samples.train), say)
    )
    update = Update(config, select(config, wire, decision, stages, named), mesh, named, _tied(stages))
    steps = total_steps(config.optim, batches.steps_per_epoch)
    return Parts(config, mesh, blueprint, stages, named, decision, engine, update, samples, batches, steps)


def _precompile(
    config: TrainConfig, wire: Wire, stages: Mapping[int, Stage], named: Mapping[str, nn.Parameter],
    say: Callable[[str], None],
) -> None:  # fmt: skip
    """Compile all kernels that the run may need together, before anything is measured or timed."""
    if config.mesh.ranks == 1:
        return
    kinds = forms(config, wire)
    some = next(iter(stages.values()))
    links = [link for way in ("forward", "backward") for link in kinds[way]] if config.mesh.pp > 1 else []
    row = config.data.seq_len, some.config.hidden_size // config.mesh.tp
    shapes = {name: tuple(p.shape) for name, p in named.items()}
    like = next(some.parameters())
    calls = [partial(try_link, link, row, like.dtype) for link in links]
    for reduction in (*kinds["gradient"], *kinds["embedding"]):
        if reduction is not None:
            calls.append(partial(try_exchange, reduction, shapes, like.dtype))
    precompile("the wire", calls, like, say)


def _tied(stages: Mapping[int, Stage]) -> str | None:
    """The name of this rank's copy of a tied embedding, where another rank has one too."""
    return next((stage.tied for stage in stages.values() if stage.tied), None)
