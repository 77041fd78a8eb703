"""Once, before the first step: where every stage lies, and whether neighbours mean the same.

Every rank tells all others of its stages: what their links are, what shapes they declare. Whoever disagrees with a
neighbour is named with it, on every rank. Then the lanes to neighbours on other ranks are made.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from thinwire.collectives.groups import world
from thinwire.config.wire import Link
from thinwire.distributed.config_check import describe
from thinwire.errors import UsageError
from thinwire.pipeline.announce import Announcer
from thinwire.pipeline.dropout import find_dropout
from thinwire.pipeline.framed_stage import FramedStage, Lanes
from thinwire.pipeline.lane import Lane
from thinwire.pipeline.message_choice import Plan, predicate
from thinwire.planner.step import Traffic

FUNCTION_SAMPLE = 64  # micro-batches for which a user's `when` is compared


@dataclass(frozen=True)
class StageInfo:
    """What a stage says of itself."""

    stages: int
    config: dict[str, str]
    inputs: tuple[str, ...] | None  # declared shapes and dtypes
    outputs: tuple[str, ...] | None
    dropout: list[str]
    first_tag: int  # of the pipeline's messages; stage 0's word counts


@dataclass(frozen=True)
class Handshake:
    place: dict[int, int]  # stage → rank in the group
    remote: list[tuple[Lane, int]]  # this rank's forward lanes in boundary order, each with the peer's rank
    per_sample: str  # a forward link with per-sample memory, in words; "" where there is none
    announcer: Announcer


def shake_hands(stages: Sequence[FramedStage], group: Any, options: dict[str, str], plan: Plan) -> Handshake:
    """Raises one UsageError on all ranks where stages are missing or do not fit."""
    size, rank = world(group)
    mine = {stage.stage_index: _stage_info(stage, options) for stage in stages}
    everyone: list[dict[int, StageInfo]] = [mine]
    if size > 1:
        everyone = [{} for _ in range(size)]
        dist.all_gather_object(everyone, mine, group=group)
    infos, place = _placed(everyone)
    for index in range(len(infos) - 1):
        _compare(index, infos[index], infos[index + 1])
    remote = []
    for stage in stages:
        stage.lanes, stage.first_tag = _lanes(stage, place, rank), infos[0].first_tag
        remote += _forward_lanes(stage, place)
        for traffic, link in ((Traffic.FORWARD, stage.wire.forward), (Traffic.BACKWARD, stage.wire.backward)):
            stage.predicates[str(traffic)] = _predicate(link, traffic, plan, size, stage)
    remote.sort(key=lambda entry: entry[0])
    sampled = _sampled(stages[0].wire.forward)
    if sampled:
        _warn_of_dropout({stage.stage_index: infos[stage.stage_index].dropout for stage in stages}, len(infos) - 1)
    announcer = Announcer(group, place[0], torch.device(stages[0].device))
    return Handshake(place, [(lane, peer) for _, lane, peer in remote], sampled, announcer)


def _warn_of_dropout(found: dict[int, list[str]], last: int) -> None:
    """Of this rank's stages that drop values above a boundary with per-sample memory."""
    for index, names in sorted(found.items()):
        if names and index < last:
            warnings.warn(
                f"stage {index} drops values at random ({', '.join(names[:3])}) above a boundary that sends "
                'changes: they will be as large as the activations. Set p = 0, or dropout="seed"',
                stacklevel=5,
            )


def _stage_info(stage: FramedStage, options: dict[str, str]) -> StageInfo:
    config = describe(stage.wire.forward, "forward") | describe(stage.wire.backward, "backward")
    config = {name: value for name, value in config.items() if not name.endswith(".path")}
    for way, link in (("forward", stage.wire.forward), ("backward", stage.wire.backward)):
        if link is not None and callable(link.when):
            config.pop(f"{way}.when")
            for s in range(stage.num_stages):
                chosen = ["01"[bool(link.when(s, m))] for m in range(FUNCTION_SAMPLE)]
                config[f"{way}.when for stage {s}"] = "".join(chosen)
    dropout = find_dropout(stage.submod) if stage.dropout != "ignore" and stage.submod.training else []
    inputs, outputs = stage.declared
    start = int.from_bytes(os.urandom(4), "little")
    return StageInfo(stage.num_stages, config | options | {"seed": repr(stage.seed)}, inputs, outputs, dropout, start)


