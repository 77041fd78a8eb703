"""The planner decides: mild on a fast network, strong on a slow one, alike on all ranks, and kept on resuming."""

from __future__ import annotations

import itertools
import shutil
from typing import Any

import pytest
from test_train_run import PRELOAD, losses, merged
from train_ranks import decided, settings, without_measuring

from thinwire.config.wire import Wire
from thinwire.errors import UsageError
from thinwire.lab import Network, check
from thinwire.planner.mildest import WORTH, levels_between, mildest
from thinwire.planner.simulate import simulate
from thinwire.train import build
from thinwire.train.config.sections import TrainConfig
from thinwire.train.metrics import read_events
from thinwire.train.tune.auto import KINDS, Decision, decision, describe, level_tables
from thinwire.train.tune.timing import Measured

lab = pytest.mark.skipif(not check()[0].ok, reason="this machine forbids network namespaces (thinwire doctor)")
DEEP = {"dp": 2, "pp": 4, "microbatches": 8}
WAYS = ("forward", "backward")
VALUES = 1e6  # of a message
SHRINKS = {"bf16": 2, 8: 4, 4: 8, 3: 10}
CRITICAL = {way: {"codec": "quantize", "bits": 4, "when": "critical"} for way in WAYS}


def config(tmp_path, wire: dict[str, Any], **changed: Any) -> TrainConfig:
    return settings(tmp_path, wire, mesh=DEEP, optim={"batch": 16}, **changed)


def fed(run: TrainConfig, rate: float, other: dict[int, float] | None = None) -> Measured:
    """Stages of 10 ms forward, codecs of 1 ms a message, links of `rate` bit/s but those from stages in `other`."""
    tables, count = level_tables(run), DEEP["pp"]
    size = {kind: [4 * VALUES / _shrinks(table) for table in tables[kind]] for kind in KINDS}
    rates = [(other or {}).get(stage, rate) for stage in range(count)]
    exchange = [[8 * nbytes / rate] * count for nbytes in size["gradient"]]
    return Measured(
        [0.01] * count, [0.02] * count,
        {"forward": [*rates[:-1], 0.0], "backward": [0.0, *rates[1:]]},
        {way: [1e-4] * count for way in WAYS}, size,
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
    """On links of 4 Mb/s, measured: all ranks the same decision, compressed; resumed without measuring, bit for bit."""
    wires = {
        "auto": {"preset": "auto"},
        "critical": CRITICAL | {"gradient": {"collective": "quantized", "bits": 4, "stages": "slack"}},
    }

    def short(name: str) -> TrainConfig:
        return settings(
            tmp_path / name, wires[name.split()[0]], mesh={"dp": 2, "pp": 2}, data={"held_out": 0.0},
            optim={"steps": 4}, run={"checkpoint_every": 2, "eval_every": 0},
        )  # fmt: skip

    with Network(hosts=4, rate="4mbit", preload=PRELOAD) as net:
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
        assert ranks[0][at].sends | ranks[1][at].sends == {tuple(send) for send in decision.sends}
        assert losses(tmp_path / f"{name} again") == losses(tmp_path / name)[2:] != []
        event = next(e for e in read_events(tmp_path / name / "metrics.jsonl") if e["kind"] == "decision")
        assert event["wire"] == decision.wire and event["measured"] == decision.measured
    weights, later = (merged([[run.weights for run in rank] for rank in runs]) for runs in (ranks, resumed))
    assert weights == later
    about = next(e for e in read_events(tmp_path / "auto" / "metrics.jsonl") if e["kind"] == "run")
    assert about["wire"] == ranks[0][0].decision.wire and about["name"] == "auto"
    assert {"forward", "backward", "gradient"} <= about["wire"].keys()
