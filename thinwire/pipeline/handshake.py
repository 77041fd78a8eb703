"""The handshake, once before the first step: which rank holds which stage, and whether all stages fit together.

Every rank sends all others a description of its stages: their links, options and declared shapes. Where two
neighbouring stages disagree, every rank raises one error that names both and the difference. Then the lanes to
neighbours on other ranks are made.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
import torch.distributed as dist

from thinwire.collectives.groups import world
from thinwire.config.wire import Link
from thinwire.distributed.config_check import describe, opposed
from thinwire.distributed.values import gather_json
from thinwire.errors import UsageError
from thinwire.memory import Memory
from thinwire.memory.file_store import remove_dead_stores, store_owner
from thinwire.pipeline.control import Control
from thinwire.pipeline.dropout import find_dropout
from thinwire.pipeline.lane import Lane
from thinwire.pipeline.message_choice import MessageChoice, Plan
from thinwire.pipeline.mirror_check import SampleLane
from thinwire.pipeline.planned_stage import Connections, Lanes, PlannedStage
from thinwire.planner.step import Traffic

RUN = re.compile("[0-9a-f]{8}")
FUNCTION_SAMPLE = 64  # micro-batches for which a user's `when` is compared


@dataclass(frozen=True)
class StageInfo:
    """A stage's description of itself, for all ranks.

    stages: how many it counts in the pipeline.
    config: links and options that have to be equal on all stages, in words.
    inputs, outputs: declared shapes and dtypes, in words; None where nothing is declared.
    dropout: names of modules that drop values at random.
    first_tag: a random number that the pipeline's tags count from; stage 0's is used.
    run: a random id of this pipeline, in the names of its stores' files; stage 0's is used.
    """

    stages: int
    config: dict[str, str]
    inputs: tuple[str, ...] | None
    outputs: tuple[str, ...] | None
    dropout: list[str]
    first_tag: int
    run: str


@dataclass(frozen=True)
class Handshake:
    """What the handshake found.

    rank_of: stage → rank in the group, of all stages.
    connections: of this rank's stages, by stage.
    per_sample: the forward link's memory in words, if it remembers samples; else "".
    control: the small messages.
    """

    rank_of: dict[int, int]
    connections: dict[int, Connections]
    per_sample: str
    control: Control


def shake_hands(
    stages: Sequence[PlannedStage], group: dist.ProcessGroup | None, options: Mapping[str, str], plan: Plan
) -> Handshake:
    """Raises one UsageError on all ranks where stages are missing or do not fit. All ranks call it together.

    stages: this rank's. group: the ranks of the pipeline. options: the Pipeline's, in words. plan: for
    when = "critical".
    """
    rank = world(group)[1]
    own = {stage.stage_index: _stage_info(stage, options) for stage in stages}
    said = gather_json([[index, asdict(info)] for index, info in own.items()], group)
    infos, rank_of = _merged([_read_infos(listed, sender) for sender, listed in enumerate(said)])
    for index in range(len(infos) - 1):
        _compare(index, infos[index], infos[index + 1])
    connections, problem = {}, None
    try:
        connections = _connect(stages, infos[0], rank_of, rank, plan)
    except UsageError as error:  # of this rank alone, such as a folder that it cannot write to
        problem = str(error)
    for sender, other in enumerate(gather_json(problem, group)):
        if other is not None:
            raise UsageError(problem or f"rank {sender} of the pipeline: {other}")
    per_sample = _per_sample(stages[0].wire.forward)
    if per_sample:
        _warn_of_dropout({index: info.dropout for index, info in own.items()}, len(infos) - 1)
    control = Control(group, rank_of[0], torch.device(stages[0].device), _sample_lanes(connections, rank_of))
    return Handshake(rank_of, connections, per_sample, control)


def _warn_of_dropout(found: dict[int, list[str]], last: int) -> None:
    """Of this rank's stages that drop values above a boundary with per-sample memory."""
    for index, names in sorted(found.items()):
        if names and index < last:
            warnings.warn(
                f"stage {index} drops values at random ({', '.join(names[:3])}) above a boundary that sends "
                'changes: they will be as large as the activations. Set p = 0, or dropout="seed"',
                stacklevel=5,
            )


def _stage_info(stage: PlannedStage, options: Mapping[str, str]) -> StageInfo:
    config = describe(stage.wire.forward, "forward") | describe(stage.wire.backward, "backward")
    config = {name: value for name, value in config.items() if not name.endswith(".path")}
    for direction, link in (("forward", stage.wire.forward), ("backward", stage.wire.backward)):
        if link is not None and callable(link.when):
            config.pop(f"{direction}.when")
            for s in range(stage.num_stages):
                chosen = [str(int(bool(link.when(s, m)))) for m in range(FUNCTION_SAMPLE)]
                config[f"{direction}.when for stage {s}"] = "".join(chosen)
    config |= options
    config["seed"] = repr(stage.seed)
    dropout = find_dropout(stage.submod) if stage.dropout != "ignore" and stage.submod.training else []
    inputs, outputs = stage.declared
    first_tag = int.from_bytes(os.urandom(4), "little")
    return StageInfo(stage.num_stages, config, inputs, outputs, dropout, first_tag, os.urandom(4).hex())


def _read_infos(said: Any, rank: int) -> dict[int, StageInfo]:
    """What a rank says of its stages, by stage. UsageError where a field is missing, unknown or of another type."""
    try:
        return {_number(index): _read_info(info) for index, info in said}
    except (TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"rank {rank} of the pipeline describes its stages in another way ({str(error)[:80]!r}): are all ranks of "
            "one version of thinwire?"
        ) from None


