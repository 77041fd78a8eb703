"""The planner decides: mild on a fast network, strong on a slow one, alike on all ranks, and kept on resuming."""

from __future__ import annotations

import itertools
import shutil
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_train_run import PRELOAD, losses, merged
from train_ranks import decided, impatient, settings, without_measuring

from thinwire.config.wire import Wire
from thinwire.errors import UsageError
from thinwire.lab import Network, check
from thinwire.planner.mildest import WORTH, levels_between, mildest
from thinwire.planner.simulate import simulate
from thinwire.train import build
from thinwire.train.config.sections import TrainConfig
from thinwire.train.metrics import read_events
from thinwire.train.tune.auto import KINDS, Decision, decision, describe, is_kept, level_tables
from thinwire.train.tune.measured import Measured
from thinwire.train.tune.replan import STEPS, StepWatch, carried_over, is_same

lab = pytest.mark.skipif(not check()[0].ok, reason="this machine forbids network namespaces (thinwire doctor)")
DEEP = {"dp": 2, "pp": 4, "microbatches": 8}
WAYS = ("forward", "backward")
VALUES = 1e6  # of a message
SHRINKS = {"bf16": 2, 8: 4, 4: 8, 3: 10}
CRITICAL = {way: {"codec": "quantize", "bits": 4, "when": "critical"} for way in WAYS}


def config(tmp_path, wire: dict[str, Any], **changed: Any) -> TrainConfig:
    return settings(tmp_path, wire, mesh=DEEP, optim={"batch": 16}, **changed)


def fed(run: TrainConfig, rate: float, other: dict[int, float] | None = None, latency: float = 1e-4) -> Measured:
    """Stages of 10 ms forward, codecs of 1 ms a message, links of `rate` bit/s but those from stages in `other`."""
    tables, count = level_tables(run), run.mesh.pp
    size = {kind: [4 * VALUES / _shrinks(table) for table in tables[kind]] for kind in KINDS}
    rates = [(other or {}).get(stage, rate) for stage in range(count)]
    exchange = [[8 * nbytes / rate] * count for nbytes in size["gradient"]]
    return Measured(
        [0.01] * count, [0.02] * count,
        {"forward": [*rates[:-1], 0.0], "backward": [0.0, *rates[1:]]},
        {way: [latency] * count for way in WAYS}, size,
        {way: [[0.0, 0.0], *([1e-3, 1e-3] for _ in tables[way][1:])] for way in WAYS},
        {"gradient": exchange, "embedding": [row[:1] for row in exchange]},
    )  # fmt: skip


def _shrinks(table: dict[str, Any]) -> float:
    nested = table.get("codec")
    if "bits" in table:
        return SHRINKS[table["bits"]]
    return SHRINKS["bf16"] if nested is not None else 1


def chosen(run: TrainConfig, measured: Measured) -> Decision:
    return decision(run, Wire.of(run.wire), level_tables(run), measured)


def bits(found: Decision) -> dict[str, Any]:
    """What every kind gets: bits, 16 for a cast, 32 for exact."""
    return {kind: round(32 / _shrinks(found.wire.get(kind, {}))) for kind in KINDS}


def test_one_hop_over_a_long_link(tmp_path):
    """Of the tied embedding between four ranks; between the two replicas of a stage it is one anyhow."""
    run = config(tmp_path, {"auto": True})
    for latency, hops in ((0.05, 1), (0.0, None)):
        measured = fed(run, 2e7, latency=latency)
        bursts = {kind: [[1e3] * len(row) for row in measured.exchange[kind]] for kind in ("gradient", "embedding")}
        found = chosen(run, replace(measured, burst=bursts, slowest=[2e7, latency]))
        assert found.wire["embedding"].get("hops") == hops and "hops" not in found.wire["gradient"]
        Wire.of(found.wire)


