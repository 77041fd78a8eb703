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
from safetensors.torch import load_file, save_file
from torch import nn
from train_ranks import settings, several

import thinwire as tw
from thinwire.boundaries.stiefel import orthonormal
from thinwire.collectives import OkTopk
from thinwire.config.wire import Reduction, Wire
from thinwire.errors import UsageError
from thinwire.lab import Network
from thinwire.train.build import check
from thinwire.train.config.boundary import BoundaryConfig
from thinwire.train.config.sections import ModelConfig, TrainConfig
from thinwire.train.data.batches import held_out_batches
from thinwire.train.data.samples import IGNORED
from thinwire.train.engine import Piped
from thinwire.train.metrics import read_events
from thinwire.train.model.blueprint import token_embedding
from thinwire.train.model.boundaries import FILE
from thinwire.train.model.opening import Opening
from thinwire.train.tune.selection import select

PRELOAD = ("train_warm",)
LEARNS = BoundaryConfig(rank=8, anchors=2, rate=0.5)
TABLED = BoundaryConfig(rank=8, tables=True, rate=0)


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
    """Boundaries with anchors, and with tables; each opened in a further run."""
    names = {"": LEARNS, "tabled ": TABLED}
    begun, resumed = [], []
    for name, boundary in names.items():
        opens = {"path": tmp_path / f"{name}whole" / "model", "data": {"tokenizer": "bytes"}}
        for runs, whole, opened in ((begun, "whole", "opened"), (resumed, "again", "further")):
            runs.append(bounded(tmp_path / f"{name}{whole}", boundary))
            runs.append(bounded(tmp_path / f"{name}{opened}", BoundaryConfig(open=5), **opens))
    with Network(hosts=2, preload=PRELOAD) as net:
        first = net.run(several, [(run, False) for run in begun], timeout=80, echo=False)
        for old, new in zip(begun, resumed):
            shutil.copytree(*(Path(run.run.out) / "checkpoints/step-00000003" for run in (old, new)))
        second = net.run(several, [(run, True) for run in resumed], timeout=80, echo=False)
    assert list(first) == list(second)
    own = 16 + 4 * (32 * 8 + 2 * (264 + 32))  # a header, basis, tokens and lift; 264: tokens of the bytes' tokenizer
    for (name, boundary), whole, opened in zip(names.items(), begun[::2], begun[1::2]):
        check_exports(whole, opened)
        assert last_held_out(tmp_path / f"{name}again") == last_held_out(tmp_path / f"{name}whole")
        events = read_events(tmp_path / f"{name}whole" / "metrics.jsonl")
        sent = [e["gradient_bytes"] for e in events if e["kind"] == "step"]
        assert {b - a for a, b in itertools.pairwise(sent)} == {0 if boundary.tables else 2 * own}
    check_table(begun[2], load_file(tmp_path / "tabled whole/model" / FILE))


def check_exports(whole: TrainConfig, opened: TrainConfig) -> None:
    """Check that a run's model has its loss, and of a run that opened its boundaries that the plain model has."""
    # opened little by little it is a plain model, also while it is evaluated
    assert exported_loss(opened, attached=False) == pytest.approx(last_held_out(Path(opened.run.out)), rel=1e-5)
    assert not (Path(opened.run.out) / "model" / FILE).exists()
    held_out = last_held_out(Path(whole.run.out))
    assert exported_loss(whole, attached=True) == pytest.approx(held_out, rel=1e-5)
    assert abs(exported_loss(whole, attached=False) - held_out) > 1e-3 * held_out  # it computes something else


def check_table(config: TrainConfig, found: dict[str, torch.Tensor]) -> None:
    """Check that the run's table began as the embedding outside the basis, which stayed, and was trained."""
    basis = orthonormal(32, 8, 0)
    assert list(found) == ["2/basis", "2/table"] and torch.equal(found["2/basis"], basis)
    from transformers import AutoModelForCausalLM

    start = token_embedding(check(config).blueprint, 0)
    start -= start @ basis @ basis.T
    moved = (found["2/table"] - start).norm(dim=1) / start.norm(dim=1)
    assert moved[-6:].max() < 0.01  # no text has these tokens: there is weight decay alone
    assert moved[ord("e")] > 0.05
    model = Path(config.run.out) / "model"  # a run that goes on from it begins with its embedding
    further = check(bounded(model, TABLED, path=model, data={"tokenizer": "bytes"})).blueprint
    kept = AutoModelForCausalLM.from_pretrained(model).get_input_embeddings().weight
    assert torch.equal(token_embedding(further, 0), kept)


