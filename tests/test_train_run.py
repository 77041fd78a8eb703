"""`thinwire train` on real processes: a mesh equals one process, stopping changes nothing, killing changes nothing."""

from __future__ import annotations

import os
import random
import shutil

import pytest
from train_ranks import MAX, alone, live, norms, settings, several, troubled

from thinwire.lab import check
from thinwire.lab.errors import RankFailed
from thinwire.planner.settings import read_wire
from thinwire.planner.sizes import message_bytes
from thinwire.train.metrics import read_events

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(not check()[0].ok, reason="this machine forbids network namespaces (thinwire doctor)"),
]
PRELOAD = ("train_warm",)
SQUARE = {"dp": 2, "pp": 2}
FEW = {"samples": 24, "held_out": 0.0}  # three steps an epoch: deltas are warm from the fourth on
WAYS = ("forward", "backward")
BYTES = tuple(f"{kind}_bytes" for kind in (*WAYS, "gradient", "embedding", "raw"))


def steps(out) -> list[dict]:
    return [e for e in read_events(out / "metrics.jsonl") if e["kind"] == "step"]


def losses(out) -> list[tuple[int, float]]:
    return [(e["step"], e["loss"]) for e in steps(out)]


def held_out(out) -> list[float]:
    return [e["held_out"] for e in read_events(out / "metrics.jsonl") if e["kind"] == "eval"]


def killed(job, rank, metrics, writes, after):
    """kill -9 of a rank, `after` seconds from when the run has written to its metrics so often: whether it still ran.
    Survivors that hang are an error."""
    seen = {metrics.stat().st_mtime_ns if metrics.exists() else 0}
    while not job.done and len(seen) <= writes:
        job.watch(0.01)
        seen.add(metrics.stat().st_mtime_ns if metrics.exists() else 0)
    job.watch(after)
    if not job.done:
        job.kill(rank)
    try:
        job.wait(60)
    except RankFailed:
        return True
    return False


def resumable(out) -> bool:
    """Is there a checkpoint?"""
    return any((out / "checkpoints").glob("step-????????"))


def merged(ranks) -> list[dict[str, float]]:
    """Per run, all ranks' parameters together; replicas must agree to the bit."""
    out = []
    for runs in zip(*ranks):
        whole: dict[str, float] = {}
        for one in runs:
            for name, value in one.items():
                assert whole.setdefault(name, value) == value, f"{name} differs between replicas"
        out.append(whole)
    return out


@pytest.mark.timeout(280)
def test_a_mesh_equals_one_process(four_hosts, tmp_path):
    """Exact wire: 2×2 under several schedules, tied and untied, with accumulation: one loss curve."""
    meshes = {
        "1F1B": {**SQUARE}, "GPipe": {**SQUARE, "schedule": "GPipe"},
        "interleaved": {**SQUARE, "schedule": "Interleaved1F1B", "virtual": 2},
        "V": {**SQUARE, "schedule": "ZBVZeroBubble", "split": "time"}, "ahead": {**SQUARE, "ahead": 2},
    }  # fmt: skip
    single = [settings(tmp_path / f"alone{tied}", model={"tied": tied}) for tied in (True, False)]
    four_hosts.run(alone, single, timeout=100, echo=False)
    runs = [settings(tmp_path / name, mesh=mesh) for name, mesh in meshes.items()]
    runs.append(settings(tmp_path / "untied", mesh=SQUARE, model={"tied": False}))
    runs.append(settings(tmp_path / "accumulated", mesh=SQUARE, optim={"accumulate": 2}))
    separate = {"embedding": {"sync": "separate"}}
    runs.append(settings(tmp_path / "separate", separate, mesh=SQUARE))
    merged(four_hosts.run(several, [(config, False) for config in runs], timeout=160, echo=False))
    for name in (*meshes, "untied", "accumulated", "separate"):
        expected = tmp_path / ("aloneFalse" if name == "untied" else "aloneTrue")
        assert [s for s, _ in losses(tmp_path / name)] == list(range(1, 10))
        for (step, a), (_, b) in zip(losses(tmp_path / name), losses(expected)):
            assert abs(a - b) < 1e-5, (name, step, a, b)
        for a, b in zip(held_out(tmp_path / name), held_out(expected)):
            assert abs(a - b) < 1e-5, (name, a, b)


