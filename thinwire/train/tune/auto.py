"""The planner decides in a run: `[wire] auto = true`, `when = "critical"`, `stages = "slack"`.

Before the first step the ranks measure (timing.py), rank 0 simulates, chooses, and sends its decision to the others.
Every kind of traffic has levels, from 0, which is exact, to the last, which is the wire that is given. With `auto` the
mildest level that is fast enough is chosen (planner/mildest.py), and boundaries and stages whose messages the step does
not wait for stay exact. The decision is part of every checkpoint, so a resumed run has the same bits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.config.presets import PRESETS, written_out
from thinwire.config.stages import SLACK
from thinwire.config.wire import Wire
from thinwire.distributed.values import broadcast_json
from thinwire.errors import UsageError
from thinwire.planner.critical import choose_by, mixed
from thinwire.planner.hops import choose_hops
from thinwire.planner.mildest import WORTH, mildest
from thinwire.planner.network import LinkSpeed
from thinwire.planner.simulate import simulate
from thinwire.planner.step import Send, Step, Traffic
from thinwire.quantities import show_rate
from thinwire.registry import plain_name
from thinwire.train.config.mesh import MeshConfig
from thinwire.train.config.sections import TrainConfig
from thinwire.train.mesh import Mesh
from thinwire.train.model.stage import Stage
from thinwire.train.tune.measured import Measured
from thinwire.train.tune.mesh_choice import counts, meshes
from thinwire.train.tune.timing import WAYS, measure

KINDS = ("gradient", "embedding", "backward", "forward")  # relaxed in this order: what costs most quality comes first
KEPT = ("warmup", "exclude", "exact_dims", "unit_mb", "sync", "rows_codec")  # of the given section, at every level
IN_HOPS = ("quantized", "twohop")  # collectives in one hop or two
Table = dict[str, Any]


@dataclass(frozen=True)
class Decision:
    """What the planner decided, as JSON stores it. `sends` and `stages`: what it chose where a rule leaves it open."""

    run: str  # the mesh and the [wire] it was made for
    wire: Table  # the [wire] table to use
    sends: list[list[Any]]  # messages to compress: direction, stage, micro-batch
    stages: list[int]  # whose gradients to compress
    seconds: float  # of a step, simulated
    exact: float  # of one with nothing compressed
    measured: Table
    expected: float | None = None  # seconds of a step, once measured ones did not agree with the simulated
    ahead: int = 1  # [mesh] ahead
    microbatches: int = 0  # [mesh] microbatches, where it leaves them open; 0: as it says

    def picked(self) -> frozenset[Send]:
        return frozenset(Send(Traffic(t), s, m) for t, s, m in self.sends)

    def on(self, mesh: MeshConfig) -> MeshConfig:
        """The `[mesh]` with what was decided of it."""
        return replace(mesh, ahead=self.ahead, microbatches=self.microbatches or mesh.microbatches)

    def pack(self) -> Tensor:
        """For the checkpoint."""
        return torch.tensor(list(json.dumps(asdict(self)).encode()), dtype=torch.uint8)

    @classmethod
    def unpack(cls, packed: Tensor) -> Decision:
        return cls(**json.loads(bytes(packed.tolist())))


def is_asked(wire: Wire) -> bool:
    """Does any rule leave something to the planner?"""
    critical = any(link is not None and link.when == "critical" for link in (wire.forward, wire.backward))
    return wire.auto or critical or (wire.gradient is not None and wire.gradient.stages == SLACK)


def is_kept(config: TrainConfig, kept: Tensor | None) -> bool:
    """Is the decision in a checkpoint one for this mesh and wire?"""
    if kept is None:
        return False
    of = Decision.unpack(kept).run
    return of == _run(config) or (config.mesh.leaves_microbatches and of == _given(config))


def check_auto(wire: Wire, sites: int = 1) -> None:
    """UsageError where a wire with `auto` also names messages or stages, which `auto` chooses, or where something is
    left to the planner and there are several sites."""
    if sites > 1 and is_asked(wire):
        raise UsageError(
            f"[wire] auto, when = 'critical' or stages = 'slack': cannot be combined with [mesh] sites = "
            f"{sites}, since they measure one site; take a preset such as max"
        )
    for name, link in (("forward", wire.forward), ("backward", wire.backward)):
        if wire.auto and link is not None and link.when != "always":
            raise UsageError(f"[wire.{name}] when = {link.when!r}: [wire] auto decides that; leave one of them out")
    if wire.auto and wire.gradient is not None and wire.gradient.stages != 1.0:
        raise UsageError(f"[wire.gradient] stages = {wire.gradient.stages!r}: [wire] auto decides that; leave one out")


def decide(
    config: TrainConfig, wire: Wire, mesh: Mesh, stages: Mapping[int, Stage], named: Mapping[str, nn.Parameter],
    kept: Tensor | None, say: Callable[[str], None], rows: int,
) -> Decision | None:  # fmt: skip
    """The decision, the same on all ranks, which call it together; None where nothing is left to the planner.

    kept: the decision in the checkpoint, which is used again if mesh and wire are the same. rows: how many rows of a
    tied embedding a batch uses.
    """
    if not is_asked(wire):
        return None
    if kept is not None and is_kept(config, kept):
        return Decision.unpack(kept)
    others = [count for count in counts(config, wire) if count != config.mesh.microbatches]
    measured = measure(config, forms(config, wire), mesh, stages, named, rows, int(wire.streams), others)
    made = decision(config, wire, level_tables(config), measured) if dist.get_rank() == 0 else None
    chosen = Decision(**broadcast_json(None if made is None else asdict(made)))
    say(describe(chosen))
    return chosen


def forms(config: TrainConfig, wire: Wire) -> dict[str, list[Any]]:
    """By kind of traffic, the Link or Reduction of each level, None for exact; the last is the wire's own."""
    return {
        kind: [*(getattr(Wire.of({kind: table}), kind) for table in tables[:-1]), getattr(wire, kind)]
        for kind, tables in level_tables(config).items()
    }


