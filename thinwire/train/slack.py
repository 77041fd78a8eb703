"""`[wire.gradient] stages = "slack"`: measured before the first step, then picked by the simulator.

Measured is what a micro-batch takes on every stage, and what its gradients' exchange takes exact and compressed, on the
network that is there. The planner picks the stages whose exact exchange the step would wait for. The pick is written
beside the results, and a resumed run takes it from there.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from thinwire.collectives.base import world
from thinwire.parallel.exchange import Exchange
from thinwire.planner.actions import Schedule
from thinwire.planner.critical import choose
from thinwire.planner.step import Hop, Send, Step, Traffic, Work
from thinwire.train.config import TrainConfig
from thinwire.train.mesh import Mesh
from thinwire.train.stage import Stage
from thinwire.wire import Link, Reduction, Wire

FILE = "stages.json"
ROUNDS = 2  # of every measurement; the last counts, the first allocates and compiles


@dataclass(frozen=True)
class Times:
    """Seconds of one stage: a micro-batch forward and backward, its messages to either side, its gradients' exchange
    exact and compressed."""

    forward: float
    backward: float
    onward: float
    back: float
    exact: float
    packed: float


def picked(
    config: TrainConfig, wire: Wire, mesh: Mesh, stages: Mapping[int, Stage], named: Mapping[str, nn.Parameter]
) -> frozenset[int]:
    """The stages to compress, the same on all ranks, which call this together."""
    path, run = Path(config.run.out) / FILE, repr((config.mesh, dict(config.wire)))
    found: list[Any] = [json.loads(path.read_text()) if dist.get_rank() == 0 and path.exists() else None]
    dist.broadcast_object_list(found)
    if found[0] is not None and found[0]["run"] == run:
        return frozenset(found[0]["stages"])
    times = measure(config, wire, mesh, stages, named)
    chosen = pick(config.mesh.plan(), times)
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {"run": run, "stages": sorted(chosen), "times": [vars(t) for t in times]}
        path.write_text(json.dumps(document, indent=2) + "\n")
    return chosen


def steps(schedule: Schedule, times: list[Times]) -> tuple[Step, Step]:
    """The step with every stage's gradients exact, and with every one's compressed."""
    halves = tuple(t.backward / 2 for t in times)
    work = Work(tuple(t.forward for t in times), halves, halves)

    def hop(send: Send) -> Hop:
        own = times[send.stage]
        return Hop(wire=own.onward if send.traffic is Traffic.FORWARD else own.back)

    def step(kind: str) -> Step:
        gradients = [[Hop(wire=getattr(t, kind))] for t in times]
        return Step(schedule, work, hop, gradients, slice=max(max(t.onward, t.back) for t in times))

    return step("exact"), step("packed")


def pick(schedule: Schedule, times: list[Times]) -> frozenset[int]:
    """The stages without slack (planner/critical.py)."""
    return choose(*steps(schedule, times)).gradients


def measure(
    config: TrainConfig, wire: Wire, mesh: Mesh, stages: Mapping[int, Stage], named: Mapping[str, nn.Parameter]
) -> list[Times]:
    """Every stage's, the slowest rank's; all ranks measure at the same time, as they will work."""
    mine = {index: _times(config, wire, mesh, stage, named) for index, stage in sorted(stages.items())}
    for parameter in named.values():
        parameter.grad = None
    everyone: list[dict[int, Times]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    out = []
    for index in range(len(config.mesh.plan().rank_of)):
        found = [vars(part[index]) for part in everyone if index in part]
        out.append(Times(**{name: max(one[name] for one in found) for name in found[0]}))
    return out


def _times(config: TrainConfig, wire: Wire, mesh: Mesh, stage: Stage, named: Mapping[str, nn.Parameter]) -> Times:
    assert wire.gradient is not None
    device, own = next(stage.parameters()).device, {name for name, _ in stage.named_parameters()} - {stage.tied}
    shapes = {name: tuple(p.shape) for name, p in named.items() if name in own}
    forward, backward = _compute(config, stage, device)
    exact = _exchange(shapes, replace(wire.gradient, exclude=("*",)), mesh.dp, device)
    packed = _exchange(shapes, wire.gradient, mesh.dp, device)
    size = world(mesh.dp)[0]
    sent = 8 * sum(math.prod(shape) for shape in shapes.values()) * (size - 1) / size  # by a ring, in bytes
    hidden = (config.microbatch, config.data.seq_len, stage.config.hidden_size // config.mesh.tp)
    onward, back = (_nbytes(link, hidden) * exact / sent for link in (wire.forward, wire.backward))
    return Times(forward, backward, onward, back, exact, packed)


def _nbytes(link: Link | None, shape: tuple[int, ...]) -> int:
    """Of a message, as if all were compressed."""
    return 4 * math.prod(shape) if link is None else link.codec.nbytes(shape, torch.float32)


def _compute(config: TrainConfig, stage: Stage, device: torch.device) -> tuple[float, float]:
    shape = (config.microbatch, config.data.seq_len)
    forward = backward = 0.0
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for _ in range(ROUNDS):
            x = torch.zeros(shape, dtype=torch.int64, device=device)
            if not stage.is_first:
                x = torch.zeros(*shape, stage.config.hidden_size, device=device, requires_grad=True)
            began = time.perf_counter()
            out = stage(x)
            forward, began = _since(began, device), time.perf_counter()
            out.float().sum().backward()
            backward = _since(began, device)
    return forward, backward


def _exchange(shapes: dict[str, Any], reduction: Reduction, group: Any, device: torch.device) -> float:
    exchange, took = Exchange(shapes, reduction, group), 0.0
    for _ in range(ROUNDS):
        dist.barrier(group=group)
        began = time.perf_counter()
        exchange.begin()
        for unit in exchange.units:
            exchange.reduce(unit, torch.ones(unit.numel, device=device))
        exchange.rollback()
        took = _since(began, device)
    return took


def _since(began: float, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began
