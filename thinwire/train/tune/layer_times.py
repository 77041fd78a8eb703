"""`[mesh] split = "time"`: what embedding, layers and head cost in seconds, measured on rank 0 and sent to all.

One layer of each kind is built at a time, with random weights, and run forward and backward on one micro-batch while
the other ranks wait. The times are kept in out/split.json: a resumed run must be split as its checkpoints are.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.distributed.values import broadcast_json
from thinwire.errors import UsageError
from thinwire.train.checkpoint import CHECKPOINTS, whole
from thinwire.train.config.sections import TrainConfig
from thinwire.train.model.blueprint import Blueprint, build_stages
from thinwire.train.model.split import split_layers
from thinwire.train.model.stage import Stage
from thinwire.train.tune.links import elapsed

FILE, RUNS = "split.json", 3
FIRST, MIDDLE, LAST = range(3)  # of the three stages that are made for it


def cut_by_time(config: TrainConfig, blueprint: Blueprint, say: Callable[[str], None]) -> Blueprint:
    """The blueprint with its layers split by the seconds that rank 0 measures, or as the run was when it began."""
    if config.mesh.split != "time" or blueprint.stages == 1:
        return blueprint
    costs: list[float] = []
    if dist.get_rank() == 0:
        costs = _known(Path(config.run.out), blueprint) or _measure(config, blueprint)
        _keep(Path(config.run.out), costs)
    costs = broadcast_json(costs)
    layers = split_layers(costs, blueprint.stages)
    shown = ", ".join(f"{1e3 * seconds:.3g}" for seconds in costs)
    say(f"layers cut by time, {'+'.join(str(len(run)) for run in layers)}: {shown} ms for embedding, layers and head")
    return replace(blueprint, layers=layers)


def _measure(config: TrainConfig, blueprint: Blueprint) -> list[float]:
    """Seconds of the embedding, each layer, and norm with head and loss."""
    count = blueprint.config.num_hidden_layers
    kinds: dict[object, float] = {}
    for layer in range(count):
        kind = _kind(blueprint, layer)
        if kind not in kinds:
            kinds[kind] = _seconds(config, blueprint, MIDDLE, range(layer, layer + 1))
    each = [kinds[_kind(blueprint, layer)] for layer in range(count)]
    last = _seconds(config, blueprint, LAST, range(count - 1, count))
    return [_seconds(config, blueprint, FIRST, range(0)), *each, max(0.0, last - each[-1])]


def _seconds(config: TrainConfig, blueprint: Blueprint, index: int, layers: range) -> float:
    """Forward and backward of a micro-batch through a stage of these layers: the fastest run, after one to warm up."""
    places = tuple(layers if i == index else range(0) for i in range(3))
    own = replace(blueprint, model=replace(blueprint.model, path=None, config=None), layers=places)
    stage = build_stages(own, [index], config.run.seed, config.run.device, config.run.recompute)[index]
    tokens = torch.zeros(config.microbatch, config.data.seq_len, dtype=torch.int64, device=config.run.device)
    hidden = torch.zeros(*tokens.shape, blueprint.hidden, dtype=blueprint.dtype, device=config.run.device)
    once(stage, tokens if stage.is_first else hidden, tokens)
    return min(sum(once(stage, tokens if stage.is_first else hidden, tokens)) for _ in range(RUNS))


def once(
    stage: Stage, x: Tensor, labels: Tensor, context: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> tuple[float, float]:
    """Run a stage once; seconds forward (with the loss) and backward, 0 where there is nothing to train.

    x: token ids or hidden states. labels: token ids. context: in which forward runs."""
    given = x.clone().requires_grad_(x.is_floating_point() and stage.needs_input_grad)
    began = time.perf_counter()
    with context():
        out = stage(given).float()
    scored = out.flatten(0, -2)  # a label per token, or per row of a classifier
    loss = nn.functional.cross_entropy(scored, labels.flatten()[: len(scored)]) if stage.is_last else out.sum()
    forward, began = elapsed(began, x.device), time.perf_counter()
    if loss.requires_grad:
        loss.backward()
    return forward, elapsed(began, x.device)


def _kind(blueprint: Blueprint, layer: int) -> tuple[object, ...]:
    """What may make one layer slower than another: its attention, and whether it has adapters or is before them."""
    kinds, lora = getattr(blueprint.config, "layer_types", None), blueprint.model.lora
    place = (layer > lora.from_layer) - (layer < lora.from_layer) if lora else 0
    return kinds[layer] if kinds else None, place


def _known(out: Path, blueprint: Blueprint) -> list[float] | None:
    """The seconds by which the run's checkpoints were cut, where it has any."""
    file = out / FILE
    if not file.exists() or not whole(out / CHECKPOINTS):
        return None
    try:
        costs = [float(seconds) for seconds in json.loads(file.read_text())]
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{file} is damaged ({error}): remove it, and the layers are timed anew") from None
    if len(costs) != blueprint.config.num_hidden_layers + 2:
        raise UsageError(f"{file}: {len(costs)} times, but the model has {blueprint.config.num_hidden_layers} layers")
    return costs


def _keep(out: Path, costs: list[float]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / FILE).write_text(json.dumps(costs) + "\n")
