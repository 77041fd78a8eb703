"""The simulated step of a run and its wire settings; over several rates, a curve and its break-even points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from thinwire.planner import sizes
from thinwire.planner.config import Run
from thinwire.planner.critical import Choice, choose, choose_by
from thinwire.planner.model import Shape, units, values
from thinwire.planner.network import Cost, LinkSpeed
from thinwire.planner.settings import Setting, Wire
from thinwire.planner.simulate import Result, simulate
from thinwire.planner.step import Hop, Send, Step, Traffic
from thinwire.quantities import show_rate

OFF = Wire("off")


def predict(run: Run, wire: Wire, cold: bool = False) -> Result:
    """The step under these settings. `cold`: no sample has been seen before, so deltas are sent whole."""
    packed = _step(run, wire, cold)
    plain = _step(run, replace(wire, name=OFF.name, forward=None, backward=None, gradient=None), cold)
    sections = {Traffic.FORWARD: wire.forward, Traffic.BACKWARD: wire.backward}
    when = {traffic: setting.when for traffic, setting in sections.items() if setting}
    return choose_by(plain, packed, when, wire.gradient.stages if wire.gradient else 1.0).result


def worth(run: Run, wire: Wire) -> tuple[Choice, Result]:
    """Which of this wire's compression the step needs (from slack), and the step with all of it."""
    packed = _step(run, wire, cold=False)
    return choose(_step(run, OFF, cold=False), packed), simulate(packed)


def _step(run: Run, wire: Wire, cold: bool) -> Step:
    hops = {
        (traffic, stage): _boundary(run, setting, stage, stage + ahead, cold)
        for traffic, setting, ahead in (
            (Traffic.FORWARD, wire.forward, 1),
            (Traffic.BACKWARD, wire.backward, -1),
        )
        for stage in range(run.schedule.stages)
        if run.schedule.remote(stage, stage + ahead)
    }
    gradients = [_gradients(run, wire, stage) for stage in range(run.schedule.stages)] if run.dp > 1 else []
    return Step(
        run.schedule,
        run.work,
        lambda send: hops[send.traffic, send.stage],
        gradients,
        _embedding(run, wire),
        _together(wire),
        run.machine,
        max((hop.wire for hop in hops.values()), default=0.0),
        lambda send: _port(run, send),
        run.network.across.latency if run.dp * run.pp > 1 else 0.0,
    )


def _rank(run: Run, replica: int, position: int) -> int:
    """The rank of the first slice."""
    return (replica * run.pp + position) * run.tp


