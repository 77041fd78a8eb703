"""dp × pp × tp on real processes: a cube equals one process, stopping changes nothing, mistakes are named."""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from test_train_run import PRELOAD, held_out, killed, losses, merged, resumable
from torch import nn
from torch.distributed.tensor import Shard
from train_ranks import MAX, alone, compressed, live, settings, several

from thinwire.collectives import LowRank
from thinwire.config.stages import check_stages, chosen_stages
from thinwire.config.wire import Wire
from thinwire.errors import UsageError
from thinwire.lab import Network, check
from thinwire.planner.actions import Schedule
from thinwire.planner.critical import choose_by
from thinwire.planner.schedule import generate
from thinwire.train import build
from thinwire.train.metrics import read_events
from thinwire.train.model import tensor_parallel as tensor
from thinwire.train.tune.measured import Measured
from thinwire.train.tune.selection import note_small

CUBE = {"dp": 2, "pp": 2, "tp": 2}
STEP_2 = "checkpoints/step-00000002"
BRIEF = {"steps": 4, "warmup": 1, "eps": 1e-4}  # a larger eps: Adam makes rounding of tiny gradients visible
MODEL = {"hidden": 32, "layers": 4, "heads": 4, "kv_heads": 2}
lab = pytest.mark.skipif(not check()[0].ok, reason="this machine forbids network namespaces (thinwire doctor)")


def cube(out, wire=None, **changed):
    document = {"mesh": CUBE, "optim": BRIEF, "run": {"checkpoint_every": 2, "eval_every": 0}}
    given = {name: {**document.get(name, {}), **changed.get(name, {})} for name in {*document, *changed}}
    return settings(out, wire, **{**given, "model": {**MODEL, **changed.get("model", {})}})


def weights(out):
    transformers = pytest.importorskip("transformers")
    return dict(transformers.AutoModelForCausalLM.from_pretrained(out / "model").named_parameters())


@lab
@pytest.mark.lab
@pytest.mark.timeout(280)
def test_a_cube_equals_one_process(four_hosts, tmp_path):
    """Exact wire: loss curve, held-out loss and exported weights of 2×2×2, tied, and untied of four stages; and a
    checkpoint of two slices goes on in one."""
    single = {"tied": {}, "untied": {"tied": False}, "wide": {"kv_heads": 4}}
    four = {"schedule": "Interleaved1F1B", "virtual": 2}
    cubes = {
        "cube": ("tied", cube(tmp_path / "cube")),
        "interleaved": ("untied", cube(tmp_path / "interleaved", mesh=four, model={"tied": False})),
        "V": ("wide", cube(tmp_path / "V", mesh={"schedule": "ZBV", "dp": 1, "tp": 4}, model={"kv_heads": 4})),
    }  # fmt: skip
    runs = [cube(tmp_path / n, model=m, mesh={"dp": 1, "pp": 1, "tp": 1}) for n, m in single.items()]
    four_hosts.run(alone, runs, timeout=100, echo=False)
    ranks = four_hosts.run(several, [(c, False) for _, c in cubes.values()], per_host=2, timeout=250, echo=False)
    merged(ranks)
    shutil.copytree(tmp_path / "cube" / STEP_2, tmp_path / "flat" / STEP_2)
    four_hosts.run(several, [(cube(tmp_path / "flat", mesh={"tp": 1}), True)], timeout=100, echo=False)
    for (step, a), (also, b) in zip(losses(tmp_path / "flat"), losses(tmp_path / "cube")[2:], strict=True):
        assert step == also and abs(a - b) < 1e-5
    for name, (same, _) in cubes.items():
        expected = tmp_path / same
        assert [s for s, _ in losses(tmp_path / name)] == [1, 2, 3, 4]
        for (step, a), (_, b) in zip(losses(tmp_path / name), losses(expected)):
            assert abs(a - b) < 1e-5, (name, step, a, b)
        assert abs(held_out(tmp_path / name)[-1] - held_out(expected)[-1]) < 1e-5
        theirs = weights(expected)
        for weight, value in weights(tmp_path / name).items():
            assert torch.allclose(value, theirs[weight], rtol=0, atol=1e-5), (name, weight)