def level_tables(config: TrainConfig) -> dict[str, list[Table]]:
    """By kind of traffic, the `[wire]` section of each level: from exact to the given one; without `auto` these two."""
    given = written_out(config.wire)
    out = {}
    for kind in KINDS:
        most = dict(given.get(kind, {}))
        keeps = {key: most[key] for key in KEPT if key in most}
        between = [PRESETS["bf16"][kind], PRESETS["safe"][kind], {**PRESETS["max"][kind], "bits": 4}]
        exact = {"sync": most["sync"]} if "sync" in most else {}
        out[kind] = [exact, *({**table, **keeps} for table in between if given.get("auto")), most] if most else [{}]
    return out


def decision(config: TrainConfig, wire: Wire, tables: Mapping[str, list[Table]], measured: Measured) -> Decision:
    """The decision that follows from what was measured, on whichever rank.

    tables: what `level_tables` returned. Where `[mesh] ahead` is left to it: the least that is not clearly slower than
    another, since each keeps more activations. The number of micro-batches: mesh_choice.py.
    """
    most = {kind: len(tables[kind]) - 1 for kind in KINDS}

    def seconds(mesh: MeshConfig) -> float:
        return simulate(_simulated(config, wire, measured, mesh, most)).makespan

    made = [_decision(config, wire, tables, measured, mesh) for mesh in meshes(config, wire, seconds)]
    least = min(one.seconds for one in made)
    return next(one for one in made if one.seconds <= WORTH * least)


def _simulated(
    config: TrainConfig, wire: Wire, measured: Measured, mesh: MeshConfig, levels: Mapping[str, int]
) -> Step:
    """The simulator's step on that mesh at these levels."""
    fused = wire.embedding is not None and wire.embedding.sync in ("fused", "rows")
    return measured.with_microbatches(mesh.microbatches, config.mesh.microbatches).step(mesh.plan(), levels, fused)


def _decision(
    config: TrainConfig, wire: Wire, tables: Mapping[str, list[Table]], measured: Measured, mesh: MeshConfig
) -> Decision:
    """The decision with that `[mesh]`."""

    def step(levels: Mapping[str, int]) -> Step:
        return _simulated(config, wire, measured, mesh, levels)

    def seconds(some: Step) -> float:
        before = simulate(replace(some, gradients=(), embedding=None)).makespan if config.optim.accumulate > 1 else 0.0
        return simulate(some).makespan + (config.optim.accumulate - 1) * before

    none = dict.fromkeys(KINDS, 0)
    if wire.auto:
        sizes = {kind: measured.size.get(kind, [0.0]) for kind in KINDS}
        levels = mildest(sizes, measured.cost, lambda some: seconds(step(some)))
        table, sends, stages, final = _on_edges(tables, measured, levels, step)
        for kind in {"gradient", "embedding"} & table.keys():
            members = config.mesh.dp * (2 if kind == "embedding" and table[kind].get("sync") == "fused" else 1)
            table[kind] = in_hops(table[kind], measured, kind, levels[kind], members)
    else:
        when = {t: str(link.when) for t, link in zip(Traffic, (wire.forward, wire.backward)) if link is not None}
        rule = wire.gradient.stages if wire.gradient else 1.0
        most = {kind: len(tables[kind]) - 1 for kind in KINDS}
        choice = choose_by(step({**none, "embedding": most["embedding"]}), step(most), when, rule)
        table = dict(config.wire)
        sends = choice.sends
        stages = choice.gradients
        final = choice.result.step
    listed = sorted([str(t), s, m] for t, s, m in sends)
    count = mesh.microbatches if config.mesh.leaves_microbatches else 0
    return Decision(
        _run(config), table, listed, sorted(stages), seconds(final), seconds(step(none)), asdict(measured),
        ahead=mesh.depth, microbatches=count,
    )  # fmt: skip


