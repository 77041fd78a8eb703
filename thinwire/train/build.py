"""From run.toml to what one rank trains with. Everything that can be checked is checked before anything is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.collectives import Dense
from thinwire.config.local import Local
from thinwire.config.presets import written_out
from thinwire.config.stages import SLACK, chosen_stages
from thinwire.config.wire import Link, Reduction, Wire
from thinwire.data_parallel.precompile import try_exchange
from thinwire.data_parallel.tied_rows import TiedRows
from thinwire.distributed.config_check import check_agreement
from thinwire.distributed.precompile import precompile
from thinwire.distributed.streams import describe_streams, measure_streams
from thinwire.errors import UsageError
from thinwire.memory import Delta, Plain
from thinwire.pipeline.counters import ONCE
from thinwire.pipeline.message_choice import Plan
from thinwire.pipeline.precompile import try_link
from thinwire.planner.settings import read_wire
from thinwire.planner.sizes import rows_pay
from thinwire.train.config.sections import TrainConfig
from thinwire.train.data.batches import Batches
from thinwire.train.data.examples import Examples, make_examples
from thinwire.train.data.samples import Samples, make_samples
from thinwire.train.data.tokenizer import Tokenizer, open_tokenizer
from thinwire.train.engine import Alone, Piped
from thinwire.train.learning_rate import total_steps
from thinwire.train.mesh import Mesh, make_mesh
from thinwire.train.model import tensor_parallel as tensor
from thinwire.train.model.blueprint import Blueprint, build_stages, named_parameters, names_by_stage, plan_model
from thinwire.train.model.encoder import check_schedule
from thinwire.train.model.families import Classes, read_supported
from thinwire.train.model.stage import Stage
from thinwire.train.tune.auto import Decision, check_auto, decide, forms, is_asked, is_kept
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
    samples: Samples | Examples
    batches: Batches
    steps: int

    def close(self) -> None:
        """Nothing more is trained with it: free its threads, groups and files."""
        self.engine.close()
        self.update.close()

    @property
    def cut(self) -> Tensor:
        """Which layers are on which stage: the state of a boundary can only be used under the same split."""
        mesh = self.config.mesh
        return torch.tensor([mesh.pp, mesh.tp, *(run.stop for run in self.blueprint.layers), *mesh.plan().rank_of])

    def about(self) -> dict[str, Any]:
        """The first event of a run, "run": the name of its wire, mesh, wire, sizes."""
        mesh = self.config.mesh
        given = self.config.wire
        wire = given if self.decision is None else self.decision.wire
        name = given.get("preset", "auto" if given.get("auto") else "custom" if given else "off")
        sites = {"sites": mesh.sites} if mesh.sites > 1 else {}
        return {
            "name": str(self.config.local.get("preset", "local steps") if sites else name),
            "mesh": sites | {k: getattr(mesh, k) for k in ("dp", "pp", "tp", "schedule", "microbatches")},
            **({"local": dict(self.config.local)} if sites else {}),
            "wire": dict(wire), "parameters": sum(map(torch.Size.numel, self.blueprint.shapes.values())),
            "samples": len(self.samples.train), "steps": self.steps,
            **({"labels": self.samples.names} if isinstance(self.samples, Examples) else {}),
        }  # fmt: skip


@dataclass(frozen=True)
class Checked:
    """What is known, and has been checked, before ranks communicate."""

    wire: Wire
    samples: Samples | Examples
    blueprint: Blueprint


def check(config: TrainConfig) -> Checked:
    """Check wire, data, and that the model can be split as the mesh says; mistakes are UsageErrors."""
    wire = Wire.of(config.wire)
    check_auto(wire, config.mesh.sites)
    if config.local:
        Local.read(config.local)
    source = config.model.path or config.model.config
    kind = config.task.kind
    found = read_supported(source, kind) if source else None  # before its tokenizer, whose faults would hide its type
    tokenizer = open_tokenizer(config.data.tokenizer, config.model.path, ends=kind == "causal")
    samples = _samples(config, tokenizer, found)
    batches = Batches(samples, config.optim.batch, config.data.seed, 0, config.mesh.replicas)
    wire = wire.with_epoch(batches.steps_per_epoch, config.optim.accumulate)
    stages = len(config.mesh.plan().rank_of)
    if wire.gradient is not None and wire.gradient.stages != SLACK:
        chosen_stages(wire.gradient.stages, stages)
    classes = Classes(samples.names, samples.pad) if isinstance(samples, Examples) else None
    blueprint = plan_model(config.model, stages, tokenizer.size, config.data.seq_len, classes)
    tensor.check(blueprint.config, config.model.lora is not None, config.mesh.tp)
    check_schedule(blueprint.family, config.mesh.schedule)
    mesh, hidden = config.mesh, blueprint.hidden
    config.boundary.check(mesh.pp, mesh.tp, hidden, config.model.lora is not None, is_asked(wire))
    return Checked(_with_embedding(wire, config, blueprint), samples, blueprint)


def _samples(config: TrainConfig, tokenizer: Tokenizer, found: Any) -> Samples | Examples:
    """What is trained on, as `[task]` says. found: transformers' configuration of a checkpoint, None without one."""
    if config.task.kind == "causal":
        return make_samples(config.data, tokenizer)
    known = [] if found is None else [name for _, name in sorted(found.id2label.items())]
    return make_examples(config.data, tokenizer, config.task.labels, known)


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


