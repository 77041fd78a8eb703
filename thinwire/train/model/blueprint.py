"""Pipeline stages of a model: planned from its configuration and built one by one, each with its own weights only.

blueprint = plan_model(config.model, stages=4, vocab=tokenizer.size, seq_len=256)
stages = build_stages(blueprint, [rank], seed=0)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from thinwire.errors import UsageError
from thinwire.train.config.families import FAMILIES, HEAD, Family
from thinwire.train.config.sections import ModelConfig
from thinwire.train.model import lora
from thinwire.train.model import tensor_parallel as tensor
from thinwire.train.model.encoder import EncoderStage
from thinwire.train.model.families import Classes, build_config, skeleton
from thinwire.train.model.split import split_layers
from thinwire.train.model.stage import Stage
from thinwire.train.model.weights import Checkpoint, random_weight


@dataclass(frozen=True)
class Blueprint:
    """A model and how it is split into stages; every rank computes the same without communication."""

    model: ModelConfig
    config: Any  # transformers'
    layers: tuple[range, ...]  # of each stage
    by_rows: bool = False  # a tied embedding is the last stage's

    @property
    def stages(self) -> int:
        return len(self.layers)

    @property
    def family(self) -> Family:
        return FAMILIES[self.config.model_type]

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.model.dtype)

    @property
    def hidden(self) -> int:
        """Width of what crosses a boundary: [batch, seq, hidden]."""
        return self.config.hidden_size

    @cached_property
    def shapes(self) -> dict[str, torch.Size]:
        """Every parameter of the full model, a tied head left out."""
        return {name: weight.shape for name, weight in skeleton(self.config).named_parameters()}

    def stage_of(self, name: str) -> int:
        """The stage that holds (and saves) a parameter of the full model; the first, of what all stages hold."""
        family = self.family
        layers = f"{family.root}.{family.layers}."
        if self.by_rows and name == family.embedding:
            return self.stages - 1
        if name.startswith(layers):
            number = int(name.removeprefix(layers).split(".")[0])
            return next(i for i, run in enumerate(self.layers) if number in run)
        first = tuple(f"{family.root}.{part}." for part in (*family.embeddings, *family.shared))
        return 0 if name.startswith(first) else self.stages - 1


def plan_model(
    model: ModelConfig, stages: int, vocab: int, seq_len: int, classes: Classes | None = None
) -> Blueprint:  # fmt: skip
    """Read or make the model's configuration and split its layers over `stages`, by parameter count or by
    `[model] split_times`. `vocab`: the tokenizer's number of tokens; `seq_len`: tokens per sample; `classes`: of an
    encoder."""
    config = build_config(model, vocab, seq_len, classes)
    count = config.num_hidden_layers
    costs = model.split_times
    if costs is None:
        costs = tuple(float(c) for c in parameter_counts(config))
    elif len(costs) != count + 2:
        raise UsageError(f"[model] split_times: {len(costs)} times for embedding, {count} layers and head")
    try:
        layers = split_layers(costs, stages)
    except UsageError as error:
        raise UsageError(f"[mesh] {error}") from None
    if model.lora is not None:
        lora.check(model.lora, model.base_bits, FAMILIES[config.model_type], skeleton(config))
    return Blueprint(model, config, layers)


def parameter_counts(config: Any) -> list[int]:
    """Parameters of the embedding, of each layer, and of final norm with head; a tied head is counted, since both the
    first and the last stage hold it. `config`: transformers' configuration."""
    family, full = FAMILIES[config.model_type], skeleton(config)
    layers = f"{family.root}.{family.layers}."
    first = tuple(f"{family.root}.{name}." for name in family.embeddings)
    last = (f"{family.root}.{family.norm}.", *(f"{name}." for name in family.head))
    counts = [0] * (config.num_hidden_layers + 2)
    for name, weight in full.named_parameters(remove_duplicate=False):
        if name.startswith(layers):
            counts[1 + int(name.removeprefix(layers).split(".")[0])] += weight.numel()
        elif name.startswith(first):
            counts[0] += weight.numel()
        elif name.startswith(last):
            counts[-1] += weight.numel()
    return counts


def build_stages(
    blueprint: Blueprint, indices: Iterable[int], seed: int, device: torch.device | str = "cpu",
    recompute: bool = False, tp: DeviceMesh | None = None,
) -> dict[int, Stage]:  # fmt: skip
    """The stages `indices` of one rank, by number. Nothing else of the model is read or initialised.

    A rank that holds both the first and the last stage (V schedules) shares one tied embedding between them.

    seed: of random weights. recompute: compute activations again in backward instead of keeping them.
    tp: the mesh over which weights are split (tensor_parallel.py).
    """
    stages = {i: _build(blueprint, i, seed, torch.device(device), recompute, tp) for i in indices}
    if 0 in stages and blueprint.stages - 1 in stages:
        _tie(stages[0], stages[blueprint.stages - 1])
    _share([stage for _, stage in sorted(stages.items())])
    return stages