def _on_edges(
    tables: Mapping[str, list[Table]], measured: Measured, levels: Mapping[str, int], step: Callable[..., Step]
) -> tuple[Table, frozenset[Send], frozenset[int], Step]:
    """Compress the boundaries and the stages' gradients that the step waits for, with all their messages.

    Returns the `[wire]` table that does so, the messages, the stages, and the simulator's step."""
    plain, packed = step(dict.fromkeys(KINDS, 0) | {"embedding": levels["embedding"]}), step(levels)
    choice = choose_by(plain, packed, dict.fromkeys((Traffic.FORWARD, Traffic.BACKWARD), "critical"), SLACK)
    parts = range(packed.schedule.microbatches)
    sends = frozenset(Send(t, s, m) for t, s, _ in choice.sends for m in parts)
    picked = sends | {Send(Traffic.GRADIENT, stage, 0) for stage in choice.gradients}
    wire = {"embedding": tables["embedding"][levels["embedding"]]}
    for way, rates in measured.rate.items():
        edges = {send.stage for send in sends if send.traffic == way}
        if edges:
            every = len(edges) == sum(rate > 0 for rate in rates)
            wire[way] = {**tables[way][levels[way]], **({} if every else {"when": "critical"})}
    if choice.gradients:
        every = len(choice.gradients) == packed.schedule.stages
        listed = {} if every else {"stages": sorted(choice.gradients)}
        wire["gradient"] = {**tables["gradient"][levels["gradient"]], **listed}
    used = {kind: table for kind, table in wire.items() if table}
    return used, sends, choice.gradients, mixed(plain, packed, picked.__contains__)


def in_hops(table: Table, measured: Measured, kind: str, level: int, members: int) -> Table:
    """The `[wire]` section with one hop where that is faster (planner/hops.py) and the user has said nothing about it.

    measured: in two hops. kind, level: of this section. members: of its exchange."""
    known = kind in measured.burst  # not in plans of before
    if members < 3 or not known or "hops" in table or plain_name(str(table.get("collective"))) not in IN_HOPS:
        return table
    coded = max(measured.burst[kind][level]) * members / 2  # to each member 2/P of it goes
    rate, latency = measured.slowest
    one = choose_hops(members, coded, LinkSpeed(rate, latency)) == 1
    return {**table, "hops": 1} if one else table


def describe(chosen: Decision) -> str:
    """The decision in one line."""
    wire, rates = written_out(chosen.wire), chosen.measured["rate"]
    parts = [f"{kind} {_words(wire.get(kind, {}))}" for kind in ("forward", "backward", "gradient", "embedding")]
    for at, way in enumerate(WAYS):
        if wire.get(way, {}).get("when") == "critical":
            parts[at] += f" from stages {sorted({s for kind, s, _ in chosen.sends if kind == way}) or 'none'}, "
            parts[at] += f"{sum(kind == way for kind, _, _ in chosen.sends)} messages"
    if "stages" in wire.get("gradient", {}):
        parts[2] += f" of stages {chosen.stages or 'none'}"
    parts[3] += " by rows" if wire.get("embedding", {}).get("sync") == "rows" else ""
    kinds = [part for part in parts if part.split()[0] in chosen.measured["size"]]
    speeds = [rate for way in rates.values() for rate in way if rate]
    links = f", links of {show_rate(min(speeds))}" if speeds else ""
    links += f"; [mesh] ahead = {chosen.ahead}" if chosen.ahead > 1 else ""
    links += f"; [mesh] microbatches = {chosen.microbatches}" if chosen.microbatches else ""
    return (
        f"planned: {'; '.join(kinds) or 'nothing crosses a network'}; a step of {chosen.seconds:.3g} s is expected, "
        f"{chosen.exact:.3g} s with nothing compressed{links}"
    )


def _words(table: Mapping[str, Any]) -> str:
    """{"codec": "quantize", "bits": 4, "memory": {"memory": "delta", …}} → quantize(bits=4, memory=delta)."""
    name = table.get("codec") or table.get("collective")
    if not isinstance(name, str):
        return "exact" if name is None else _words(name)
    about = {key: value for key, value in table.items() if key not in ("codec", "collective", "when", "stages", *KEPT)}
    short = (f"{k}={(v.get('memory') or v.get('codec')) if isinstance(v, Mapping) else v}" for k, v in about.items())
    return f"{name}({', '.join(short)})"


def _run(config: TrainConfig) -> str:
    """The settings for which a decision can be used again."""
    return _given(config) + (", any number of micro-batches" if config.mesh.leaves_microbatches else "")


def _given(config: TrainConfig) -> str:
    """The same with the usual number of micro-batches, as of a run that gives it, or one of before it was left open."""
    return repr((config.mesh, dict(config.wire))).replace("sites=1, ", "", 1)  # older checkpoints know no sites