def _with_streams(wire: Wire, mesh: Mesh, say: Callable[[str], None]) -> Wire:
    """With streams = "auto" as many as a site's ranks measure. That changes no bit, so no checkpoint has it."""
    if wire.streams != "auto":
        return wire
    count, rates = measure_streams(mesh.inside)
    if rates:
        say(describe_streams(count, rates))
    return replace(wire, streams=count)


def used_rows(config: TrainConfig, blueprint: Blueprint, samples: Samples | Examples) -> int:
    """How many rows of the embedding a replica's first batch uses at most; 0 where there are no two copies that train.
    The same on all ranks, also of a resumed run."""
    rank_of = config.mesh.plan().rank_of
    if not blueprint.config.tie_word_embeddings or rank_of[0] == rank_of[-1] or config.model.lora is not None:
        return 0
    replicas = config.mesh.replicas
    batches = [Batches(samples, config.optim.batch, config.data.seed, r, replicas) for r in range(replicas)]
    return max(len(one.peek_inputs().unique()) for one in batches)


def _pays(table: Mapping[str, Any], config: TrainConfig, blueprint: Blueprint, used: int) -> bool:
    """Would a tied embedding by rows send less than fused under this `[wire]` table?"""
    vocabulary, width = blueprint.shapes[blueprint.family.embedding]
    return used > 0 and rows_pay(read_wire(table), used, vocabulary, width, config.mesh.dp)


def _with_rows(
    config: TrainConfig, wire: Wire, blueprint: Blueprint, kept: Tensor | None, used: int
) -> tuple[TrainConfig, Wire]:
    """With `auto` a fused embedding goes by rows where that sends less, unless the run was begun otherwise."""
    given = wire.embedding
    if not wire.auto or given is None or given.sync != "fused" or config.mesh.tp > 1 or is_kept(config, kept):
        return config, wire
    if not _pays(config.wire, config, blueprint, used):
        return config, wire
    tables = written_out(config.wire)
    tables["embedding"] = {**tables["embedding"], "sync": "rows"}
    return replace(config, wire=tables), replace(wire, embedding=replace(given, sync="rows"))


def _where_rows_pay(
    wire: Wire, table: Mapping[str, Any], config: TrainConfig, blueprint: Blueprint, used: int,
    say: Callable[[str], None],
) -> Wire:  # fmt: skip
    """A tied embedding by rows is fused instead where that sends less. table: what the wire was made of."""
    if wire.embedding is None or wire.embedding.sync != "rows" or _pays(table, config, blueprint, used):
        return wire
    if used:
        total = blueprint.shapes[blueprint.family.embedding][0]
        say(f"[wire.embedding] sync = 'rows': a batch uses {used} of {total} rows, so fused sends less and is used")
    return replace(wire, embedding=replace(wire.embedding, sync="fused", rows_codec=None))


def _tie_by_rows(
    config: TrainConfig, wire: Wire, mesh: Mesh, stages: Mapping[int, Stage], named: dict[str, nn.Parameter]
) -> TiedRows | None:
    """This rank's end, if it has one; the first stage's copy is no parameter of this rank any more."""
    assert wire.embedding is not None
    for stage in stages.values():
        if stage.tied is not None:
            weight = named[stage.tied]
            held = stage.tie_by_rows()
            if held is not None:
                del named[stage.family.embedding]
            codec = wire.embedding.rows_codec
            return TiedRows(held or weight, mesh.pair, codec=codec, seed=config.run.seed, tell=False)
    return None