@lab
@pytest.mark.lab
@pytest.mark.timeout(900 if os.environ.get("THINWIRE_KILLS") else 280)
def test_stopping_and_killing_change_nothing_in_a_cube(four_hosts, tmp_path):
    """Everything compressed: resumed, and killed with -9 at random moments, the weights of an undisturbed run."""
    kills, rng = int(os.environ.get("THINWIRE_KILLS", 1)), random.Random(1)
    wire = {**MAX, "gradient": {**MAX["gradient"], "exact_dims": 0}}  # norms, which all slices share, stay exact anyway
    few = {"samples": 18, "held_out": 0.1}  # two steps an epoch: what is resumed at step 2 is warm
    smooth, again, rough = (cube(tmp_path / name, wire, data=few) for name in ("smooth", "again", "rough"))
    expected = merged(four_hosts.run(several, [(smooth, False)], per_host=2, timeout=100, echo=False))[0]
    shutil.copytree(tmp_path / "smooth" / STEP_2, tmp_path / "again" / STEP_2)
    assert merged(four_hosts.run(several, [(again, True)], per_host=2, timeout=100, echo=False))[0] == expected
    struck = 0
    for attempt in range(8 * kills):
        job = four_hosts.start(live, rough, attempt > 0, per_host=2, echo=False)
        metrics = tmp_path / "rough" / "metrics.jsonl"
        struck += killed(job, rng.randrange(8), metrics, rng.randrange(1, 4) + 3 * attempt, 0.1 * rng.random())
        shutil.rmtree(tmp_path / "rough" / "checkpoints" / "step-00000004", ignore_errors=True)
        if struck >= kills and resumable(tmp_path / "rough"):
            break
    assert struck >= kills and resumable(tmp_path / "rough"), "or nothing would be resumed"
    final = merged(four_hosts.run(several, [(rough, True)], per_host=2, timeout=100, echo=False))[0]
    assert final == expected
    assert losses(tmp_path / "again") == losses(tmp_path / "smooth")[2:]
    assert losses(tmp_path / "rough") == losses(tmp_path / "smooth")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model": {"heads": 4, "kv_heads": 4}, "mesh": {"tp": 8}}, "tp = 8: must divide the 4 attention heads"),
        ({"model": {"kv_heads": 2}, "mesh": {"tp": 4}}, "tp = 4: must divide the 2 key-value heads"),
        ({"model": {"vocab": 265}}, "tp = 2: must divide the 265 tokens of the vocabulary"),
        ({"model": {"ffn": 33}}, "tp = 2: must divide the 33 values of the MLP's width"),
        ({"model": {"type": "gpt2", "kv_heads": 0}}, "tp = 2: not for gpt2; allowed are llama, qwen2"),
        ({"model": {"lora": {"r": 2}}}, "tp = 2: adapters are not cut"),
        ({"wire": {"embedding": {"sync": "separate"}}}, "[wire.embedding] sync = 'separate': a tied model with tp = 2"),
        ({"mesh": {"pp": 5, "microbatches": 5}, "optim": {"batch": 10}}, "4 layers cannot be split into 5 stages"),
    ],
)
def test_what_cannot_be_cut_is_said_in_one_line(tmp_path, changed, said):
    config = cube(tmp_path, **{name: table for name, table in changed.items() if name != "wire"})
    with pytest.raises(UsageError) as error:
        build.check(replace(config, wire=changed.get("wire", {})))
    assert said in str(error.value) and "\n" not in str(error.value)


# --- checkpoints of slices