def _slices(run: Run, shapes: list[Shape]) -> list[Shape]:
    """What a tensor-parallel rank holds of these parameters: its part of matrices, vectors whole."""
    return [(shape[0] // run.tp, *shape[1:]) if len(shape) > 1 else shape for shape in shapes]


def _tied(run: Run) -> list[Shape]:
    return _slices(run, [(run.model.vocab, run.model.hidden)])


def _sharing(run: Run) -> int:
    """How many slices send at the same time through a port."""
    return run.tp if run.network.shared_uplink else 1


def _apart(run: Run, stage: int, to: int) -> tuple[int, int]:
    """The ranks of two stages, in the first replica where they lie on different sites, else in replica 0."""
    a, b = run.schedule.rank_of[stage], run.schedule.rank_of[to]
    ends = [(_rank(run, d, a), _rank(run, d, b)) for d in range(run.dp)]
    return next((e for e in ends if run.network.site(e[0]) != run.network.site(e[1])), ends[0])


def _boundary(run: Run, setting: Setting | None, stage: int, to: int, cold: bool) -> Hop:
    shape: Shape = (run.sequences, run.model.seq, run.model.crossing or run.model.hidden // run.tp)
    nbytes = sizes.message_bytes(setting, shape, cold)
    link = run.network.link(*_apart(run, stage, to))
    raw = sizes.FP32 * values(shape) if setting else 0
    return Hop(nbytes, _sharing(run) * link.occupied(nbytes), link.latency, raw / run.encode, raw / run.decode)


def _port(run: Run, send: Send) -> object:
    if send.traffic is Traffic.FORWARD:
        return run.network.port(*_apart(run, send.stage, send.stage + 1))
    if send.traffic is Traffic.BACKWARD:
        return run.network.port(*_apart(run, send.stage, send.stage - 1))
    here = run.schedule.rank_of[send.stage]
    return run.network.port(_rank(run, 0, here), _rank(run, 1, here))


def _gradients(run: Run, wire: Wire, stage: int) -> list[Hop]:
    """A stage's units; the tied embedding's sum over replicas comes last where it is not fused."""
    members = [_rank(run, d, run.schedule.rank_of[stage]) for d in range(run.dp)]
    shapes = _slices(run, run.model.stage(stage, run.schedule.stages))
    hops = [_collective(run, wire.gradient, unit, members) for unit in units(shapes)]
    if run.model.embedding_values() and stage in _ends(run) and not (_together(wire) and _tied_apart(run)):
        hops.append(_collective(run, wire.embedding, _tied(run), members))
    return hops


def _ends(run: Run) -> tuple[int, ...]:
    """The stages that hold the embedding and reduce it: both ends, or one where they share a rank."""
    return (0, run.schedule.stages - 1) if _tied_apart(run) else (0,)


def _tied_apart(run: Run) -> bool:
    return run.schedule.rank_of[0] != run.schedule.rank_of[-1]


def _embedding(run: Run, wire: Wire) -> Hop | None:
    """Between first and last stage: over all 2D ranks at once, or over the two after each has its sum; by rows, the
    gradients' way up, the owners' sum and the rows' way down."""
    if not run.model.embedding_values() or not _tied_apart(run):
        return None
    if wire.by_rows:
        return _by_rows(run, wire)
    replicas = range(run.dp) if wire.fused else range(1)
    ends = (run.schedule.rank_of[0], run.schedule.rank_of[-1])
    members = [_rank(run, d, rank) for d in replicas for rank in ends]
    return _collective(run, wire.embedding, _tied(run), members)


def _together(wire: Wire) -> bool:
    """Is all of the tied embedding's exchange counted between the stages, and nothing on each?"""
    return wire.fused or wire.by_rows


def _by_rows(run: Run, wire: Wire) -> Hop:
    last = run.schedule.stages - 1
    owners = [_rank(run, d, run.schedule.rank_of[-1]) for d in range(run.dp)]
    reduced = _collective(run, wire.embedding, _tied(run), owners)
    used = run.model.rows(run.sequences * run.model.seq * run.schedule.microbatches)
    codec = sizes.build(wire.rows_codec) if wire.rows_codec else None
    nbytes = sizes.rows_bytes(codec, used, run.model.hidden)
    link = run.network.link(*_apart(run, 0, last))
    return reduced._replace(
        nbytes=reduced.nbytes + nbytes, wire=reduced.wire + link.occupied(nbytes) + 2 * link.latency
    )


def _collective(run: Run, setting: Setting | None, shapes: list[Shape], members: list[int]) -> Hop:
    sites = [run.network.site(rank) for rank in members]
    most = max(sites.count(site) for site in sites)
    inside, across = sizes.reduction(setting, shapes, len(members), most)
    raw = sizes.FP32 * sum(map(values, shapes)) if setting and setting.name != "dense" else 0
    slow: LinkSpeed = run.network.slowest(members)
    seconds = inside.seconds(run.network.inside) + across.seconds(slow)
    seconds += (_sharing(run) - 1) * slow.occupied(across.nbytes) if slow is run.network.across else 0.0
    total: Cost = inside + across
    return Hop(total.nbytes, seconds, 0.0, raw / run.encode, raw / run.decode)


class BreakEven(NamedTuple):
    """Where one wire is faster than another: always, never, or below or above a rate (bit/s) of the sweep."""

    side: str
    rate: float | None = None

    def __str__(self) -> str:
        return self.side if self.rate is None else f"{self.side} {show_rate(float(f'{self.rate:.2g}'))}"


@dataclass(frozen=True)
class Curve:
    """Step seconds of one wire over the rates, and where it is faster than the plain wires."""

    wire: str
    seconds: tuple[float, ...]
    faster_than: dict[str, BreakEven]


def sweep(run: Run, wires: Sequence[Wire], rates: Sequence[float]) -> list[Curve]:
    """Step time against rate, and the break-even with fp32 and bf16."""
    seconds = {w.name: tuple(predict(run.at(r), w).makespan for r in rates) for w in wires}
    plain = [w for w in wires if w.name in ("off", "bf16")]
    curves = []
    for wire in wires:
        against = {}
        for base in (w for w in plain if w.name != wire.name):
            faster = [a < b for a, b in zip(seconds[wire.name], seconds[base.name])]
            against[base.name] = _break_even(run, wire, base, rates, faster)
        curves.append(Curve(wire.name, seconds[wire.name], against))
    return curves


def _break_even(run: Run, wire: Wire, base: Wire, rates: Sequence[float], faster: list[bool]) -> BreakEven:
    """The last change of the faster one in the sweep, bisected to a hundredth."""
    change = next((i for i in reversed(range(len(rates) - 1)) if faster[i] != faster[i + 1]), None)
    if change is None:
        return BreakEven("always" if faster[0] else "never")
    low, high = rates[change], rates[change + 1]
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        there = run.at(middle)
        if (predict(there, wire).makespan < predict(there, base).makespan) == faster[change]:
            low = middle
        else:
            high = middle
    return BreakEven("below" if faster[change] else "above", (low * high) ** 0.5)