def test_a_fast_network_is_left_alone_and_a_slow_one_is_not(tmp_path):
    run = config(tmp_path, {"auto": True})
    fast, slow = (chosen(run, fed(run, rate)) for rate in (1e12, 1e7))
    assert bits(fast) == dict.fromkeys(KINDS, 32) and not fast.sends and not fast.stages
    assert fast.seconds == fast.exact and "forward exact" in describe(fast)
    assert slow.wire["forward"]["bits"] == 3 and slow.wire["gradient"]["bits"] == 4
    assert slow.wire["forward"]["memory"]["memory"] == "delta" and slow.wire["embedding"]["sync"] == "fused"
    assert slow.seconds < slow.exact / 4 and "10mbit" in describe(slow)
    assert len(slow.sends) == 2 * 3 * DEEP["microbatches"] and 0 in slow.stages
    assert Wire.of(slow.wire).forward.codec.bits == 3, "what was decided is a wire"
    between = [chosen(run, fed(run, rate)) for rate in (1e7, 1e8, 1e9, 3e9, 1e10, 1e12)]
    for kind in KINDS:
        found = [bits(one)[kind] for one in between]
        assert found == sorted(found), f"{kind} grows milder with the rate: {found}"
    assert {8, 16} & {bits(one)[kind] for one in between for kind in KINDS}, "there is something in between"


@pytest.mark.parametrize("rate", [1e7, 2e8, 1e9, 5e9])
def test_the_choice_is_fast_enough_and_no_single_kind_could_be_milder(tmp_path, rate):
    """Against all combinations of levels, simulated one by one."""
    run = config(tmp_path, {"auto": True})
    measured, tables = fed(run, rate), level_tables(run)

    def seconds(levels):
        return simulate(measured.step(run.mesh.plan(), levels, fused=True)).makespan

    levels = mildest({kind: measured.size[kind] for kind in KINDS}, measured.cost, seconds)
    every = [dict(zip(KINDS, one)) for one in itertools.product(*(range(len(tables[kind])) for kind in KINDS))]
    best = min(map(seconds, every))
    assert seconds(levels) <= WORTH * best * 1.001
    for kind in KINDS:
        for level in levels_between(measured.size[kind]):
            if measured.size[kind][level] > measured.size[kind][levels[kind]]:
                assert seconds({**levels, kind: level}) > WORTH * best
    assert chosen(run, measured).seconds <= WORTH * best * 1.001


def test_only_the_slow_boundary_is_compressed(tmp_path):
    run = config(tmp_path, {"auto": True})
    found = chosen(run, fed(run, 1e12, other={1: 1e8}))
    assert {(t, s) for t, s, _ in found.sends} == {("forward", 1), ("backward", 1)}
    assert found.wire["forward"]["when"] == "critical" and "gradient" not in found.wire and found.stages == []
    assert "from stages [1], 8 messages" in describe(found)


def test_more_micro_batches_are_begun_ahead_where_links_are_long(tmp_path):
    """As many as pay: a longer link never gets fewer. What the user gives stays, and so does a schedule without it."""

    def ahead(latency: float, **mesh: Any) -> Decision:
        run = settings(tmp_path, {"auto": True}, mesh={"pp": 2, "microbatches": 8, **mesh}, optim={"batch": 16})
        return chosen(run, fed(run, 1e12, latency=latency))

    found = [ahead(latency) for latency in (0.0, 1e-3, 5e-2, 2e-1)]
    assert [one.ahead for one in found] == sorted(one.ahead for one in found)
    assert found[0].ahead == 1 and found[-1].ahead == 3 and "[mesh] ahead = 3" in describe(found[-1])
    assert found[-1].seconds < ahead(2e-1, ahead=1).seconds and ahead(2e-1, ahead=1).ahead == 1
    assert ahead(0.0, ahead=2).ahead == 2 and ahead(2e-1, schedule="GPipe").ahead == 1
    assert Decision.unpack(found[-1].pack()) == found[-1] and not is_same(found[-1], replace(found[-1], ahead=2))


