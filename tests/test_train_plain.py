"""One process against a loop of plain torch. Other tests compare meshes with one process: this is what they rest on."""

from __future__ import annotations

import copy
import shutil
from unittest import mock

import pytest
import torch
from torch import nn
from train_ranks import settings, trained

from thinwire.train.data.batches import Batches
from thinwire.train.data.samples import IGNORED
from thinwire.train.loop import Trainer
from thinwire.train.metrics import read_events
from thinwire.train.model import stage as stages

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("alone")
OPTIM = {
    "lr": 1e-2, "betas": [0.8, 0.9], "eps": 1e-3, "weight_decay": 0.3, "clip": 1.2, "warmup": 2, "final": 0.5,
    "steps": 5, "batch": 8, "accumulate": 2,
}  # fmt: skip
RATES = [5e-3, 1e-2, 1e-2, 7.5e-3, 5e-3]  # up in two steps, down by half a cosine to one half


def steps(out, kind="step"):
    return [event for event in read_events(out / "metrics.jsonl") if event["kind"] == kind]


def loss_of(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def by_hand(model: nn.Module, batches: Batches) -> tuple[list[float], list[float]]:
    """Losses and norms of AdamW, a batch at a time; the model is trained in place."""
    found: tuple[list[float], list[float]] = [], []
    split = [[p for p in model.parameters() if (p.dim() > 1) == matrix] for matrix in (True, False)]
    groups = [{"params": ps, "weight_decay": decay} for ps, decay in zip(split, (0.3, 0.0))]
    adam = torch.optim.AdamW(groups, betas=(0.8, 0.9), eps=1e-3)
    for rate in RATES:
        batch = batches.next()
        loss = loss_of(model, batch.inputs, batch.labels)
        adam.zero_grad()
        loss.backward()
        found[0].append(float(loss.detach()))
        found[1].append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.2)))
        for group in adam.param_groups:
            group["lr"] = rate
        adam.step()
    return found


def test_a_run_is_adamw_as_configured(tmp_path):
    """Loss, norm, clipping, rate, decay, accumulation, micro-batches; what is saved is what was trained."""
    config = settings(tmp_path, optim=OPTIM, run={"seed": 3}, data={"seed": 5})
    trainer = Trainer(config, say=lambda line: None)
    model, samples = copy.deepcopy(trainer.parts.stages[0]), trainer.parts.samples
    trainer.fit()
    losses, norms = by_hand(model, Batches(samples, 8, 5))
    found = steps(tmp_path)
    assert min(norms) < 1.2 < max(norms), f"some steps are clipped, some are not: {norms}"
    assert [e["lr"] for e in found] == pytest.approx(RATES)
    assert [e["loss"] for e in found] == pytest.approx(losses, abs=1e-5)
    assert [e["norm"] for e in found] == pytest.approx(norms, rel=1e-4)
    assert {e["tokens"] for e in found} == {8 * 32}
    assert steps(tmp_path, "eval")[-1]["held_out"] == pytest.approx(
        float(loss_of(model, *samples.rows(samples.held_out)).detach()), abs=1e-5
    )
    saved = dict(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").named_parameters())
    expected = dict(model.named_parameters())
    assert saved.keys() == expected.keys()
    assert all(torch.allclose(value, expected[name], rtol=0, atol=1e-5) for name, value in saved.items())


def test_seeds_autocast_and_recomputation_are_heeded(tmp_path):
    """A step's loss is another one under bf16 and with other weights or samples; layers run twice when asked."""
    runs = {
        "plain": {}, "bf16": {"run": {"autocast": "bf16", "recompute": True}}, "weights": {"run": {"seed": 1}},
        "samples": {"data": {"seed": 1}},
    }  # fmt: skip
    found, again = {}, {}
    for name, changed in runs.items():
        config = settings(tmp_path / name, optim={"steps": 1}, **changed)
        with mock.patch.object(stages, "checkpoint", wraps=stages.checkpoint) as recomputed:
            trained(config, False)
        found[name], again[name] = steps(tmp_path / name)[0]["loss"], recomputed.call_count
    assert len(set(found.values())) == 4, found
    assert found["bf16"] == pytest.approx(found["plain"], rel=1e-3)
    assert again == {"plain": 0, "bf16": 4 * 2, "weights": 0, "samples": 0}  # layers × micro-batches


def test_dropout_goes_on_where_it_stopped(tmp_path):
    """What torch's generator would have given next is in the checkpoint."""
    model, run = {"type": "gpt2", "dropout": 0.3}, {"checkpoint_every": 2}
    whole, part = (settings(tmp_path / n, model=model, optim={"steps": 4}, run=run) for n in ("whole", "part"))
    expected, _ = trained(whole, False)
    shutil.copytree(tmp_path / "whole/checkpoints/step-00000002", tmp_path / "part/checkpoints/step-00000002")
    torch.manual_seed(12345)
    assert trained(part, True)[0] == expected


def test_evaluation_drops_nothing(tmp_path):
    """Twice the same held-out loss; training still drops."""
    trainer = Trainer(settings(tmp_path, model={"type": "gpt2", "dropout": 0.3}), say=lambda line: None)
    assert trainer._evaluate() == trainer._evaluate()
    batch, run = trainer.parts.batches.next(), trainer.parts.engine.run
    losses = [float(run(batch, True)) for _ in range(2)]
    assert losses[0] != losses[1]
    trainer.parts.update.close()