@pytest.mark.parametrize("cut", [0, 1])
@pytest.mark.parametrize(("had", "has"), [(1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (4, 2), (1, 4)])
def test_slices_are_read_back_in_any_number(had, has, cut):
    """Stored in `had` slices, every one of `has` ranks reads what is its own of the whole; a moment's step is whole."""
    whole = torch.arange(96.0).view(8, 12)
    if had == 1:
        state = {"w": whole, "step": torch.tensor(3.0)}
    else:
        state = {f"w|{i}of{had}": part for i, part in enumerate(whole.chunk(had, cut))} | {"step": torch.tensor(3.0)}
    for rank, expected in enumerate(whole.chunk(has, cut)):
        parameter = nn.Parameter(expected) if has == 1 else tensor.Slice(expected)
        parameter.whole = SimpleNamespace(placements=(Shard(cut),))
        mine = {name: value for name, value in state.items() if tensor.concerns(name, (rank, has))}
        assert torch.equal(tensor.read_back("w", mine, parameter, (rank, has)), expected)
        assert tensor.read_back("step", mine, parameter, (rank, has)) == 3.0


# --- selective stages


@pytest.mark.parametrize(
    ("rule", "count", "chosen"),
    [
        (0.75, 4, {0, 1, 2}),
        (0.75, 8, set(range(6))),
        (1, 3, {0, 1, 2}),
        (0, 4, set()),
        (0.3, 4, {0, 1}),
        ([2, 0], 4, {0, 2}),
    ],
)
def test_a_share_is_of_the_earliest_stages(rule, count, chosen):
    assert chosen_stages(check_stages(rule), count) == chosen


def evenly(schedule: Schedule, exact: float, packed: float) -> frozenset[int]:
    """Of even stages whose messages take 0.1, the ones whose gradients slack picks."""
    count = schedule.stages
    ways = ("forward", "backward")
    measured = Measured(
        [1.0] * count, [2.0] * count, {way: [80.0] * count for way in ways}, {way: [0.0] * count for way in ways},
        {way: [1.0] for way in ways}, {way: [[0.0, 0.0]] for way in ways},
        {"gradient": [[exact] * count, [packed] * count]},
    )  # fmt: skip
    plain, full = (measured.step(schedule, {"forward": 0, "backward": 0, "gradient": level}) for level in (0, 1))
    return choose_by(plain, full, {}, "slack").gradients


def test_slack_picks_the_stages_that_the_step_waits_for():
    """1F1B: stage s ends s·(B + c) before stage 0, so an exact exchange pays there while it is shorter than stage 0's
    compressed one plus that (sheet of Optimus-CC); per virtual stage in a V."""
    one = generate("1F1B", 4, 8, None)
    assert evenly(one, 0.5, 0.6) == frozenset(), "nothing to gain"
    assert evenly(one, 2.5, 1.0) == {0}
    assert evenly(one, 5.0, 1.0) == {0, 1}
    assert evenly(one, 50.0, 1.0) == {0, 1, 2, 3}
    v = generate("ZBVZeroBubble", 2, 8, None)
    assert evenly(v, 2.0, 0.3) == {0, 1, 2}, "stage 3, on the rank of stage 0, ends its backward long before"


def test_a_rank_is_of_each_tensor():
    """A key projection of 896 × 128 is too small for rank 128 and stays exact; it lowers nobody else's."""
    said: list[str] = []
    low = Wire.of("paper-optimus").gradient.collective
    note_small(low, [(4096, 4096), (4096,)], said.append)
    assert not said
    note_small(low, [(896, 128), (896, 896), (896,)], said.append)
    assert "rank = 128: 1 of 2 matrices" in said[0]
    shapes = ((896, 128), (896, 896), (16, 3, 8, 8))
    assert [low.rank_of(shape) for shape in shapes] == [0, 128, 0]
    assert [LowRank(128, shrink=4).rank_of(shape) for shape in shapes] == [28, 112, 3]


@lab
@pytest.mark.lab
@pytest.mark.timeout(200)
def test_selected_stages_only_are_compressed(tmp_path):
    """Interleaved, four stages of one layer on two ranks: by share, by list, by slack; replicas agree."""
    low = {"collective": "low_rank", "rank": 2}
    mesh = {"dp": 2, "pp": 2, "tp": 1, "schedule": "Interleaved1F1B", "virtual": 2}
    rules = {"share": 0.75, "list": [3, 0], "slack": "slack", "none": 0}
    runs = [cube(tmp_path / n, {"gradient": {**low, "stages": rule}}, mesh=mesh) for n, rule in rules.items()]
    runs.append(cube(tmp_path / "optimus", {"preset": "paper-optimus"}, mesh=mesh))
    with Network(hosts=4, rate="20mbit", preload=PRELOAD) as net:
        ranks = net.run(compressed, runs, timeout=150, echo=False)
    assert ranks[:2] == ranks[2:]
    both = [a | b for a, b in zip(*ranks[:2])]
    assert both[:2] == [{0, 1, 2}, {0, 3}] and both[3] == set()
    assert both[4] == {0, 1, 2}, "the paper's three quarters"
    said = [e["text"] for e in read_events(tmp_path / "slack" / "metrics.jsonl") if e["kind"] == "note"]
    assert f"of stages {sorted(both[2]) or 'none'}" in said[-1]