def named_parameters(stages: Mapping[int, Stage]) -> dict[str, nn.Parameter]:
    """What is trained on this rank, by its name in the full model; a weight shared by two stages once."""
    named, seen = {}, set()
    for _, stage in sorted(stages.items()):
        for name, weight in stage.named_parameters():
            if weight.requires_grad and id(weight) not in seen:
                seen.add(id(weight))
                named[name] = weight
    return named


def names_by_stage(stages: Mapping[int, Stage], tables: Mapping[int, str]) -> dict[int, list[str]]:
    """By stage, what is trained in it; a weight shared by two stages has one name, and is in both.

    tables: the names of boundaries' tables (tables.py), by stage."""
    names = {id(weight): name for name, weight in named_parameters(stages).items()}
    own = {index: [names[id(w)] for w in stage.parameters() if id(w) in names] for index, stage in stages.items()}
    return {index: [*found, tables[index]] if index in tables else found for index, found in own.items()}


def token_embedding(blueprint: Blueprint, seed: int) -> Tensor:
    """The table of the tokens' embeddings as it is at first, on the CPU: the same on every rank, whichever holds it.

    seed: of random weights."""
    name = blueprint.family.embedding
    return next(weight for _, weight in _weights(blueprint, {name: blueprint.shapes[name]}, seed)).to(blueprint.dtype)


def _build(
    blueprint: Blueprint, index: int, seed: int, device: torch.device, recompute: bool, tp: DeviceMesh | None
) -> Stage:
    full = skeleton(blueprint.config)
    kind = Stage if blueprint.family.task == "causal" else EncoderStage
    stage = kind(full, blueprint.layers[index], index, blueprint.stages, recompute)
    shapes = {name: weight.shape for name, weight in stage.named_parameters()}
    for name, weight in _weights(blueprint, shapes, seed):
        owner, _, leaf = name.rpartition(".")
        setattr(stage.get_submodule(owner), leaf, nn.Parameter(weight.to(device, blueprint.dtype)))
    if tp is not None:
        tensor.parallelize(stage, tp)
    if blueprint.stages == 1:
        _tie(stage, stage)
    stage.to(device)  # the computed buffers
    if blueprint.model.lora is not None:
        lora.attach(stage, blueprint.model.lora, blueprint.model.base_bits, seed, device)
    return stage


def _tie(first: Stage, last: Stage) -> None:
    """One parameter for both ends, where the model ties them: autograd then adds the two gradients itself."""
    if first.config.tie_word_embeddings:
        last.get_submodule("lm_head").weight = first.get_parameter(first.family.embedding)
        first.tied = last.tied = None


def _share(stages: Sequence[Stage]) -> None:
    """One parameter for all copies on this rank: autograd then adds up their gradients itself."""
    for stage in stages[1:]:
        for name in stage.shared:
            owner, _, leaf = name.rpartition(".")
            setattr(stage.get_submodule(owner), leaf, stages[0].get_parameter(name))


def _weights(blueprint: Blueprint, shapes: Mapping[str, torch.Size], seed: int) -> Iterable[tuple[str, Tensor]]:
    """The model's parameters of these names: read, or random."""
    if blueprint.model.path is None:
        tied = {HEAD: blueprint.family.embedding} if blueprint.config.tie_word_embeddings else {}
        for name, shape in shapes.items():
            yield name, random_weight(tied.get(name, name), shape, blueprint.config, blueprint.family, seed)
        return
    checkpoint = Checkpoint(blueprint.model.path, blueprint.family)
    fresh = {name for name in shapes if checkpoint.may_lack(name)}
    for name in sorted(fresh):
        yield name, random_weight(name, shapes[name], blueprint.config, blueprint.family, seed)
    for name, weight in checkpoint.read(name for name in shapes if name not in fresh):
        if not weight.is_floating_point():
            raise UsageError(f"{blueprint.model.path}: {name} is {weight.dtype}, and no floating-point weight")
        if weight.shape != shapes[name]:
            raise UsageError(
                f"{blueprint.model.path}: {name} has shape {tuple(weight.shape)}, "
                f"but the configuration says {tuple(shapes[name])}"
            )
        yield name, weight