def test_micro_batches_follow_from_the_links_unless_they_are_given(tmp_path):
    """Few where each costs a latency or computes as slowly as a larger one; many where smaller ones leave ranks idle
    for a shorter time."""

    def made(latency: float, overhead: float, **mesh: Any) -> tuple[TrainConfig, Decision]:
        given = {"dp": 2, "pp": 2, "ahead": 1, "microbatches": "auto"} | mesh
        run = settings(tmp_path, {"auto": True}, mesh=given, optim={"batch": 64}, data={"samples": 128})
        times = {n: [[t * 4 / n + overhead] * 2 for t in (0.04, 0.08)] for n in (8, 16)}
        measured = replace(fed(run, 1e9, latency=latency), by_microbatches={str(n): x for n, x in times.items()})
        measured = replace(measured, forward=[0.04 + overhead] * 2, backward=[0.08 + overhead] * 2)
        return run, chosen(run, measured)

    run, many = made(0.0, 0.0)
    assert many.microbatches == 16 and f"microbatches = {many.microbatches}" in describe(many)
    assert made(0.1, 0.0)[1].microbatches == 4 and made(0.0, 0.05)[1].microbatches == 4
    assert made(0.05, 0.0, ahead="auto")[1].microbatches == 8, "more are under way together"
    given, decided = made(0.0, 0.0, microbatches=4)
    assert decided.microbatches == 0 and decided.on(given.mesh) == given.mesh
    assert many.on(run.mesh).microbatches == 16 and max(m for _, _, m in many.sends) == 15
    assert not is_same(many, replace(many, microbatches=8))
    assert is_kept(run, many.pack()) and is_kept(run, decided.pack())
    assert is_kept(given, decided.pack()) and not is_kept(given, many.pack())


def test_the_given_wire_is_the_most_that_is_done(tmp_path):
    safe = config(tmp_path, {"preset": "safe", "auto": True})
    found = bits(chosen(safe, fed(safe, 1e6)))
    assert found["forward"] == found["backward"] == 8 and min(found.values()) == 8
    own = {"auto": True, "gradient": {"collective": "quantized", "bits": 8, "exclude": "*.bias", "unit_mb": 3.0}}
    gradient = config(tmp_path, own)
    found = chosen(gradient, fed(gradient, 1e6, other=dict.fromkeys(range(4), 1e12)))
    assert bits(found) == {"gradient": 8, "embedding": 32, "backward": 32, "forward": 32}
    assert found.wire["gradient"]["exclude"] == "*.bias"
    assert {"exclude", "unit_mb"} <= level_tables(gradient)["gradient"][1].keys()


def test_accumulated_passes_exchange_gradients_once(tmp_path):
    """Messages go with every pass, so more of the step is theirs."""
    once = config(tmp_path, {"auto": True})
    often = settings(tmp_path, {"auto": True}, mesh=DEEP, optim={"batch": 64, "accumulate": 4})
    a, b = (chosen(run, fed(run, 1e8)) for run in (once, often))
    assert b.exact < 4 * a.exact and b.exact > 3 * (a.exact - fed(once, 1e8).exchange["gradient"][0][0])


def test_critical_knows_the_rate(tmp_path):
    """On a slow wire every message is waited for, on a fast one few are; a fixed hop said the same for both."""
    run = config(tmp_path, CRITICAL)
    total = 2 * 3 * DEEP["microbatches"]
    counts = [len(chosen(run, fed(run, rate)).sends) for rate in (1e7, 1e9, 1e10)]
    assert counts[0] == total and counts[0] > counts[1] > counts[2]
    found = chosen(run, fed(run, 1e7))
    assert found.wire == run.wire and found.stages == [], "what the wire fixes stays"


