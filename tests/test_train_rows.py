"""`thinwire train` with the tied embedding by rows: trains as one process does, in the bytes of the batches' rows."""

from __future__ import annotations

import shutil

import pytest
import torch
from rank_launch import on_a_network
from test_train_run import PRELOAD, SQUARE, held_out, losses, merged, steps
from train_ranks import alone, decided, settings, several, spoilt_rows, used_rows

from thinwire.lab import Network
from thinwire.train.metrics import read_events

pytestmark = on_a_network
ROWS = {"embedding": {"sync": "rows"}}
CODED = {"embedding": {"sync": "rows", "rows_codec": {"codec": "quantize", "bits": 4}}}
LINE = {"dp": 1, "pp": 2}
WIDE = {"vocab": 1024}
WIDTH, HEADER = 32, 16


def run(out, wire, **changed):
    return settings(out, wire, **{"model": WIDE, **changed})


def check_same_curve(out, expected, tolerance):
    assert [s for s, _ in losses(out)] == list(range(1, 10))
    for (step, a), (_, b) in zip(losses(out), losses(expected)):
        assert abs(a - b) < tolerance, (out.name, step, a, b)
    for a, b in zip(held_out(out), held_out(expected), strict=True):
        assert abs(a - b) < tolerance, (out.name, a, b)


def check_bytes(out, used):
    """Every step: the rows of every pair's batch down, and their gradients up; between owners a dense ring."""
    for event, rows in zip(steps(out), used, strict=True):
        pairs = sum(2 * (HEADER + 4 * WIDTH * count) for count in rows)
        ring = 2 * 4 * WIDE["vocab"] * WIDTH * (len(rows) - 1)
        before = 0 if event["step"] == 1 else steps(out)[event["step"] - 2]["embedding_bytes"]
        assert event["embedding_bytes"] - before == pairs + ring, (out.name, event["step"])


@pytest.mark.timeout(280)
def test_by_rows_equals_one_process(tmp_path):
    """Exact rows on 1×2: the curve of one process; bytes as computed; coded ones near it; both resumed to the bit, and
    by a fused run; fused where that sends less, which is said; rows are what `auto` takes."""
    with Network(hosts=2, preload=PRELOAD) as net:
        net.run(alone, [run(tmp_path / "alone", {})], timeout=100, echo=False)
        line = {name: run(tmp_path / name, wire, mesh=LINE) for name, wire in (("line", ROWS), ("coded", CODED))}
        whole = merged(net.run(several, [(config, False) for config in line.values()], timeout=100, echo=False))
        for name in line:
            shutil.rmtree(tmp_path / name / "checkpoints" / "step-00000009")
        again = merged(net.run(several, [(config, True) for config in line.values()], timeout=100, echo=False))
        coarse = {"embedding": {"collective": "quantized", "bits": 4, "sync": "rows"}}
        net.run(several, [(run(tmp_path / "few", coarse, mesh=LINE, model={}), False)], timeout=60, echo=False)
        auto = run(tmp_path / "auto", {"preset": "auto"}, mesh=LINE, optim={"steps": 2})
        picked = net.run(decided, [(auto, False), (auto, True)], timeout=60, echo=False)
        other = run(tmp_path / "line", {"embedding": {"sync": "fused"}}, mesh=LINE)
        shutil.rmtree(tmp_path / "line" / "checkpoints" / "step-00000009")
        before = losses(tmp_path / "line"), used_rows(line["line"])
        check_bytes(tmp_path / "line", before[1])
        net.run(several, [(other, True)], timeout=100, echo=False)
    assert again == whole
    assert all(one.decision.wire["embedding"] == {"sync": "rows"} for rank in picked for one in rank)
    notes = [e["text"] for e in read_events(tmp_path / "few" / "metrics.jsonl") if e["kind"] == "note"]
    assert len(notes) == 1 and "so fused sends less and is used" in notes[0], notes
    check_same_curve(tmp_path / "line", tmp_path / "alone", 1e-5)  # its last steps fused
    assert all(abs(a - b) < 0.02 for (_, a), (_, b) in zip(losses(tmp_path / "coded"), before[0]))
    assert steps(tmp_path / "coded")[-1]["embedding_bytes"] < steps(tmp_path / "line")[5]["embedding_bytes"] / 2


@pytest.mark.timeout(280)
def test_by_rows_over_replicas(four_hosts, tmp_path):
    """On 2×2, under three schedules, with accumulation, FrozenAdam and GPT-2: the curve of one process, or of fused;
    bytes as computed; the owner's weight is exported; a step that is skipped leaves both ends equal, and
    owners that differ are made equal."""
    frozen = {"optim": {"name": "frozen_adam", "freeze_after": 4}}
    runs = {
        "alone": run(tmp_path / "alone", {}, mesh={"dp": 4, "pp": 1}),
        "square": run(tmp_path / "square", ROWS, mesh=SQUARE),
        "accumulated": run(tmp_path / "accumulated", ROWS, mesh=SQUARE, optim={"accumulate": 2}),
        "interleaved": run(
            tmp_path / "interleaved", ROWS, mesh={**SQUARE, "schedule": "InterleavedZeroBubble", "virtual": 2}
        ),
        "V": run(tmp_path / "V", ROWS, mesh={**SQUARE, "schedule": "ZBVZeroBubble"}),
        "frozen": run(tmp_path / "frozen", {"embedding": {"sync": "fused"}}, mesh=SQUARE, **frozen),
        "frozen rows": run(tmp_path / "frozen rows", ROWS, mesh=SQUARE, **frozen),
        "gpt2": run(tmp_path / "gpt2", CODED, mesh=SQUARE, model={"type": "gpt2", **WIDE}),
    }
    weights = dict(
        zip(runs, merged(four_hosts.run(several, [(c, False) for c in runs.values()], timeout=200, echo=False)))
    )
    found = four_hosts.run(spoilt_rows, run(tmp_path / "spoilt", CODED, mesh=SQUARE), timeout=60, echo=False)
    for name in ("square", "accumulated", "interleaved", "V"):
        check_same_curve(tmp_path / name, tmp_path / "alone", 1e-5)
    check_same_curve(tmp_path / "frozen rows", tmp_path / "frozen", 1e-5)
    check_bytes(tmp_path / "square", used_rows(runs["square"]))
    assert "model.embed_tokens.weight" not in weights["square"] and "lm_head.weight" in weights["square"]
    assert held_out(tmp_path / "gpt2")[-1] < held_out(tmp_path / "gpt2")[0] - 0.05
    assert list(found) == [([], [], 1, 0), ([], [], 1, 1)] * 2
    transformers = pytest.importorskip("transformers")
    for name in ("square", "gpt2"):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name / "model")
        table = model.get_input_embeddings().weight
        assert model.lm_head.weight is table
        total = float((table.detach().double().flatten() * torch.arange(1, table.numel() + 1).double().sqrt()).sum())
        assert total == weights[name]["lm_head.weight"]