def _placed(everyone: list[dict[int, StageInfo]]) -> tuple[dict[int, StageInfo], dict[int, int]]:
    infos: dict[int, StageInfo] = {}
    place: dict[int, int] = {}
    for rank, theirs in enumerate(everyone):
        for index, info in theirs.items():
            if index in place:
                raise UsageError(f"stage {index} is on rank {place[index]} and on rank {rank} of the pipeline")
            infos[index], place[index] = info, rank
    stages = next(iter(infos.values())).stages
    missing = [i for i in range(stages) if i not in place]
    if missing:
        raise UsageError(f"stage {missing[0]} of {stages} is on no rank: bracket all stages of a rank by one Pipeline")
    return infos, place


def _compare(index: int, one: StageInfo, other: StageInfo) -> None:
    for name in [*one.config, *(n for n in other.config if n not in one.config)]:
        a, b = one.config.get(name, "nothing"), other.config.get(name, "nothing")
        if a != b:
            raise UsageError(f"stage {index} and stage {index + 1} differ in {name}: {a} against {b}")
    if one.stages != other.stages:
        raise UsageError(f"stage {index} counts {one.stages} stages, stage {index + 1} counts {other.stages}")
    if one.outputs and other.inputs and one.outputs != other.inputs:
        raise UsageError(
            f"stage {index} sends {', '.join(one.outputs)}, but stage {index + 1} expects {', '.join(other.inputs)}"
        )


def _lanes(stage: FramedStage, place: dict[int, int], rank: int) -> Lanes:
    """Lanes to the neighbours that lie on other ranks; on one rank torch hands tensors over."""
    s, wire = stage.stage_index, stage.wire
    lanes = Lanes()
    if s > 0 and place[s - 1] != rank:
        lanes.forward_in = Lane(wire.forward, f"forward {s - 1}→{s}", "recv", stage.seed)
        lanes.backward_out = Lane(wire.backward, f"backward {s}→{s - 1}", "send", stage.seed)
    if s + 1 < len(place) and place[s + 1] != rank:
        lanes.forward_out = Lane(wire.forward, f"forward {s}→{s + 1}", "send", stage.seed)
        lanes.backward_in = Lane(wire.backward, f"backward {s + 1}→{s}", "recv", stage.seed)
    return lanes


def _forward_lanes(stage: FramedStage, place: dict[int, int]) -> list[tuple[int, Lane, int]]:
    """(boundary, lane, peer) of the lanes whose samples both ends remember."""
    s, out = stage.stage_index, []
    if stage.lanes.forward_in is not None:
        out.append((s - 1, stage.lanes.forward_in, place[s - 1]))
    if stage.lanes.forward_out is not None:
        out.append((s, stage.lanes.forward_out, place[s + 1]))
    return out


def _predicate(link: Link | None, traffic: Traffic, plan: Plan, ranks: int, stage: FramedStage) -> Any:
    """(sender, micro-batch) → compress it? Built when the number of micro-batches is known."""
    when = "always" if link is None else link.when

    def decide(sender: int, microbatch: int) -> bool:
        assert stage.microbatches is not None
        return predicate(when, traffic, plan, ranks, stage.num_stages, stage.microbatches)(sender, microbatch)

    predicate(when, traffic, plan, ranks, stage.num_stages, stage.num_stages)  # a mistake shows now
    return decide


def _sampled(link: Link | None) -> str:
    if link is None or isinstance(link.memory, str) or not link.memory.cold_start:
        return ""
    return f"[wire.forward] memory {link.memory.name}"