@pytest.mark.parametrize(
    ("wire", "said"),
    [
        ({"auto": True, **CRITICAL}, "[wire.forward] when = 'critical': [wire] auto decides that"),
        (
            {"auto": True, "gradient": {"collective": "quantized", "bits": 4, "stages": 0.5}},
            "[wire.gradient] stages = 0.5: [wire] auto decides that",
        ),
        ({"auto": 1}, "[wire] auto = 1: must be true or false"),
    ],
)
def test_what_auto_does_not_allow_is_said(tmp_path, wire, said):
    with pytest.raises(UsageError) as error:
        build.check(config(tmp_path, wire))
    assert said in str(error.value) and "\n" not in str(error.value)


@lab
@pytest.mark.lab
@pytest.mark.timeout(200)
def test_ranks_decide_alike_and_a_resumed_run_keeps_it(tmp_path):
    """On links of 2 Mb/s, measured: all ranks the same decision, compressed; resumed without measuring, bit for bit."""
    wires = {
        "auto": {"preset": "auto"},
        "critical": CRITICAL | {"gradient": {"collective": "quantized", "bits": 4, "stages": "slack"}},
    }

    def short(name: str) -> TrainConfig:
        return settings(
            tmp_path / name, wires[name.split()[0]], mesh={"dp": 2, "pp": 2, "microbatches": "auto"},
            data={"held_out": 0.0}, optim={"steps": 4, "batch": 16}, run={"checkpoint_every": 2, "eval_every": 0},
        )  # fmt: skip

    with Network(hosts=4, rate="2mbit", preload=PRELOAD) as net:
        first = [short(name) for name in wires]
        ranks = net.run(decided, [(run, False) for run in first], timeout=120, echo=False)
        again = []
        for name in wires:
            folder = "checkpoints/step-00000002"
            shutil.copytree(tmp_path / name / folder, tmp_path / f"{name} again" / folder)
            again.append(short(f"{name} again"))
        resumed = net.run(without_measuring, [(run, True) for run in again], timeout=100, echo=False)
    for at, name in enumerate(wires):
        decisions = [rank[at].decision for rank in ranks]
        decision = decisions[0]
        assert all(one == decision for one in decisions), f"{name}: ranks differ"
        assert [rank[at].decision for rank in resumed] == decisions
        assert decision.seconds < decision.exact and decision.sends and decision.stages
        assert decision.microbatches == (8 if name == "auto" else 4)
        assert ranks[0][at].sends | ranks[1][at].sends == {tuple(send) for send in decision.sends}
        assert losses(tmp_path / f"{name} again") == losses(tmp_path / name)[2:] != []
        event = next(e for e in read_events(tmp_path / name / "metrics.jsonl") if e["kind"] == "decision")
        assert event["wire"] == decision.wire and event["measured"] == decision.measured
    weights, later = (merged([[run.weights for run in rank] for rank in runs]) for runs in (ranks, resumed))
    assert weights == later
    about = next(e for e in read_events(tmp_path / "auto" / "metrics.jsonl") if e["kind"] == "run")
    assert about["wire"] == ranks[0][0].decision.wire and about["name"] == "auto"
    assert "gradient" in about["wire"] and {"forward", "backward"} & about["wire"].keys(), "what the step waits for"