@on_a_network[0]
@on_a_network[1]
@pytest.mark.timeout(200)
def test_a_run_over_fitted_links_resumes_bitwise_and_its_model_is_plain(four_hosts, tmp_path):
    """dp 2 × pp 2, books and token means: from a checkpoint after the second book was asked for. In the same launch, a
    run with tables on both ranks of a pipeline."""
    wire = {
        "forward": {"codec": "transform", "bits": 3, "every": 4, "tokens": 0.1},
        "backward": {"codec": "transform", "bits": 3},
    }
    plain = BoundaryConfig()
    whole, again = (bounded(tmp_path / n, plain, wire=wire, mesh={"dp": 2, "pp": 2}) for n in ("whole", "again"))
    tabled = bounded(tmp_path / "tabled", TABLED, mesh={"dp": 2, "pp": 2, "schedule": "ZBVZeroBubble"})
    first = four_hosts.run(several, [(whole, False), (tabled, False)], timeout=80, echo=False)
    shutil.copytree(*(tmp_path / run / "checkpoints/step-00000003" for run in ("whole", "again")))
    resumed = four_hosts.run(several, [(again, True)], timeout=80, echo=False)
    assert [sums[:1] for sums in first] == list(resumed)
    for here, replica, name in ((0, 2, "boundary.3.table"), (1, 3, "boundary.1.table")):
        assert first[here][1] == first[replica][1] and name in first[here][1]  # replicas have one table
    assert exported_loss(tabled, attached=True) == pytest.approx(last_held_out(tmp_path / "tabled"), rel=1e-5)
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


def test_a_stage_whose_gradients_are_exact_has_an_exact_table(tmp_path):
    wire = Wire(gradient=Reduction(OkTopk(0.1), stages=[0]))
    named = {"boundary.2.table": nn.Parameter(torch.zeros(3, 2))}
    for stage, names in ((0, ()), (1, ("boundary.2.table",))):
        chosen = select(bounded(tmp_path), wire, None, {}, named, {stage: "boundary.2.table"})
        assert chosen.gradient.exclude == names


def test_tables_go_with_a_rank_and_with_checkpoints_that_have_them():
    with pytest.raises(UsageError, match=r"\[boundary\] tables = true: .* give a rank"):
        BoundaryConfig(tables=True)
    saved, untabled = {"steps": torch.tensor(1), "tables": torch.tensor(1)}, SimpleNamespace(boundaries=1, tabled=False)
    with pytest.raises(UsageError, match=r"resume with its \[mesh\] and \[boundary\]"):
        Piped.load_learned(untabled, saved, True)


@pytest.mark.parametrize("tabled", [False, True])
def test_boundaries_open_step_by_step(tabled, tmp_path):
    """A layer is given what its boundary passes and a growing share of the rest; everything in an evaluation."""
    basis = orthonormal(32, 8, 0)
    table, tokens = torch.randn(5, 32) * tabled, torch.randint(5, (2, 3))
    save_file({"1/basis": basis} | ({"1/table": table} if tabled else {}), tmp_path / FILE)
    stage = torch.nn.Module()
    stage.family = SimpleNamespace(root="model", layers="layers")
    stage.model = torch.nn.Module()
    stage.model.layers = torch.nn.ModuleDict({"1": torch.nn.Identity(), "2": torch.nn.Identity()})
    opening = Opening(bounded(tmp_path, BoundaryConfig(open=4), path=tmp_path), {0: stage})
    opening.around({0: nn.Identity()})[0](tokens, **({"tokens": tokens} if tabled else {}))
    x = torch.randn(2, 3, 32)
    passed = x @ basis @ basis.T + table[tokens]
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
    if tabled:
        with pytest.raises(UsageError, match="anchors or tables do not open under"):
            Opening(bounded(tmp_path, BoundaryConfig(open=4), path=tmp_path, run={"recompute": True}), {0: stage})


def test_a_folder_without_boundaries_says_so(tmp_path):
    with pytest.raises(UsageError, match="needs none"):
        tw.parallel.attach_boundaries(torch.nn.Identity(), tmp_path)
