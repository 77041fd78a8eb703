"""`thinwire plan`: its tables, files and one-line refusals; and the planner's bytes are the codecs' bytes."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from thinwire import codecs
from thinwire import plan as command
from thinwire.codecs import frame
from thinwire.config.presets import PRESETS
from thinwire.errors import UsageError
from thinwire.memory import Delta, Plain
from thinwire.memory.channel import Channel
from thinwire.planner import network, sizes
from thinwire.planner.config import Run, read_run
from thinwire.planner.model import UNIT_BYTES, Model, units, values
from thinwire.planner.predict import BreakEven, predict, sweep, worth
from thinwire.planner.rounds import rounds_of
from thinwire.planner.schedule import generate
from thinwire.planner.settings import preset, read_wire
from thinwire.planner.step import Send, Traffic

SMALL: dict[str, Any] = {
    "model": {"layers": 8, "hidden": 64, "seq": 32, "vocab": 500},
    "mesh": {"dp": 2, "pp": 4},
    "batch": {"microbatches": 8},
    "compute": {"forward": "10ms"},
    "network": {"rate": "10mbit", "latency": "1ms"},
}


def small(**sections: dict[str, Any]) -> Run:
    return read_run({**SMALL, **{name: {**SMALL.get(name, {}), **table} for name, table in sections.items()}})


def plan(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.configure(parser)
    return command.run(parser.parse_args(words))


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    assert plan("--init", str(path)) == 0
    return path


def test_example_runs_and_writes_everything(config: Path, tmp_path: Path, capsys) -> None:
    names = ("plan.json", "trace.json", "timeline.png", "sweep.png")
    paths = {name: tmp_path / "made" / name for name in names}
    words = [str(config), "--rate", "100mbit", "--latency", "5ms", "--json", str(paths["plan.json"])]
    words += ["--trace", str(paths["trace.json"]), "--timeline", str(paths["timeline.png"])]
    words += ["--sweep", "rate=100mbit..1gbit", "--figure", str(paths["sweep.png"]), "--actions"]
    assert plan(*words) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in [*PRESETS, "forward 0 → 1", "gradient of stage 3", "0SEND_F0", "Worth"])
    assert paths["timeline.png"].stat().st_size > 10_000 and paths["sweep.png"].stat().st_size > 10_000
    document = json.loads(paths["plan.json"].read_text())
    assert {s["wire"] for s in document["steps"]} == {*PRESETS, "run.toml"}
    assert document["messages"][0].keys() >= {"bytes", "wire_s", "slack_s", "critical"}
    assert len(document["sweep"]["curves"]) == len(PRESETS) + 1
    events = json.loads(paths["trace.json"].read_text())["traceEvents"]
    path = [e for e in events if e["ph"] == "X" and e["pid"] == 4]
    end = max(e["ts"] + e["dur"] for e in events if e["ph"] == "X")
    assert end == pytest.approx(1e6 * (document["steps"][-1]["step_s"] - 0.005)), "the vote is not in the picture"
    assert path[0]["ts"] == 0 and all(e["args"]["critical"] for e in path)


def test_example_names_every_key(config: Path) -> None:
    from thinwire.planner.config import KEYS

    text = config.read_text()
    for section, keys in KEYS.items():
        assert f"[{section}]" in text
        assert all(f"{key} = " in text for key in keys or ()), section


@pytest.mark.parametrize(
    "old, new, words",
    [
        ('name = "1F1B"', 'name = "2F2B"', "2F2B.*GPipe"),
        ("layers = 24", "layers = 3", "4 stages.*3 layers"),
        ("layers = 24", "layers = -1", "layers = -1"),
        ("layers = 24", "layer = 24", "layer: no such key; allowed are layers"),
        ("[batch]", "[bach]", "bach.*allowed are model"),
        ('rate = "100mbit"', 'rate = "100mb"', "100mb.*mbit"),
        ('rate = "100mbit"', "rate = -5", "-5"),
        ('latency = "10ms"', 'latency = "10 parsecs"', "10 parsecs.*ms"),
        ('forward = "60ms"', 'forward = "-60ms"', "-60ms"),
        ('forward = "60ms"', "forward = [1, 2]", "2 times for 4 stages"),
        ("encode = 5.6e9", "encode = 0", "encode = 0"),
        ("tied = true", 'tied = "yes"', "tied = 'yes'"),
        ("microbatches = 16", "", "microbatches: missing"),
        ('codec = "quantize"\nbits = 4', 'codec = "quantise"\nbits = 4', "quantise.*quantize"),
        ("bits = 4", "bits = 40", "bits.*40"),
        ("bits = 4", "bit = 4", "bit.*bits"),
        ('memory = "delta"', 'memory = "beta"', "beta.*delta"),
        ('when = "critical"', 'when = "some"', "some.*epilogue"),
        ('collective = "ok_topk"', 'collective = "ring"', "ring.*dense"),
        ("density = 0.01", "densty = 0.01", "density"),
        ('sync = "fused"', 'sync = "fuse"', "fuse.*separate"),
        ("[wire.embedding]", "[wire.embeding]", "embeding.*embedding"),
        ("pp = 4", "pp = 4\n=", "not TOML"),
    ],
)
def test_bad_input_is_one_line_with_the_value(config: Path, old: str, new: str, words: str) -> None:
    text = config.read_text()
    assert old in text
    config.write_text(text.replace(old, new, 1))
    with pytest.raises(UsageError, match=words) as caught:
        plan(str(config))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "words, message",
    [
        (["--rate", "-5mbit"], "-5mbit"),
        (["--rate", "5"], "'5'"),
        (["--latency", "soon"], "soon"),
        (["--sweep", "1mbit..10gbit"], "rate=LOW..HIGH"),
        (["--sweep", "rate=1gbit..1mbit"], "lower"),
        (["--timeline", "/proc/none/x.png"], "cannot write"),
        (["--trace", "/proc/none/x.json"], "cannot write"),
    ],
)
def test_bad_options(config: Path, words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan(str(config), *words)


def test_no_file_and_no_overwriting(config: Path) -> None:
    for words in ((), (str(config) + "x",), ("--init", str(config))):
        with pytest.raises(UsageError):
            plan(*words)


def test_the_simulator_needs_no_torch() -> None:
    code = (
        "import sys, thinwire.planner.simulate, thinwire.planner.critical, thinwire.planner.predict;"
        "assert not any(m.split('.')[0] == 'torch' for m in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", PRESETS)
def test_planned_bytes_are_sent_bytes(name: str) -> None:
    """A channel with these settings sends frames of the planned size, on the first visit and after."""
    shape, wire = (2, 33, 48), preset(name)
    x = torch.randn(shape)
    for setting in (wire.forward, wire.backward):
        if setting is None:
            assert sizes.message_bytes(setting, shape) == x.numel() * x.element_size()
            continue
        cold = codecs.make(**setting.cold) if setting.cold else None
        memory = Delta(cold=cold, gate=setting.gate) if setting.delta else Plain()
        channel = Channel(codecs.make(codec=setting.name, **setting.args), memory)
        for visit in range(2):
            sent = channel.send([7, 8] if setting.delta else "boundary", x)
            assert sizes.message_bytes(setting, shape, cold=visit == 0) == sent.numel()


def test_quantised_gradients_cost_what_the_codec_says() -> None:
    wire = read_wire({"gradient": {"collective": "quantized", "bits": 4}})
    inside, across = sizes.reduction(wire.gradient, [(100, 100), (100,)], 4)
    assert inside == network.Cost()
    assert across == network.two_hop(codecs.Quantize(4).nbytes((10_100,), torch.float32), 4)


@pytest.mark.parametrize(
    "table",
    [
        {"collective": "dense"},
        {"collective": "gather", "codec": {"codec": "topk", "density": 0.01}},
        {"collective": "topk_allgather", "density": 0.01},
        {"collective": "topk_dsa", "density": 0.01},
        {"collective": "gtopk", "density": 0.01},
        {"collective": "low_rank", "rank": 4},
        {"collective": "alternating_low_rank", "rank": 4, "factors": {"collective": "quantized", "bits": 4}},
        {"collective": "hierarchical", "across": {"collective": "ok_topk", "density": 0.01}},
    ],
)
def test_every_collective_is_planned(table: dict[str, Any]) -> None:
    run = small(wire={"gradient": table}, network={"ranks_per_site": 4, "inside_rate": "1gbit"})
    assert run.wire is not None
    sent = predict(run, run.wire).sent[Traffic.GRADIENT]
    dense = predict(run, preset("off")).sent[Traffic.GRADIENT]
    assert 0 < sent <= dense


def test_two_levels_count_what_crosses_inside_too() -> None:
    table = {"collective": "hierarchical", "across": {"collective": "quantized", "bits": 4}}
    sites = {"ranks_per_site": 2, "inside_rate": "1gbit"}
    run = small(model={"tied": False}, mesh={"dp": 4, "pp": 1}, network=sites, wire={"gradient": table})
    assert run.wire is not None
    n = sum(map(values, run.model.stage(0, 1)))
    across = network.two_hop(codecs.Quantize(4).nbytes((n // 2,), torch.float32), 2).nbytes
    assert predict(run, run.wire).sent[Traffic.GRADIENT] == network.dense_ring(4 * n, 2).nbytes + across


def test_model_parameters_and_units() -> None:
    model = Model(layers=24, hidden=1024, seq=1024, vocab=50257)
    total = sum(values(s) for stage in range(4) for s in model.stage(stage, 4)) + model.embedding_values()
    assert total == 24 * (12 * 1024**2 + 13 * 1024) + (50257 + 1024) * 1024 + 2 * 1024  # GPT-2 medium
    cut = list(units(model.stage(1, 4)))
    assert [s for unit in cut for s in unit] == model.stage(1, 4)
    assert all(4 * sum(map(values, unit)) >= UNIT_BYTES for unit in cut[:-1])
    assert model.share(5) == [5, 5, 5, 5, 4]


def test_faster_networks_and_thinner_wires_are_not_slower() -> None:
    run = small(compute={"encode": 1e15, "decode": 1e15})
    seconds = [predict(run.at(rate), preset("off")).makespan for rate in (1e6, 1e7, 1e8, None)]
    assert seconds == sorted(seconds, reverse=True)
    assert predict(run, preset("safe")).makespan < predict(run, preset("bf16")).makespan < seconds[1]


def test_a_step_of_one_micro_batch_is_the_sum_of_its_parts() -> None:
    """Two stages: computing, both codecs, wire and latency each way. One stage, two replicas: then the exchange, by its
    bytes, messages and codec."""
    network_, compute = {"rate": "8mbit", "latency": "3ms"}, {"forward": "10ms", "encode": 1e7, "decode": 2e7}
    common = {"batch": {"microbatches": 1}, "compute": compute, "network": network_}
    ways = {"forward": {"codec": "quantize", "bits": 4}, "backward": {"codec": "quantize", "bits": 8}}
    run = small(model={"tied": False}, mesh={"dp": 1, "pp": 2}, **common)
    wire, shape = read_wire(ways), (1, 32, 64)
    sent = [sizes.message_bytes(setting, shape) for setting in (wire.forward, wire.backward)]
    raw = 4 * values(shape)
    computing = sum(sum(part) for part in (run.work.forward, run.work.backward_input, run.work.backward_weight))
    result = predict(run, wire)
    codecs = 2 * (raw / 1e7 + raw / 2e7)
    assert result.makespan == pytest.approx(computing + sum(sent) / 1e6 + codecs + 3 * 3e-3), "the last one is the vote"
    assert predict(run, preset("off")).makespan == pytest.approx(computing + 2 * raw / 1e6 + 3 * 3e-3)
    run = small(model={"tied": False}, mesh={"dp": 2, "pp": 1}, **common)
    wire = read_wire({"gradient": {"collective": "quantized", "bits": 4}})
    shapes = run.model.stage(0, 1)
    _, cost = sizes.reduction(wire.gradient, shapes, 2)
    raw = 4 * sum(map(values, shapes))
    computing = sum(sum(part) for part in (run.work.forward, run.work.backward_input, run.work.backward_weight))
    expected = computing + cost.nbytes / 1e6 + (cost.latencies + 1) * 3e-3 + raw / 1e7 + raw / 2e7
    assert predict(run, wire).makespan == pytest.approx(expected) and cost.latencies == 1


def test_break_even_lies_where_the_codec_costs_what_it_saves() -> None:
    run = small(compute={"encode": 5e7, "decode": 5e7})
    curves = {c.wire: c for c in sweep(run, [preset("off"), preset("safe")], [1e6, 1e7, 1e8, 1e9, 1e10])}
    found = curves["safe"].faster_than["off"]
    assert found.side == "below" and found.rate is not None
    for factor, faster in ((0.9, True), (1.1, False)):
        there = run.at(found.rate * factor)
        assert (predict(there, preset("safe")).makespan < predict(there, preset("off")).makespan) == faster
    assert curves["off"].faster_than == {}
    for speed, said in ((1e15, "always"), (1e3, "never")):
        run = small(compute={"encode": speed, "decode": speed})
        assert sweep(run, [preset("off"), preset("safe")], [1e6, 1e7])[1].faster_than["off"] == BreakEven(said)


def test_cold_deltas_cost_a_plain_message() -> None:
    run = small()
    cold, warm = (predict(run, preset("paper-aqsgd"), cold=c).sent[Traffic.FORWARD] for c in (True, False))
    assert cold == predict(run, preset("off")).sent[Traffic.FORWARD] + 3 * 8 * (16 + frame.bitmap_bytes(1)) > warm


def test_selected_messages_only() -> None:
    everything = {"codec": "quantize", "bits": 4}
    sent = {
        when: predict(run, run.wire).sent[Traffic.BACKWARD]
        for when in ("always", "epilogue", "critical")
        if (run := small(wire={"backward": {**everything, "when": when}})).wire
    }
    raw, packed = 4 * 32 * 64, sizes.message_bytes(read_wire({"backward": everything}).backward, (1, 32, 64))
    assert sent["always"] == 24 * packed
    assert sent["epilogue"] == (3 + 2 + 1) * packed + (24 - 6) * raw
    assert sent["always"] <= sent["critical"] < 24 * raw


def test_tied_embedding_costs_its_closed_form() -> None:
    values_bytes, run = 4 * 500 * 64, small()
    apart = predict(run, read_wire({"embedding": {"sync": "separate"}})).messages
    fused = predict(run, read_wire({"embedding": {"sync": "fused"}})).messages
    between = Send(Traffic.EMBEDDING, 0, 0)
    own = apart[Send(Traffic.GRADIENT, 0, 1)].hop.nbytes + apart[between].hop.nbytes
    assert own == network.embedding_separate(values_bytes, 2).nbytes
    assert fused[between].hop.nbytes == network.embedding_fused(values_bytes, 2).nbytes
    assert Send(Traffic.GRADIENT, 0, 1) not in fused
    coded = {"embedding": {"collective": "quantized", "bits": 4, "sync": "fused"}}
    nbytes = codecs.Quantize(4).nbytes((500 * 64,), torch.float32)
    assert predict(run, read_wire(coded)).messages[between].hop.nbytes == network.two_hop(nbytes, 2 * 2).nbytes


def test_tied_embedding_by_rows() -> None:
    """A step's rows down, their gradients up, and the owners' ring; it pays while both take less than V/D."""
    run, between = small(), Send(Traffic.EMBEDDING, 0, 0)
    used = run.model.rows(8 * 32)
    assert [Model(8, 64, 32, 49152).rows(n) for n in (4096, 65536)] == [1148, 7156]
    exact = predict(run, read_wire({"embedding": {"sync": "rows"}})).messages
    assert exact[between].hop.nbytes == 2 * (16 + 4 * used * 64) + network.dense_ring(4 * 500 * 64, 2).nbytes
    assert Send(Traffic.GRADIENT, 0, 1) not in exact
    table = {"embedding": {"sync": "rows", "rows_codec": {"codec": "quantize", "bits": 4}}}
    coded = 2 * (16 + codecs.Quantize(4).nbytes((used, 64), torch.float32))
    assert sizes.rows_bytes(codecs.Quantize(4), used, 64) == coded
    assert exact[between].hop.nbytes - predict(run, read_wire(table)).messages[between].hop.nbytes == (
        sizes.rows_bytes(None, used, 64) - coded
    )
    wire = read_wire({"embedding": {"sync": "rows"}})
    for replicas, most in ((1, 245), (2, 120), (4, 58)):
        assert sizes.rows_pay(wire, most, 500, 64, replicas), replicas
        assert not sizes.rows_pay(wire, 500 // (2 * replicas) + 1, 500, 64, replicas), replicas
    quantized = read_wire({"embedding": {"collective": "quantized", "bits": 4, "sync": "rows"}})
    assert sizes.rows_pay(quantized, 30, 500, 64, 1) and not sizes.rows_pay(quantized, 40, 500, 64, 1)


def test_worth_names_the_set() -> None:
    choice, everything = worth(small(), preset("safe"))
    assert choice.result.makespan <= everything.makespan * (1 + 1e-9)
    assert {s.traffic for s in choice.sends} <= {Traffic.FORWARD, Traffic.BACKWARD}


def test_sites_cores_csv_and_flops(tmp_path: Path) -> None:
    from thinwire.planner.actions import write_csv

    far = predict(small(), preset("off")).makespan
    near = predict(small(network={"ranks_per_site": 4, "inside_rate": "1gbit"}), preset("off")).makespan
    assert near < far  # the pipeline stays inside, gradients cross
    crowded = predict(small(compute={"cores": 2}), preset("off"))
    assert crowded.makespan >= 2 * 4 * 8 * 0.03 / 2 and crowded.makespan > far
    write_csv(generate("ZBV", 4, 8), tmp_path / "zbv.csv", messages=True)
    document = {**SMALL, "schedule": {"csv": "zbv.csv"}, "compute": {"flops": 1e9}}
    run = read_run(document, tmp_path)
    assert run.schedule.stages == 8 and run.work.forward[-1] > run.work.forward[0] > 0
    assert predict(run, preset("max")).makespan < predict(run, preset("off")).makespan
    with pytest.raises(UsageError, match=r"zbv.csv.*pp = 2"):
        read_run({**document, "mesh": {"dp": 2, "pp": 2}}, tmp_path)


def test_a_wire_is_what_training_takes() -> None:
    """Mistakes show when the table is read, whatever of it costs anything; `auto` is planned as its most."""
    for table in ({"backward": {"codec": "nonsense"}}, {"gradient": {"collective": "dense", "memory": "nonsense"}}):
        with pytest.raises(UsageError, match="nonsense"):
            read_wire(table)
    assert read_wire({"auto": True}, "max") == read_wire({"preset": "auto"}, "max") == preset("max")


def test_slices_of_tensor_parallel_ranks() -> None:
    """A rank sends its slice of the width, and reduces its slices of matrices; vectors stay whole."""
    one, two = (predict(small(mesh={"tp": tp}), preset("off")) for tp in (1, 2))
    assert two.sent[Traffic.FORWARD] == one.sent[Traffic.FORWARD] / 2
    assert two.sent[Traffic.EMBEDDING] == one.sent[Traffic.EMBEDDING] / 2
    vectors = 4 * 8 * (13 * 64) + 4 * 2 * 64  # of all layers and the last norm, by a ring of two
    assert two.sent[Traffic.GRADIENT] - vectors == (one.sent[Traffic.GRADIENT] - vectors) / 2
    assert two.makespan < one.makespan
    sites = {"ranks_per_site": 2, "shared_uplink": True, "latency": "0ms"}
    shared = predict(small(mesh={"tp": 2}, network=sites), preset("off")).messages
    alone = predict(small(network={"latency": "0ms"}), preset("off")).messages
    for send in (Send(Traffic.FORWARD, 0, 0), Send(Traffic.EMBEDDING, 0, 0)):
        assert shared[send].hop.wire == pytest.approx(alone[send].hop.wire), "both slices leave by one port"
    flops = {"compute": {**SMALL["compute"], "flops": 1e9}}
    half, whole = (read_run({**SMALL, **flops, "mesh": {"pp": 4, "tp": tp}}).work.forward[0] for tp in (2, 1))
    assert half == whole / 2
    for mesh, compute, words in (
        ({"tp": 3}, {}, "tp = 3: must divide hidden = 64"),
        ({"tp": 2}, {"cores": 2}, "cores = 2: with tp = 2"),
    ):
        with pytest.raises(UsageError, match=words):
            small(mesh=mesh, compute=compute)


def test_example_is_the_shipped_file(config: Path) -> None:
    assert read_run(tomllib.loads(config.read_text())).pp == 4


def test_rounds_of_local_steps() -> None:
    """A round costs what its exchange sends; a step its share of it; the least `every` is where the times meet."""
    run = small()
    exact, sparse = rounds_of(run, "diloco"), rounds_of(run, "sparseloco")
    shapes = [s for stage in range(4) for s in run.model.stage(stage, 4)] + [(500, 64)]
    assert exact.cost.nbytes == 4 * sum(map(values, shapes))  # two sites: 2·(P − 1)/P
    codec = codecs.TileTopK(values=codecs.BinMeans())
    coded = codec.for_shapes(shapes)
    assert sparse.cost.nbytes == coded.nbytes((sum(map(values, shapes)),), torch.float32)
    assert exact.step_seconds(run) == pytest.approx(exact.computing + exact.round_seconds(run) / 100)
    slow = predict(run, preset("max")).makespan
    least = exact.every_for(run, slow)
    assert least is not None and exact.computing + exact.round_seconds(run) / least <= slow
    assert exact.computing + exact.round_seconds(run) / (least - 1) > slow
    assert exact.every_for(run, exact.computing / 2) is None and sparse.every_for_share(run) < exact.every_for_share(
        run
    )
    hidden = replace(exact, delay=10**6)
    assert hidden.step_seconds(run) == hidden.computing and hidden.every_for(run, slow) == 1
