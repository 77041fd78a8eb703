"""The simulator: Optimus-CC's exposure table, closed forms, and what must hold for any schedule."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_planner_schedule import schedules

from thinwire.planner.actions import Action, Kind, Schedule
from thinwire.planner.build import COMPUTE, WIRE
from thinwire.planner.critical import choose, epilogue, gradient_stages, mixed
from thinwire.planner.graph import Graph
from thinwire.planner.graph import simulate as run_graph
from thinwire.planner.schedule import generate
from thinwire.planner.simulate import Result, simulate
from thinwire.planner.step import Hop, Machine, Send, Step, Traffic, Work

FORWARD, BACKWARD, GRADIENT = Traffic.FORWARD, Traffic.BACKWARD, Traffic.GRADIENT

# An independent simulation of torch's lists: P=4, M=16, F=1, B=2 a rank, hop 0.2, 40× compression.
# base, free network, all backward, epilogue only, forward and backward; backward sends without slack, of all
EXPOSURE = {
    ("1F1B", 1): (62.6, 57.0, 59.9, 62.0, 57.1, 23, 48),
    ("1F1B-doubled", 1): (58.2, 57.0, 57.6, 57.6, 57.0, None, 48),
    ("Interleaved1F1B", 2): (55.3, 52.5, 53.9, 53.9, 52.6, 7, 112),
    ("InterleavedZeroBubble", 1): (53.4, 51.0, 52.2, 52.8, 51.1, 6, 48),
    ("ZBVZeroBubble", 2): (52.1, 49.5, 51.1, 51.7, 49.6, 9, 96),
    ("DualPipeV", 2): (52.6, 49.5, 50.3, 51.0, 49.6, 12, 96),
}


def exposed(name: str, virtual: int, hop: float) -> Step:
    schedule = generate(name, 4, 16, virtual)
    return Step(schedule, Work.even(schedule.stages, 1 / virtual, 2 / virtual), lambda send: Hop(0, hop))


@pytest.mark.parametrize("name, virtual", EXPOSURE)
def test_exposure_table(name: str, virtual: int) -> None:
    plain, packed, free = (exposed(name, virtual, hop) for hop in (0.2, 0.2 / 40, 0.0))
    last = epilogue(plain)
    base = simulate(plain)
    steps = [
        base,
        simulate(free),
        simulate(mixed(plain, packed, lambda s: s.traffic is BACKWARD)),
        simulate(mixed(plain, packed, lambda s: s.traffic is BACKWARD and last(s))),
        simulate(packed),
    ]
    *expected, without_slack, sends = EXPOSURE[name, virtual]
    assert [s.makespan for s in steps] == pytest.approx(expected, rel=0.01)
    assert sum(s.traffic is BACKWARD for s in base.messages) == sends
    if without_slack is not None:
        assert len(base.critical(BACKWARD)) == without_slack


@pytest.mark.parametrize("name, virtual", EXPOSURE)
def test_the_set_from_slack_reaches_what_compressing_everything_does(name: str, virtual: int) -> None:
    plain, packed = exposed(name, virtual, 0.2), exposed(name, virtual, 0.005)
    choice = choose(plain, packed)
    assert choice.result.makespan == pytest.approx(simulate(packed).makespan, rel=1e-9)
    assert len(choice.sends) < len(choice.result.messages)


@pytest.mark.parametrize("ranks, microbatches", [(1, 1), (2, 5), (4, 16), (7, 7), (8, 32)])
def test_1f1b_bubble_is_exactly_p_minus_1_times_f_plus_b(ranks: int, microbatches: int) -> None:
    for name in ("1F1B", "1F1B-doubled", "GPipe"):
        schedule = generate(name, ranks, microbatches)
        step = simulate(Step(schedule, Work.even(ranks, 3.0, 5.0), lambda send: Hop()))
        assert step.makespan - microbatches * (3 + 5) == (ranks - 1) * (3 + 5)
        assert step.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


def test_interleaving_divides_the_bubble_by_v() -> None:
    for virtual in (1, 2, 4):
        schedule = generate("Interleaved1F1B", 4, 16, virtual)
        step = simulate(Step(schedule, Work.even(4 * virtual, 4 / virtual, 8 / virtual), lambda send: Hop()))
        assert step.makespan - 16 * 12 == 3 * 12 / virtual


def test_every_cost_of_a_round_trip_counts_once() -> None:
    hop = Hop(100, wire=10.0, latency=1000.0, encode=100_000.0, decode=1_000_000.0)
    schedule = generate("1F1B", 2, 1)
    result = simulate(Step(schedule, Work.even(2, 0.25, 0.5), lambda send: hop))
    assert result.makespan == 2 * (0.25 + 0.5) + 2 * 1_101_010
    assert result.spent == pytest.approx({"compute": 1.5, "codec": 2_200_000, "wire": 2 * 1010})
    assert result.wire_share == pytest.approx(2020 / result.makespan)
    assert result.sent[FORWARD] == 100


def test_a_hop_holds_its_port_but_not_the_stage() -> None:
    """Four forwards leave rank 0 at 1, 2, 3, 4 and queue for 2 s each: the last arrives at 9."""
    result = simulate(Step(generate("GPipe", 2, 4), Work.even(2, 1.0, 0.0), lambda s: Hop(0, 2.0, 0.5)))
    arrivals = [m.start + 2.0 for s, m in result.messages.items() if s.traffic is FORWARD]
    assert arrivals == [3.0, 5.0, 7.0, 9.0]
    spans = [s for s in result.spans() if s.about.what == COMPUTE and s.about.rank == 0]
    assert [s.start for s in spans][:4] == [0.0, 1.0, 2.0, 3.0]


def test_gradients_wait_for_the_last_weight_backward_and_yield_to_the_pipeline() -> None:
    schedule = generate("InterleavedZeroBubble", 2, 4, 1)
    step = Step(schedule, Work.even(2, 1.0, 2.0), lambda s: Hop(0, 0.5), gradients=[[Hop(0, 3.0)] * 2] * 2)
    result = simulate(step)
    for stage in range(2):
        last = max(s.finish for s in result.spans() if s.about.subject in _weights(schedule, stage))
        units = [result.messages[Send(GRADIENT, stage, unit)] for unit in range(2)]
        assert units[0].start >= last and units[1].start >= units[0].start + 3.0
    sliced = simulate(replace(step, slice=1.0))
    assert sliced.makespan <= result.makespan and len(sliced.about) == len(result.about) + 2 * 2 * 2
    assert sliced.messages.keys() == result.messages.keys()
    assert sum(s.about.what == WIRE for s in sliced.spans()) <= len(sliced.messages) + 2  # slices are joined again
    graph = Graph()
    port, first = graph.add_pool("port"), 0.0
    tasks = [graph.task(1.0, port, priority=p) for p in (1, 1, 0)]
    starts = run_graph(graph).start
    assert starts[tasks[2]] == first and starts[tasks[0]] < starts[tasks[1]]


def test_an_exchange_in_slices_takes_its_latency_once():
    step = Step(generate("1F1B", 1, 1), Work.even(1, 1.0, 2.0), lambda send: Hop(), [[Hop(wire=4.0, latency=0.5)]])
    assert simulate(step).makespan == simulate(replace(step, slice=1.0)).makespan == 1 + 2 + 4 + 0.5


def _weights(schedule: Schedule, stage: int) -> set[Action]:
    kinds = (Kind.W, Kind.B)
    return {a for r in range(len(schedule.ranks)) for a in schedule.compute(r) if a.stage == stage and a.kind in kinds}


@pytest.mark.parametrize("dense", [0.5, 2.0, 4.0, 7.0, 30.0])
def test_selective_stages_follow_the_closed_form(dense: float) -> None:
    """1F1B: compress the gradients of stage s where dense > compressed + s·(B + c) (ports apart)."""
    packed, hop, backward = 0.4, 0.25, 2.0
    schedule = generate("1F1B", 4, 8)
    plain = Step(
        schedule,
        Work.even(4, 1.0, backward),
        lambda s: Hop(0, hop),
        [[Hop(0, dense)]] * 4,
        port=lambda s: (s.traffic is GRADIENT, s.stage),
    )
    choice = choose(plain, replace(plain, gradients=[[Hop(0, packed)]] * 4))
    assert choice.gradients == gradient_stages(dense, packed, backward + hop, 4)


def test_embedding_waits_for_both_ends() -> None:
    base = Step(generate("1F1B", 2, 2), Work.even(2, 1.0, 2.0), lambda s: Hop(), [[Hop(0, 10.0)]] * 2)
    separate = simulate(replace(base, embedding=Hop(0, 1.0)))
    fused = simulate(replace(base, embedding=Hop(0, 1.0), embedding_fused=True))
    ends = simulate(base).makespan
    assert separate.makespan == ends + 1.0
    assert fused.makespan == ends + 1.0  # rank 0 finishes last: its port has both to do, in either order
    assert fused.messages[Send(Traffic.EMBEDDING, 1, 0)].start < separate.messages[Send(Traffic.EMBEDDING, 1, 0)].start


def test_cores_are_shared() -> None:
    schedule, work = generate("1F1B", 4, 8), Work.even(4, 1.0, 2.0)
    step = Step(schedule, work, lambda s: Hop(0, 0.125, 0, 0.0625, 0.0625))
    spans = {cores: simulate(replace(step, machine=Machine(cores))).makespan for cores in (1, 2, 4, 64)}
    busy = 4 * 8 * 3.0 + 2 * 3 * 8 * 0.125
    assert spans[1] >= busy and spans[2] >= busy / 2
    assert spans[64] == simulate(step).makespan <= spans[4] <= spans[2] <= spans[1]
    twice = simulate(replace(step, machine=Machine(1, 0, replicas=2)))
    assert twice.makespan >= 2 * busy
    apart = simulate(replace(step, machine=Machine(1, ranks=1, replicas=2)))
    assert apart.makespan == simulate(step).makespan


@st.composite
def steps(draw: st.DrawFn, own_ports: bool = False) -> Step:
    """A random schedule, every stage and every message with its own times."""
    schedule = draw(schedules())
    random = draw(st.randoms(use_true_random=False))
    hops = {
        Send(traffic, stage, part): Hop(1, *(random.choice((0.0, random.uniform(0, 2))) for _ in range(4)))
        for traffic in (FORWARD, BACKWARD)
        for stage in range(schedule.stages)
        for part in range(schedule.microbatches)
    }
    work = Work(*(tuple(random.uniform(0.1, 2) for _ in range(schedule.stages)) for _ in range(3)))
    units = [[Hop(1, random.uniform(0, 3))] for _ in range(schedule.stages)] if draw(st.booleans()) else []
    return Step(schedule, work, hops.__getitem__, units, port=(lambda send: send) if own_ports else None)


def lower_bounds(step: Step) -> list[float]:
    """Each rank's own work; the first micro-batch's way down and up the pipeline."""
    schedule = step.schedule
    busy = [sum(map(step.work.seconds, schedule.compute(r))) for r in range(len(schedule.ranks))]
    way = sum(step.work.forward) + sum(step.work.backward_input)
    for stage in range(schedule.stages):
        for traffic, to in ((FORWARD, stage + 1), (BACKWARD, stage - 1)):
            if schedule.remote(stage, to):
                way += step.hop(Send(traffic, stage, 0)).seconds
    return [*busy, way]


@settings(deadline=None, max_examples=60)
@given(steps())
def test_bounds_slack_and_path(step: Step) -> None:
    result = simulate(step)
    tolerance = 1e-9 * (1 + result.makespan)
    assert result.makespan >= max(lower_bounds(step)) - tolerance
    assert min(result.timing.slack) >= -tolerance
    assert sum(result.spent.values()) == pytest.approx(result.makespan)
    assert all(abs(result.timing.slack[task]) <= tolerance for task in result.path)
    assert_in_order(result, tolerance)


def assert_in_order(result: Result, tolerance: float) -> None:
    """Ranks and ports do one thing at a time, in program order; what is received was sent."""
    finish = {(s.about.what, s.about.subject): s.finish for s in result.spans()}
    start = {(s.about.what, s.about.subject): s.start for s in result.spans()}
    schedule = result.step.schedule
    for rank in range(len(schedule.ranks)):
        at = 0.0
        for action in schedule.compute(rank):
            assert start[COMPUTE, action] >= at - tolerance
            at = finish[COMPUTE, action]
            if action.kind is not Kind.W:
                ahead = 1 if action.kind is Kind.F else -1
                source = Send(FORWARD if ahead > 0 else BACKWARD, action.stage - ahead, action.microbatch or 0)
                if 0 <= source.stage < schedule.stages and schedule.remote(source.stage, action.stage):
                    hop = result.step.hop(source)
                    arrived = finish[WIRE, source] + hop.latency + hop.decode
                    assert start[COMPUTE, action] >= arrived - tolerance
    for rank in range(len(schedule.ranks)):
        port = sorted((s.start, s.finish) for s in result.spans() if s.about.what == WIRE and s.about.rank == rank)
        assert all(b[0] >= a[1] - tolerance for a, b in pairwise(port))


@settings(deadline=None, max_examples=40)
@given(steps(own_ports=True), st.randoms(use_true_random=False))
def test_slack_is_what_a_message_may_grow(step: Step, random) -> None:
    """Where nothing queues: growth within slack is free, beyond it costs; a free hop never hurts."""
    result = simulate(step)
    pipeline = [m for m in result.messages.values() if m.send.traffic is not GRADIENT]
    if not pipeline:
        return
    chosen = random.choice(pipeline)

    def with_wire(seconds: float) -> float:
        changed = chosen.hop._replace(wire=seconds)
        return simulate(replace(step, hop=lambda s: changed if s == chosen.send else step.hop(s))).makespan

    tolerance = 1e-9 * (1 + result.makespan)
    assert with_wire(chosen.hop.wire + chosen.slack) <= result.makespan + tolerance
    assert with_wire(chosen.hop.wire + chosen.slack + 1.0) >= result.makespan + 1.0 - tolerance
    assert with_wire(0.0) <= result.makespan + tolerance


@settings(deadline=None, max_examples=30)
@given(steps(own_ports=True))
def test_the_set_from_slack_is_no_slower_than_everything(step: Step) -> None:
    packed = replace(step, hop=lambda s: step.hop(s)._replace(wire=step.hop(s).wire / 40))
    choice = choose(step, packed)
    assert choice.result.makespan <= simulate(packed).makespan + 1e-9 * (1 + choice.result.makespan)


@pytest.mark.slow
def test_a_thousand_ranks() -> None:
    """The size only: 1,024 ranks × 64 micro-batches; docs/planner.md has the time."""
    schedule = generate("1F1B", 1024, 64)
    result = simulate(Step(schedule, Work.even(1024, 1.0, 2.0), lambda send: Hop(1, 0.125)))
    assert len(result.messages) == 2 * 1023 * 64
    assert result.makespan >= 64 * 3 + 1023 * (3 + 0.25)
