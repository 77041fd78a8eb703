"""thinwire/bench/one_process: a run of `thinwire train` in one process has the bits of real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_launch import launch, on_a_network
from train_ranks import several

from thinwire.bench.one_process.training import OneProcess
from thinwire.errors import UsageError
from thinwire.lab import Network
from thinwire.memory.deferred import DeferredChecks, fetch
from thinwire.memory.stats import Stats
from thinwire.train.config.sections import TrainConfig, read_config
from thinwire.train.metrics import METRICS, read_events

LAZY = {way: {"codec": "quantize", "bits": 3, "memory": "error_feedback"} for way in ("forward", "backward")}
KINDS = ("forward", "backward", "gradient", "embedding")
WORDS = ["plain", "thin", "dense", "warm", "cold", "sparse", "exact", "late", "early", "wide"]


def run(out: Any, wire: dict[str, Any], **changed: dict[str, Any]) -> TrainConfig:
    document = {
        "model": {"hidden": 32, "layers": 4, "heads": 4},
        "data": {"seq_len": 16, "corpus_bytes": 3000, "held_out": 0.2},
        "mesh": {"pp": 2, "microbatches": 2}, "optim": {"batch": 8, "epochs": 2, "warmup": 2, "lr": 3e-3},
        "run": {"eval_every": 5, "checkpoint_every": 0, "loggers": []},
    }  # fmt: skip
    for section, keys in changed.items():
        document[section] = {**document.get(section, {}), **keys}
    document["run"] |= {"out": str(out)}
    return read_config({**document, "wire": wire})


def classify(out: Any, wire: dict[str, Any], table: Any) -> TrainConfig:
    """Of an encoder."""
    rows = [f"{a} {b} {c}\t{int(a < c)}" for a in WORDS for b in WORDS[:5] for c in WORDS[:2]]
    table.write_text("\n".join(["sentence\tlabel", *rows]))
    data = {"paths": [str(table)], "columns": ["sentence"], "held_out": 0.2, "seq_len": 24}
    return run(out, wire, model={"type": "bert"}, data=data, task={"kind": "classify"}, optim={"accumulate": 2})


def sums(own: dict[str, torch.nn.Parameter]) -> dict[str, float]:
    """As train_ranks.trained has them."""
    weights = {n: torch.arange(1, p.numel() + 1).double().sqrt() for n, p in own.items()}
    return {n: float((p.detach().double().flatten() * weights[n]).sum()) for n, p in own.items()}


@on_a_network[0]
@on_a_network[1]
@pytest.mark.timeout(180)
def test_one_process_has_the_bits_of_real_ranks(one_thread, tmp_path):
    """Losses, held-out losses and weights: a tied model under `max` and as AQ-SGD, first epoch exact and second not; an
    encoder with accumulation and lazy error both ways; gradients compressed in the epilogue only."""
    late = {"backward": {"codec": "low_rank", "rank": 2, "memory": "error_feedback", "when": "epilogue"}}
    compare(2, [
        run(tmp_path / "max", {"preset": "max"}),
        run(tmp_path / "aqsgd", {"preset": "paper-aqsgd"}, model={"tied": True}),
        classify(tmp_path / "encoder", LAZY, tmp_path / "rows.tsv"),
        run(tmp_path / "late", late, run={"autocast": "bf16"}),
    ])  # fmt: skip


@on_a_network[0]
@on_a_network[1]
@pytest.mark.timeout(180)
def test_replicas_in_one_process_have_the_bits_of_real_ranks(one_thread, tmp_path):
    """Two replicas of two stages: `max` with a tied model; AQ-SGD end to end as published, with FrozenAdam; low-rank
    gradients of the first stage only; nothing compressed, copies of the embedding apart."""
    mesh, frozen = {"dp": 2}, {"name": "frozen_adam", "freeze_after": "epoch"}
    compare(4, [
        run(tmp_path / "max", {"preset": "max"}, model={"tied": True}, mesh=mesh),
        run(tmp_path / "aqsgd", {"preset": "paper-aqsgd"}, model={"tied": True}, mesh=mesh, optim=frozen),
        run(tmp_path / "optimus", {"preset": "paper-optimus"}, mesh=mesh, optim={"accumulate": 2}),
        run(tmp_path / "off", {}, model={"tied": True}, mesh=mesh),
    ])  # fmt: skip


def compare(ranks: int, configs: list[TrainConfig]) -> None:
    """These runs through real ranks, and each in this process."""
    with Network(hosts=ranks, preload=("train_warm", "transformers.models.bert.modeling_bert")) as net:
        trained = launch(net, several, [(config, False) for config in configs], timeout=150)
    for number, config in enumerate(configs):
        here = OneProcess(config)
        events = here.fit()
        there = read_events(f"{config.run.out}/{METRICS}")
        for kind, key in (("step", "loss"), ("eval", "held_out")):
            mine, theirs = ([e[key] for e in found if e["kind"] == kind] for found in (events, there))
            assert mine == pytest.approx(theirs, rel=1e-6) and len(mine) > 2, (config.run.out, kind)
        assert [sums(own) for own in here.named] * config.mesh.dp == [rank[number] for rank in trained], config.run.out
        last = [e for e in there if e["kind"] == "step"][-1]
        mine, theirs = here.sent(), {kind: last[f"{kind}_bytes"] for kind in KINDS}
        if config.optim.name == "frozen_adam":  # sends when its step's event has been written
            assert 0 < mine["gradient"] - theirs["gradient"] <= 3 * mine["gradient"] // here.steps
            theirs["gradient"] = mine["gradient"]
        assert mine == theirs, config.run.out


def test_what_one_process_cannot_do_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"\[mesh\] tp: a run in one process has one site"):
        OneProcess(run(tmp_path, {}, mesh={"tp": 2}))
    with pytest.raises(UsageError, match="sync = 'rows': not in one process"):
        OneProcess(run(tmp_path, {"embedding": {"sync": "rows"}}))


def test_checks_of_several_channels_are_read_together():
    """Each keeps its own: what was damaged, what was not finite, and that this end sent it."""
    first, none, last = DeferredChecks(), DeferredChecks(), DeferredChecks()
    yes, no = torch.tensor(True), torch.tensor(False)
    for checks, key, good, finite in ((first, "a", None, yes), (first, "b", no, yes), (last, 3, yes, no)):
        checks.add(key, good, finite)
    fetch([first, none, last])
    assert [check.good is None for check in first.open] == [True, False]
    found = [checks.resolve(Stats()) for checks in (first, none, last)]
    assert found == [[(["b"], True)], [], [([3], False)]]