@pytest.mark.timeout(280)
def test_resuming_is_bitwise(four_hosts, tmp_path):
    """From any checkpoint, uncompressed and with everything compressed: the same losses, the same weights; bytes and
    seconds are counted on."""
    wires = {"off": {}, "max": MAX}
    first = [(settings(tmp_path / name, wire, mesh=SQUARE, data=FEW), False) for name, wire in wires.items()]
    whole = merged(four_hosts.run(several, first, timeout=120, echo=False))
    again = []
    for name, wire in wires.items():
        for step in (3, 6):
            out = tmp_path / f"{name}{step}"
            folder = f"step-{step:08d}"
            shutil.copytree(tmp_path / name / "checkpoints" / folder, out / "checkpoints" / folder)
            again.append((settings(out, wire, mesh=SQUARE, data=FEW), True))
    resumed = merged(four_hosts.run(several, again, timeout=120, echo=False))
    for i, (config, _) in enumerate(again):
        name = config.run.out
        assert resumed[i] == whole[i // 2], name
        before, after = steps(tmp_path / ("off" if i < 2 else "max")), steps(tmp_path / name)
        at = 3 + 3 * (i % 2)
        for key in ("step", "loss", "norm", "lr", "hit_rate", *BYTES):
            assert [e[key] for e in after] == [e[key] for e in before[at:]] != [], (name, key)
        assert [e["ranks"]["sent"] for e in after] == [e["ranks"]["sent"] for e in before[at:]], name
        assert after[0]["seconds"] > before[at - 1]["seconds"] / 2  # a checkpoint holds the clock of one rank
    _check_bytes(steps(tmp_path / "max"), wires["max"])


def _check_bytes(events, wire) -> None:
    """What a step sends forward and back is what the planner says of these messages, cold and then warm."""
    shape, messages = (8 // 2 // 2, 32, 32), 2 * 2  # of both replicas' two micro-batches, over one boundary
    planned = read_wire(wire)
    for at, event in enumerate(events):
        assert sum(event["ranks"]["sent"]) == sum(event[key] for key in BYTES if key != "raw_bytes")
        seen = event["ranks"]["errors"]  # the first stage of each replica sends forward, the last one backward
        assert [e is not None for e in seen["forward"]] == [True, False, True, False]
        assert [e is not None for e in seen["backward"]] == [False, True, False, True]
        sent = {way: event[f"{way}_bytes"] - (events[at - 1][f"{way}_bytes"] if at else 0) for way in WAYS}
        assert sent["forward"] == messages * message_bytes(planned.forward, shape, cold=at < 3), (at, sent)
        assert sent["backward"] == messages * message_bytes(planned.backward, shape), (at, sent)
    assert [e["hit_rate"] for e in events[:6]] == [0.0] * 3 + [1.0] * 3  # of the step, not since the start
    assert [(e["cold"], e["warm"]) for e in events[2:4]] == [(16, 0), (0, 16)]  # eight samples at both ends


@pytest.mark.timeout(120)
def test_a_step_that_failed_on_one_rank_leaves_no_trace_on_any(four_hosts, tmp_path):
    """NaN in one weight's gradient, of the last stage of one replica; and a tied copy that differs is made equal."""
    config = settings(tmp_path / "out", MAX, mesh=SQUARE)
    ranks = four_hosts.run(troubled, config, timeout=100, echo=False)
    for rank in ranks:
        assert rank.changed == [] and rank.stops and rank.skips == [1, 1] and rank.healed == 1, rank
    assert len({rank.copy for rank in ranks}) == 1
    events = steps(tmp_path / "out")
    assert [e["norm"] is None for e in events] == [False, False, True, False, False]
    assert [(e["skips"], e["healed"]) for e in events] == [(0, 0), (0, 0), (1, 0), (1, 1), (1, 1)]


@pytest.mark.timeout(280)
def test_resuming_on_another_mesh(four_hosts, tmp_path):
    """2×2 stopped, then 4×1 and 1×4: without compression one loss curve; with it, it goes on."""
    meshes = {"wide": {"dp": 4, "pp": 1}, "deep": {"dp": 1, "pp": 4, "microbatches": 4}}
    first = [(settings(tmp_path / n, w, mesh=SQUARE), False) for n, w in (("off", {}), ("max", MAX))]
    four_hosts.run(several, first, timeout=120, echo=False)
    again = []
    for name, wire in (("off", {}), ("max", MAX)):
        for shape, mesh in meshes.items():
            out = tmp_path / f"{name}-{shape}"
            shutil.copytree(tmp_path / name / "checkpoints" / "step-00000006", out / "checkpoints" / "step-00000006")
            again.append((settings(out, wire, mesh=mesh), True))
    merged(four_hosts.run(several, again, timeout=120, echo=False))
    for shape in meshes:
        last = [e for e in read_events(tmp_path / f"off-{shape}" / "metrics.jsonl") if e["kind"] == "step"][-1]
        sent = sum(last[f"{kind}_bytes"] for kind in ("forward", "backward", "gradient", "embedding"))
        assert 0.97 < last["raw_bytes"] / sent < 1.03, shape  # nothing is compressed
        for (step, a), (_, b) in zip(losses(tmp_path / f"off-{shape}"), losses(tmp_path / "off")[6:]):
            assert abs(a - b) < 1e-5, (shape, step, a, b)
        assert [s for s, _ in losses(tmp_path / f"max-{shape}")] == [7, 8, 9]
        assert held_out(tmp_path / f"max-{shape}")[-1] < held_out(tmp_path / "max")[0]


@pytest.mark.timeout(600 if os.environ.get("THINWIRE_KILLS") else 280)
def test_killed_ranks_change_nothing(four_hosts, tmp_path):
    """kill -9 of a random rank at a random moment, restart with --resume: the weights of an undisturbed run."""
    kills, rng = int(os.environ.get("THINWIRE_KILLS", 2)), random.Random(int(os.environ.get("THINWIRE_SEED", 0)))
    smooth, rough = (
        settings(tmp_path / n, MAX, mesh=SQUARE, data=FEW, run={"checkpoint_every": 2}) for n in ("smooth", "rough")
    )
    expected = merged(four_hosts.run(several, [(smooth, False)], timeout=100, echo=False))[0]
    step = read_events(tmp_path / "smooth" / "metrics.jsonl")[-1]["seconds"] / 9
    struck = 0
    for attempt in range(8 * kills):
        job = four_hosts.start(live, rough, attempt > 0, echo=False)
        metrics = tmp_path / "rough" / "metrics.jsonl"
        struck += killed(job, rng.randrange(4), metrics, rng.randrange(1, 4) + 3 * attempt, step * rng.random())
        if (tmp_path / "rough" / "checkpoints" / "step-00000009").exists():
            shutil.rmtree(tmp_path / "rough" / "checkpoints" / "step-00000009")  # go on from an earlier one
        if struck >= kills and resumable(tmp_path / "rough"):
            break
    assert struck >= kills and resumable(tmp_path / "rough"), "or nothing would be resumed"
    final = merged(four_hosts.run(several, [(rough, True)], timeout=100, echo=False))[0]
    assert final == expected
    assert losses(tmp_path / "rough") == losses(tmp_path / "smooth")


@pytest.mark.timeout(280)
def test_variants_train_and_are_loaded_back(four_hosts, tmp_path):
    """FrozenAdam, LoRA with a first stage that has nothing to train, GPT-2 under bf16: they learn, resume, and load."""
    frozen = {"preset": "paper-aqsgd"}
    lora = {"tied": True, "lora": {"r": 4, "from_layer": 2}}
    runs = {
        "frozen": settings(tmp_path / "frozen", frozen, mesh=SQUARE, optim={"name": "frozen_adam", "freeze_after": 4}),
        "lora": settings(tmp_path / "lora", MAX, mesh=SQUARE, model=lora, optim={"lr": 3e-2}),
        "gpt2": settings(
            tmp_path / "gpt2", MAX, mesh=SQUARE, model={"type": "gpt2"}, run={"autocast": "bf16", "recompute": True}
        ),
    }
    first = merged(four_hosts.run(several, [(config, False) for config in runs.values()], timeout=160, echo=False))
    for name in runs:
        shutil.rmtree(tmp_path / name / "checkpoints" / "step-00000009")
    again = merged(four_hosts.run(several, [(config, True) for config in runs.values()], timeout=120, echo=False))
    brief = {"name": "frozen_adam", "freeze_after": 1, "steps": 2}
    seen = four_hosts.run(norms, settings(tmp_path / "norms", frozen, mesh=SQUARE, optim=brief), timeout=60, echo=False)
    assert first == again
    assert len(seen[0]) == 2 and all(one == seen[0] for one in seen), "all clip by the same, though gradients are local"
    for name in runs:
        assert held_out(tmp_path / name)[-1] < held_out(tmp_path / name)[0] - 0.05, name
    transformers = pytest.importorskip("transformers")
    for name in ("frozen", "gpt2"):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name / "model")
        weights = dict(model.named_parameters())
        assert weights and all(p.isfinite().all() for p in weights.values())
    assert (tmp_path / "lora" / "model" / "adapter_model.safetensors").exists()
