"""What a step costs here, measured by all ranks together before the first one, for the planner's simulator.

It measures the computing time of every stage, and rate and latency of every link between neighbours. For every level at
which a kind of traffic might be sent (auto.py) it measures the bytes, and the seconds of the codec or of the exchange.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from torch import nn

from thinwire.collectives.flows import Flows
from thinwire.config.wire import Link, Reduction
from thinwire.distributed.packets import LossCount
from thinwire.distributed.values import gather_json
from thinwire.pipeline.lane import Lane
from thinwire.pipeline.message_choice import Message
from thinwire.planner.flows import under_way
from thinwire.planner.network import LinkSpeed
from thinwire.planner.sizes import rows_bytes
from thinwire.train.config.sections import TrainConfig
from thinwire.train.mesh import Mesh
from thinwire.train.model.casting import autocast
from thinwire.train.model.stage import Stage
from thinwire.train.tune.layer_times import once
from thinwire.train.tune.links import (
    ExchangeCost,
    congestion_control,
    elapsed,
    exchanges,
    latency_of,
    noise,
    probe,
    restarts_slowly,
)  # fmt: skip
from thinwire.train.tune.measured import NO_LIMIT, Measured
from thinwire.train.tune.turns import shared_cores, turns

ROUNDS = 3  # of every measurement; the first allocates, the fastest of the others counts
ENOUGH_VALUES = 4_000_000  # by which the optimiser's step is timed
SELDOM = 5e-5  # share of packets sent again up to which the link was only overfilled
WAYS = {"forward": 1, "backward": -1}  # kinds of messages, and how many stages ahead they go
Settings = Mapping[str, Sequence[Any]]  # by kind of traffic, one per level: a Link or a Reduction, None for exact


def measure(
    config: TrainConfig, settings: Settings, mesh: Mesh, stages: Mapping[int, Stage], named: Mapping[str, nn.Parameter],
    rows: int, streams: int = 1, microbatches: Sequence[int] = (),
) -> Measured:  # fmt: skip
    """Measure; all ranks call it together. Links are measured by all at the same time, as they will train; computing
    and coding too, but on ranks that must share one machine's cores in turn.

    rows: how many rows of a tied embedding a batch uses. streams: connections that a message is cut over. microbatches:
    numbers of them that computing is timed with beside the usual one."""
    device = next(next(iter(stages.values())).parameters()).device
    mine: dict[str, Any] = {"compute": {}, "parts": {}}
    for _ in turns(device):
        mine["compute"] = {i: _compute(config, stage, config.microbatch) for i, stage in sorted(stages.items())}
        for count in microbatches:
            some = config.microbatch * config.mesh.microbatches // count
            mine["parts"][str(count)] = {i: _compute(config, stage, some) for i, stage in sorted(stages.items())}
        optimizer = _optimizer_seconds(named)
    mine["links"] = _links(config, mesh, device, streams)
    mine["closing"] = latency_of(Flows(None, 1), 1, torch.device("cpu")) + optimizer  # the vote takes one
    shape = config.microbatch, config.data.seq_len, next(iter(stages.values())).config.hidden_size // config.mesh.tp
    dtype = next(next(iter(stages.values())).parameters()).dtype
    if config.mesh.pp > 1:
        for _ in turns(device):
            for way in WAYS:
                mine[way] = [_coding(link, noise(*shape).to(device, dtype)) for link in settings[way]]
    speeds, losses = list(mine["links"].values()), LossCount()
    if config.mesh.dp > 1:
        speeds.append(probe(mesh.dp, 1, device, streams))
        mine["gradient"] = {
            i: exchanges(_shapes(stage, named), settings["gradient"], mesh.dp, device, streams, losses)
            for i, stage in sorted(stages.items())
        }
    tied = next((stage.tied for stage in stages.values() if stage.tied), None)
    if tied is not None:
        mine["embedding"] = _embedding(tuple(named[tied].shape), settings["embedding"], mesh, device, rows, streams)
    links = [[way, stage, speed.rate, speed.latency] for (way, stage), speed in mine["links"].items()]
    mine["slowest"] = [min((x.rate or NO_LIMIT for x in speeds), default=NO_LIMIT)]
    mine["slowest"].append(max((x.latency for x in speeds), default=0.0))
    mine["restarts"] = restarts_slowly()
    mine["loss"] = losses.share if device.type == "cpu" else 0.0
    mine["congestion"] = congestion_control()
    everyone = [_numbered(part) for part in gather_json({**mine, "links": links})]
    shared = shared_cores(device) if config.mesh.tp == 1 else 0
    return _merged(len(config.mesh.plan().rank_of), everyone, [shared, 0, config.mesh.dp if shared else 1], streams)


def _numbered(part: dict[str, Any]) -> dict[str, Any]:
    """One rank's measurements as they were before JSON: stages are numbers, links have a speed."""
    links = {(way, stage): LinkSpeed(rate, latency) for way, stage, rate, latency in part["links"]}
    by_stage: dict[str, Any] = {
        kind: {int(stage): value for stage, value in part[kind].items()}
        for kind in ("compute", "gradient")
        if kind in part
    }
    parts = {count: {int(stage): value for stage, value in found.items()} for count, found in part["parts"].items()}
    return {**part, **by_stage, "links": links, "parts": parts}


