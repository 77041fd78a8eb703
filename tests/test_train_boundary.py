"""`[boundary]`: a run whose boundaries learn is resumed bit for bit, and its exported model has the run's loss."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rank_launch import on_a_network
from safetensors.torch import save_file
from train_ranks import settings, several

import thinwire as tw
from thinwire.boundaries.stiefel import orthonormal
from thinwire.errors import UsageError
from thinwire.lab import Network
from thinwire.train.build import check
from thinwire.train.config.boundary import BoundaryConfig
from thinwire.train.config.sections import ModelConfig, TrainConfig
from thinwire.train.data.batches import held_out_batches
from thinwire.train.data.samples import IGNORED
from thinwire.train.metrics import read_events
from thinwire.train.model.boundaries import FILE
from thinwire.train.model.opening import Opening

PRELOAD = ("train_warm",)
LEARNS = BoundaryConfig(rank=8, anchors=2, rate=0.5)


def bounded(out: Path, boundary: BoundaryConfig = LEARNS, path: Path | None = None, **changed) -> TrainConfig:
    mesh = {"pp": 2, **changed.pop("mesh", {})}
    wire = changed.pop("wire", {"preset": "scratch"})
    config = settings(out, wire, mesh=mesh, optim={"steps": 6}, **changed)
    model = config.model if path is None else ModelConfig(path=str(path))
    return replace(config, boundary=boundary, model=model)


def exported_loss(config: TrainConfig, attached: bool) -> float:
    """Held-out loss of the model that transformers loads."""
    from transformers import AutoModelForCausalLM

    folder = Path(config.run.out) / "model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    if attached:
        tw.parallel.attach_boundaries(model, folder)
    total = labels = 0.0
    for batch in held_out_batches(check(config).samples, config.optim.batch, 0, 1):
        with torch.no_grad():
            logits = model(input_ids=batch.inputs).logits
        total += float(
            torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED, reduction="sum"
            )
        )
        labels += float((batch.labels != IGNORED).sum())
    return total / labels


def last_held_out(out: Path) -> float:
    return [e["held_out"] for e in read_events(out / "metrics.jsonl") if e["kind"] == "eval"][-1]


@on_a_network[0]
@on_a_network[1]
@pytest.mark.timeout(200)
def test_a_run_resumes_bitwise_and_its_model_keeps_its_boundaries(tmp_path):
    whole, again = bounded(tmp_path / "whole"), bounded(tmp_path / "again")
    opens = {"path": tmp_path / "whole" / "model", "data": {"tokenizer": "bytes"}}
    opened, further = (bounded(tmp_path / name, BoundaryConfig(open=5), **opens) for name in ("opened", "further"))
    with Network(hosts=2, preload=PRELOAD) as net:
        first = net.run(several, [(whole, False), (opened, False)], timeout=80, echo=False)
        shutil.copytree(*(tmp_path / run / "checkpoints/step-00000003" for run in ("whole", "again")))
        shutil.copytree(*(tmp_path / run / "checkpoints/step-00000003" for run in ("opened", "further")))
        resumed = net.run(several, [(again, True), (further, True)], timeout=80, echo=False)
    assert list(first) == list(resumed)
    # opened little by little it is a plain model, also while it is evaluated
    assert exported_loss(opened, attached=False) == pytest.approx(last_held_out(tmp_path / "opened"), rel=1e-5)
    assert not (tmp_path / "opened/model/boundaries.safetensors").exists()
    events = read_events(tmp_path / "whole" / "metrics.jsonl")
    held_out = last_held_out(tmp_path / "whole")
    assert last_held_out(tmp_path / "again") == held_out
    assert exported_loss(whole, attached=True) == pytest.approx(held_out, rel=1e-5)
    assert abs(exported_loss(whole, attached=False) - held_out) > 1e-3 * held_out  # it computes something else
    sent = [e["gradient_bytes"] for e in events if e["kind"] == "step"]
    own = 16 + 4 * (32 * 8 + 2 * (264 + 32))  # a header, basis, tokens and lift; 264: tokens of the bytes' tokenizer
    assert {b - a for a, b in itertools.pairwise(sent)} == {2 * own}


@on_a_network[0]
@on_a_network[1]
@pytest.mark.timeout(200)
def test_a_run_over_fitted_links_resumes_bitwise_and_its_model_is_plain(four_hosts, tmp_path):
    """dp 2 × pp 2, books and token means: from a checkpoint after the second book was asked for."""
    wire = {
        "forward": {"codec": "transform", "bits": 3, "every": 4, "tokens": 0.1},
        "backward": {"codec": "transform", "bits": 3},
    }
    plain = BoundaryConfig()
    whole, again = (bounded(tmp_path / n, plain, wire=wire, mesh={"dp": 2, "pp": 2}) for n in ("whole", "again"))
    first = four_hosts.run(several, [(whole, False)], timeout=80, echo=False)
    shutil.copytree(*(tmp_path / run / "checkpoints/step-00000003" for run in ("whole", "again")))
    resumed = four_hosts.run(several, [(again, True)], timeout=80, echo=False)
    assert list(first) == list(resumed)
    assert exported_loss(whole, attached=False) == pytest.approx(last_held_out(tmp_path / "whole"), rel=1e-5)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"mesh": {"tp": 2}}, "tp = 2"),
        ({"mesh": {"pp": 1}}, "pp = 1 has none"),
        ({"boundary": BoundaryConfig(rank=33)}, "hidden states have 32 values"),
        ({"wire": {"preset": "auto"}}, "the planner measures whole hidden states"),
    ],
)
def test_what_does_not_go_with_it_is_said(changed, words, tmp_path):
    with pytest.raises(UsageError, match=words):
        check(bounded(tmp_path, **changed))


def test_boundaries_open_step_by_step(tmp_path):
    """A layer is given what its boundary passes and a growing share of the rest; everything in an evaluation."""
    basis = orthonormal(32, 8, 0)
    save_file({"1/basis": basis}, tmp_path / FILE)
    stage = torch.nn.Module()
    stage.family = SimpleNamespace(root="model", layers="layers")
    stage.model = torch.nn.Module()
    stage.model.layers = torch.nn.ModuleDict({"1": torch.nn.Identity(), "2": torch.nn.Identity()})
    opening = Opening(bounded(tmp_path, BoundaryConfig(open=4), path=tmp_path), {0: stage})
    x = torch.randn(2, 3, 32)
    passed = x @ basis @ basis.T
    for step, share in ((0, 0.25), (2, 0.75), (3, 1.0), (9, 1.0)):
        opening.begin(step)
        assert torch.allclose(stage.model.layers["1"](x), passed + share * (x - passed), atol=1e-6), step
        assert stage.model.layers["2"](x) is x
    opening.begin(0, train=False)
    assert stage.model.layers["1"](x) is x
    with pytest.raises(UsageError, match="has 3 steps only"):
        opening.check(3)
    with pytest.raises(UsageError, match="either learn"):
        BoundaryConfig(rank=8, open=4)
    with pytest.raises(UsageError, match=r"name the model .* by \[model\] path"):
        bounded(tmp_path, BoundaryConfig(open=4))


def test_a_folder_without_boundaries_says_so(tmp_path):
    with pytest.raises(UsageError, match="needs none"):
        tw.parallel.attach_boundaries(torch.nn.Identity(), tmp_path)