def _read_info(said: dict[str, Any]) -> StageInfo:
    if said.keys() != {field.name for field in fields(StageInfo)}:
        raise ValueError(f"fields are {', '.join(said)}")
    if not RUN.fullmatch(said["run"]):  # stands in names of files
        raise ValueError(f"run is {said['run']}")
    return StageInfo(
        stages=_number(said["stages"]),
        config={_text(name): _text(value) for name, value in said["config"].items()},
        inputs=None if said["inputs"] is None else tuple(_text(one) for one in said["inputs"]),
        outputs=None if said["outputs"] is None else tuple(_text(one) for one in said["outputs"]),
        dropout=[_text(name) for name in said["dropout"]],
        first_tag=_number(said["first_tag"]),
        run=said["run"],
    )


def _number(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**32:
        raise ValueError(f"{value} is no number of 32 bits")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value} is no text")
    return value


def _merged(everyone: list[dict[int, StageInfo]]) -> tuple[dict[int, StageInfo], dict[int, int]]:
    """(description, rank) of every stage, from the descriptions by rank."""
    infos: dict[int, StageInfo] = {}
    rank_of: dict[int, int] = {}
    for rank, described in enumerate(everyone):
        for index, info in described.items():
            if index in rank_of:
                raise UsageError(f"stage {index} is on rank {rank_of[index]} and on rank {rank} of the pipeline")
            infos[index] = info
            rank_of[index] = rank
    stages = next(iter(infos.values())).stages
    missing = [i for i in range(stages) if i not in rank_of]
    if missing:
        raise UsageError(f"stage {missing[0]} of {stages} is on no rank: bracket all stages of a rank by one Pipeline")
    return infos, rank_of


def _compare(index: int, one: StageInfo, other: StageInfo) -> None:
    for name in [*one.config, *(n for n in other.config if n not in one.config)]:
        a, b = one.config.get(name, "nothing"), other.config.get(name, "nothing")
        if a != b:
            a, b = opposed(a, b)
            raise UsageError(f"stage {index} and stage {index + 1} differ in {name}: {a} against {b}")
    if one.stages != other.stages:
        raise UsageError(f"stage {index} counts {one.stages} stages, stage {index + 1} counts {other.stages}")
    if one.outputs and other.inputs and one.outputs != other.inputs:
        raise UsageError(
            f"stage {index} sends {', '.join(one.outputs)}, but stage {index + 1} expects {', '.join(other.inputs)}"
        )


def _connect(
    stages: Sequence[PlannedStage], first: StageInfo, rank_of: dict[int, int], rank: int, plan: Plan
) -> dict[int, Connections]:
    """The connections of this rank's stages, by stage; `first` is stage 0's description."""
    ranks = len(set(rank_of.values()))
    owner = store_owner(first.run, world(None)[1])
    return {
        stage.stage_index: Connections(
            _lanes(stage, rank_of, rank, owner), _choices(stage, plan, ranks), first.first_tag, rank_of
        )
        for stage in stages
    }


def _lanes(stage: PlannedStage, rank_of: Mapping[int, int], rank: int, owner: str) -> Lanes:
    """Lanes to the neighbours on other ranks; between stages of one rank torch hands tensors over."""
    for link in (stage.wire.forward, stage.wire.backward):
        if link is not None and isinstance(link.memory, Memory) and link.memory.path is not None:
            remove_dead_stores(link.memory.path)
    s = stage.stage_index
    wire = stage.wire
    lanes = Lanes()
    if s > 0 and rank_of[s - 1] != rank:
        lanes.incoming["forward"] = Lane(wire.forward, f"forward {s - 1}→{s}", "recv", stage.seed, owner)
        lanes.outgoing["backward"] = Lane(wire.backward, f"backward {s}→{s - 1}", "send", stage.seed, owner)
    if s + 1 < len(rank_of) and rank_of[s + 1] != rank:
        lanes.outgoing["forward"] = Lane(wire.forward, f"forward {s}→{s + 1}", "send", stage.seed, owner)
        lanes.incoming["backward"] = Lane(wire.backward, f"backward {s + 1}→{s}", "recv", stage.seed, owner)
    return lanes


def _sample_lanes(connections: Mapping[int, Connections], rank_of: Mapping[int, int]) -> list[SampleLane]:
    """The lanes whose two ends remember samples, in boundary order; boundary s is between stages s and s + 1."""
    found: list[SampleLane] = []
    for s, connection in connections.items():
        arriving = connection.lanes.incoming.get("forward")
        leaving = connection.lanes.outgoing.get("forward")
        if arriving is not None and arriving.per_sample:
            found.append(SampleLane(arriving, s - 1, rank_of[s - 1]))
        if leaving is not None and leaving.per_sample:
            found.append(SampleLane(leaving, s, rank_of[s + 1]))
    return sorted(found, key=lambda one: one.boundary)


def _choices(stage: PlannedStage, plan: Plan, ranks: int) -> dict[str, MessageChoice]:
    """Per direction, which messages are compressed."""
    choices = {}
    for traffic, link in ((Traffic.FORWARD, stage.wire.forward), (Traffic.BACKWARD, stage.wire.backward)):
        when = "always" if link is None else link.when
        choice = MessageChoice(when, traffic, plan, ranks, stage.num_stages)
        choice.predicate(stage.num_stages)  # raises the user's mistakes now
        choices[str(traffic)] = choice
    return choices


def _per_sample(link: Link | None) -> str:
    if link is None or isinstance(link.memory, str) or not link.remembers_samples:
        return ""
    return f"[wire.forward] memory {link.memory.name}"