def _merged(stages: int, everyone: list[dict[str, Any]], machine: list[int], streams: int) -> Measured:
    """Of every quantity the slowest of the ranks' measurements."""
    links = [entry for part in everyone for entry in part["links"].items()]
    forward, backward = _slowest_stages(stages, [part["compute"] for part in everyone])
    closing = max(part["closing"] for part in everyone)
    out = Measured(
        forward, backward, {}, {}, {}, {}, {}, {}, closing, streams, machine, {},
        [min(part["slowest"][0] for part in everyone), max(part["slowest"][1] for part in everyone)],
        any(part["restarts"] for part in everyone),
        {count: _slowest_stages(stages, [part["parts"][count] for part in everyone]) for count in everyone[0]["parts"]},
    )  # fmt: skip
    for way in WAYS:
        found = [[speed for key, speed in links if key == (way, s)] for s in range(stages)]
        if any(found):
            out.rate[way] = [min((x.rate or math.inf for x in speeds), default=0.0) for speeds in found]
            out.latency[way] = [max((x.latency for x in speeds), default=0.0) for speeds in found]
            coded = [part[way] for part in everyone if way in part]
            out.size[way] = [float(one[0]) for one in coded[0]]
            out.coding[way] = [[max(one[r][at] for one in coded) for at in (1, 2)] for r in range(len(coded[0]))]
    for kind in ("gradient", "embedding"):
        parts = [part[kind] for part in everyone if kind in part]
        if parts:
            by_stage = [[p[s] for p in parts if s in p] for s in range(stages)] if kind == "gradient" else [parts]
            levels = range(len(by_stage[0][0]))
            out.size[kind] = [float(sum(max(one[r][0] for one in ones) for ones in by_stage)) for r in levels]
            out.exchange[kind] = [[max(one[r][1] for one in ones) for ones in by_stage] for r in levels]
            out.waiting[kind] = [[max(one[r][2] for one in ones) for ones in by_stage] for r in levels]
            out.burst[kind] = [[max(one[r][3] for one in ones) for ones in by_stage] for r in levels]
    loss = fmean(part["loss"] for part in everyone)
    loss = loss if loss > SELDOM else 0.0
    usual = under_way(2 * out.slowest[1], loss, everyone[0]["congestion"])
    return out if math.isinf(usual) else out.with_loss(loss, usual)


def _slowest_stages(stages: int, found: list[dict[int, tuple[float, float]]]) -> list[list[float]]:
    """Seconds of forward and of backward, by stage, from those of every rank's stages."""
    by_stage = [[times[stage] for times in found if stage in times] for stage in range(stages)]
    return [[max(times[way] for times in some) for some in by_stage] for way in (0, 1)]


def _compute(config: TrainConfig, stage: Stage, rows: int) -> tuple[float, float]:
    """Seconds of a micro-batch of so many rows, forward and backward; the gradients are dropped."""
    some = next(stage.parameters())
    tokens = torch.zeros(rows, config.data.seq_len, dtype=torch.int64, device=some.device)
    x = tokens if stage.is_first else torch.zeros(*tokens.shape, stage.config.hidden_size).to(some)
    with torch.random.fork_rng(devices=[some.device] if some.is_cuda else []):
        runs = [once(stage, x, tokens, autocast(config)) for _ in range(ROUNDS)][1:]
    for parameter in stage.parameters():
        parameter.grad = None
    return min(f for f, _ in runs), min(b for _, b in runs)