def build(
    config: TrainConfig, checked: Checked, say: Callable[[str], None], kept: Tensor | None = None,
    mesh: Mesh | None = None,
) -> Parts:  # fmt: skip
    """What this rank trains with; called by all ranks together.

    checked: what `check` returned. say: called with a line for the user. kept: the decision in a checkpoint. mesh: one
    that was made for this configuration; None: it is made here.
    """
    samples = checked.samples
    mesh = mesh or make_mesh(config.mesh, config.run.device)
    check_agreement("thinwire train", {"the configuration": repr(config), "the data": samples.digest}, None)
    given = _with_streams(checked.wire, mesh, say)
    blueprint = cut_by_time(config, checked.blueprint, say)
    spread = (mesh.replica_of_all, config.mesh.replicas, config.mesh.sites)
    batches = Batches(samples, config.optim.batch, config.data.seed, *spread)
    mine = [stage for stage, rank in enumerate(config.mesh.plan().rank_of) if rank == mesh.position]
    cut = mesh.tp if config.mesh.tp > 1 else None
    stages = build_stages(blueprint, mine, config.run.seed, config.run.device, config.run.recompute, cut)
    named = tensor.local_parameters(named_parameters(stages))
    used = used_rows(config, blueprint, samples)
    asked, wire = _with_rows(config, with_fitting_rank(given, named, say), blueprint, kept, used)
    _precompile(asked, wire, stages, named, say)
    decision = decide(asked, wire, mesh, stages, named, kept, say, used)
    if decision is not None and wire.auto:
        decided = Wire.of(decision.wire).with_epoch(batches.steps_per_epoch, config.optim.accumulate)
        wire = _with_embedding(with_fitting_rank(decided, named, say), config, blueprint)
        wire = replace(wire, streams=given.streams)
    wire = _where_rows_pay(wire, (decision or asked).wire, config, blueprint, used, say)
    blueprint = replace(blueprint, by_rows=wire.embedding is not None and wire.embedding.sync == "rows")
    rows = _tie_by_rows(config, wire, mesh, stages, named) if blueprint.by_rows else None
    plan = Plan(config.mesh.schedule, sends=None if decision is None else decision.picked())
    engine: Alone | Piped = (
        Alone(config, stages[0])
        if config.mesh.pp == 1
        else Piped(_as_decided(config, decision), wire, plan, mesh, stages, len(samples.train), say)
    )
    named |= engine.tables.named()
    steps = _say_if_once(config, wire, batches.steps_per_epoch, say)
    by_stage = names_by_stage(stages, engine.tables.names)
    chosen = select(config, wire, decision, stages, named, engine.tables.names)
    tied = next((stage.tied for stage in stages.values() if stage.tied), None)  # where another rank has a copy too
    shared = [] if config.mesh.pp == 1 else next(iter(stages.values())).shared
    update = Update(config, chosen, mesh, named, tied, rows, batches.steps_per_epoch, by_stage, shared)
    engine.tell_progress(update.watch)
    return Parts(config, mesh, blueprint, stages, named, decision, engine, update, samples, batches, steps)


def _say_if_once(config: TrainConfig, wire: Wire, epoch: int, say: Callable[[str], None]) -> int:
    """How many steps the run has; said where a wire would remember samples that never come again in them.

    epoch: steps of one."""
    steps = total_steps(config.optim, epoch)
    if config.mesh.pp > 1 and wire.forward is not None and wire.forward.remembers_samples and steps <= epoch:
        say(f"[wire.forward] memory: no sample comes again within one epoch ({steps} of {epoch} steps); {ONCE}")
    return steps


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
    calls = [partial(try_link, link, row, like) for link in links]
    for reduction in (*kinds["gradient"], *kinds["embedding"]):
        if reduction is not None:
            calls.append(partial(try_exchange, reduction, shapes, like))
            if reduction.rows_codec is not None:
                rows = [Link(reduction.rows_codec, memory) for memory in (Delta("native", gate=False), Plain())]
                calls += [partial(try_link, link, (some.config.hidden_size,), like) for link in rows]
    precompile("the wire", calls, like, say)


def _as_decided(config: TrainConfig, decision: Decision | None) -> TrainConfig:
    """With the `[mesh] ahead` and `microbatches` that were decided."""
    return config if decision is None else replace(config, mesh=decision.on(config.mesh))