def test_a_plan_is_doubted_after_twenty_steps_that_depart_by_a_quarter():
    def steps(expected: float | None, *seconds: float, hit_rate: float | None = None) -> list[bool]:
        watch = StepWatch(expected)
        return [watch.departs(one, hit_rate) for one in seconds]

    slow = [1.3] * STEPS
    assert steps(1.0, *slow) == [False] * (STEPS - 1) + [True]
    assert steps(1.0, *slow[1:], 50.0)[-1], "one that takes long is one of the twenty"
    assert steps(1.0, *([0.7] * STEPS))[-1], "faster than planned is a departure too"
    for quiet in (steps(1.0, *([1.2] * 60)), steps(None, *slow), steps(1.0, *slow, hit_rate=0.5)):
        assert not any(quiet)
    assert not any(steps(1.0, *(slow[: STEPS // 2 - 1] + [1.0] * 2 * STEPS))), "half of the twenty is not enough"


def test_a_new_plan_keeps_residuals_and_what_did_not_change(tmp_path):
    run = config(tmp_path, {"auto": True})
    old = chosen(run, fed(run, 1e7))
    names = [
        "model/x", "optim/x/exp_avg", "step", "rank-0/rng", "rank-0/pipeline/rank0of4/step",
        "rank-0/pipeline/rank0of4/stage0/forward 0→1/send/coded0/h", "gradient-0/rank0of2/step",
        "rank-0/pipeline/rank0of4/stage1/backward 1→0/send/coded0/e", "gradient-0/rank0of2/e/x",
        "gradient-0/rank0of2/unit/a/left", "embedding-0/rank0of4/unit/a/left",
    ]  # fmt: skip
    state = {name: torch.zeros(1) for name in names}

    def dropped(new: Decision) -> set[str]:
        return names_of(state.keys() - carried_over(state, old, new).keys())

    def names_of(keys) -> set[str]:
        return {key.split("/")[-2] if "unit" in key else key.split("/")[4].split()[0] for key in keys}

    def changed(**tables: Any) -> Decision:
        return replace(old, wire={**old.wire, **tables})

    assert dropped(old) == set() and carried_over(state, old, old) == state
    assert dropped(changed(forward={})) == {"forward"}
    assert dropped(replace(old, sends=[send for send in old.sends if send[0] != "backward"])) == {"backward"}
    assert [*state.keys() - carried_over(state, old, changed(gradient={})).keys()] == [names[9]]
    assert [*state.keys() - carried_over(state, old, changed(embedding={})).keys()] == [names[10]]


@lab
@pytest.mark.lab
@pytest.mark.timeout(200)
def test_a_run_follows_its_network_and_can_be_resumed_from_there(tmp_path):
    """Begun where little needs compressing, it plans anew at 2 Mb/s. Resumed from there, the same bits."""

    def run(name: str, steps: int) -> TrainConfig:
        return settings(
            tmp_path / name, {"preset": "auto"}, mesh={"dp": 2, "pp": 2}, data={"held_out": 0.0},
            optim={"steps": steps}, run={"checkpoint_every": 0, "eval_every": 0, "keep": 99},
        )  # fmt: skip

    def events(kind: str) -> list[dict[str, Any]]:
        path = tmp_path / "followed" / "metrics.jsonl"
        return [e for e in read_events(path) if e["kind"] == kind] if path.exists() else []

    with Network(hosts=4, preload=PRELOAD) as net:
        job = net.start(impatient, run("followed", 26), echo=False)
        deadline = time.monotonic() + 60
        while len(events("step")) < 8 and not job.done and time.monotonic() < deadline:
            job.watch(0.1)
        for host in range(4):
            net.set_rate(host, "2mbit")
        ranks = job.wait(100)
        *_, first, last = (e["step"] for e in events("decision"))
        folder = f"checkpoints/step-{last:08d}"
        shutil.copytree(tmp_path / "followed" / folder, tmp_path / "again" / folder)
        resumed = net.run(without_measuring, [(run("again", 26), True)], timeout=60, echo=False)
    plans = [e["wire"] for e in events("decision")]
    assert plans[0] != plans[-1] and "gradient" in plans[-1] and last > first >= 0
    assert all(rank.decision == ranks[0].decision for rank in ranks) and ranks[0].decision.wire == plans[-1]
    assert losses(tmp_path / "again") == losses(tmp_path / "followed")[last:] != []
    assert merged([[rank.weights] for rank in ranks]) == merged([[rank[0].weights] for rank in resumed])
    notes = [e["text"] for e in events("note")]
    assert any(note.startswith(f"step {last}: steps take ") for note in notes)