def _optimizer_seconds(named: Mapping[str, nn.Parameter]) -> float:
    """Of AdamW's step on this rank's parameters: on a part of them, scaled; 0 where nothing is trained here."""
    if not named:
        return 0.0
    some: list[torch.Tensor] = []
    for parameter in named.values():
        if sum(x.numel() for x in some) < ENOUGH_VALUES:
            some.append(torch.zeros_like(parameter).requires_grad_())
    for x in some:
        x.grad = torch.zeros_like(x)
    adam = torch.optim.AdamW(some, foreach=True)
    took = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        adam.step()
        took.append(elapsed(began, some[0].device))
    return min(took[1:]) * sum(p.numel() for p in named.values()) / sum(x.numel() for x in some)


def _links(config: TrainConfig, mesh: Mesh, device: torch.device, streams: int) -> dict[tuple[str, int], LinkSpeed]:
    """By direction and sending stage, the links on which this rank receives from its neighbours."""
    rank_of, found = config.mesh.plan().rank_of, {}
    if config.mesh.pp == 1:
        return {}
    onward = probe(mesh.pp, 1, device, streams)
    back = onward if config.mesh.pp == 2 else probe(mesh.pp, -1, device, streams)
    for stage, rank in enumerate(rank_of):
        for way, ahead in WAYS.items():
            sender = stage - ahead
            if rank == mesh.position and 0 <= sender < len(rank_of) and rank_of[sender] != rank:
                found[way, sender] = onward if (rank - rank_of[sender]) % config.mesh.pp == 1 else back
    return found


def _coding(link: Link | None, x: torch.Tensor) -> tuple[int, float, float]:
    """Bytes of a message on samples that have been seen, seconds to encode it, seconds to decode it."""
    if link is None:
        return x.nbytes, 0.0, 0.0
    if not isinstance(link.memory, str):
        link = replace(link, memory=replace(link.memory, path=None))
    lanes = [Lane(link, "measured", end, 0) for end in ("send", "recv")]
    message, runs = Message(0, tuple(range(len(x))), True), []
    for step in range(ROUNDS):
        for lane in lanes:
            lane.begin(step)
        began = time.perf_counter()
        frame = lanes[0].send(message, 0, x)
        encode, began = elapsed(began, x.device), time.perf_counter()
        lanes[1].recv(message, 0, frame, x.shape, x.dtype)
        runs.append((frame.nbytes, encode, elapsed(began, x.device)))
        for lane in lanes:
            lane.resolve_checks()
            lane.end_step(keep=True)
    return runs[-1][0], min(r[1] for r in runs[1:]), min(r[2] for r in runs[1:])


def _shapes(stage: Stage, named: Mapping[str, nn.Parameter]) -> dict[str, tuple[int, ...]]:
    own = {name for name, _ in stage.named_parameters()} - {stage.tied}
    return {name: tuple(p.shape) for name, p in named.items() if name in own}


def _embedding(
    shape: tuple[int, ...],
    settings: Sequence[Reduction | None],
    mesh: Mesh,
    device: torch.device,
    rows: int,
    streams: int,
) -> list[ExchangeCost]:
    """The tied one's over both its stages and all replicas, or over replicas and then between the two; by rows, over
    replicas, and `rows` up and down, which take as long as they do where both ends send at once."""
    settings = [replace(setting, exact_dims=0, exclude=()) if setting else None for setting in settings]
    if any(setting.sync == "fused" for setting in settings if setting):
        return exchanges({"tied": shape}, settings, mesh.ends, device, streams)
    apart = exchanges({"tied": shape}, settings, mesh.dp, device, streams)
    if any(setting.sync == "rows" for setting in settings if setting):
        [pair] = exchanges({"rows": (rows, shape[1])}, [None], mesh.pair, device)
        travel = [rows_bytes(setting.rows_codec if setting else None, rows, shape[1]) for setting in settings]
        idle = 2 * pair.waiting  # once up, once down
        transfer = (pair.seconds - pair.waiting) / pair.sent
        added = [ExchangeCost(n, transfer * n + idle, idle, n) for n in travel]
    else:
        added = exchanges({"tied": shape}, [None], mesh.pair, device, streams) * len(settings)
    return [ExchangeCost(*(a + b for a, b in zip(one, more))) for one, more in zip(apart, added)]
