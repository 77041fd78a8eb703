"""Stages of encoders equal the Hugging Face classifier they come from: logits, loss and gradients, there and back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from thinwire.train.config.sections import ModelConfig
from thinwire.train.model.blueprint import build_stages, plan_model
from thinwire.train.model.export import export_weights, write_index, write_shard
from thinwire.train.model.families import Classes

VOCAB, SEQ, PAD = 60, 12, 3
CLASSES = Classes(("no", "perhaps", "yes"), PAD)
SMALL = ModelConfig(hidden=32, layers=4, heads=4, ffn=48)
KINDS = ("bert", "roberta", "deberta-v2")
LENGTHS = torch.tensor([[12], [7], [1], [9]])
SEGMENTS = (torch.arange(SEQ) < LENGTHS).long() + ((torch.arange(SEQ) < LENGTHS) & (torch.arange(SEQ) > 4))
IDS = torch.randint(4, VOCAB, (4, SEQ), generator=torch.Generator().manual_seed(1)).where(SEGMENTS > 0, PAD)
LABELS = torch.tensor([0, 2, 1, 2])


def built(model: ModelConfig, count: int, **options):
    """Every stage as if each were on a rank of its own."""
    blueprint = plan_model(model, count, VOCAB, SEQ, CLASSES)
    return blueprint, {i: build_stages(blueprint, [i], 0, **options)[i] for i in range(count)}


def chained(stages):
    x = IDS
    for _, stage in sorted(stages.items()):
        x = stage(x, SEGMENTS)
    return x


def saved(blueprint, stages, folder):
    for i, stage in stages.items():
        write_shard(blueprint, i, export_weights(stage), folder)
    write_index(blueprint, folder)
    return folder


def hugging_face(folder):
    from transformers import AutoModelForSequenceClassification

    model, info = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


def called(full, kind, **more):
    kinds = {"token_type_ids": (SEGMENTS - 1).clamp(min=0)} if kind == "bert" else {}
    return full(input_ids=IDS, attention_mask=(SEGMENTS > 0).long(), **kinds, **more)


def summed_gradients(stages):
    """By name; what several stages have a copy of is added up."""
    found = {}
    for stage in stages.values():
        for name, weight in stage.named_parameters():
            found[name] = found.get(name, 0) + weight.grad
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_stages_equal_the_full_model_and_transformers_loads_them(kind, tmp_path) -> None:
    """First-step loss and all gradients of transformers, for 1, 2 and 4 stages of the same seed."""
    alone = None
    for count in (1, 2, 4):
        blueprint, stages = built(replace(SMALL, type=kind), count)
        full = hugging_face(saved(blueprint, stages, tmp_path / str(count)))
        logits = chained(stages)
        expected = called(full, kind, labels=LABELS)
        torch.testing.assert_close(logits, expected.logits, rtol=1e-4, atol=1e-6)
        loss = torch.nn.functional.cross_entropy(logits, LABELS)
        torch.testing.assert_close(loss, expected.loss, rtol=1e-4, atol=0)
        loss.backward()
        expected.loss.backward()
        gradients = summed_gradients(stages)
        assert set(gradients) == {name for name, _ in full.named_parameters()}
        for name, weight in full.named_parameters():
            torch.testing.assert_close(
                gradients[name], weight.grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )
        alone = logits if alone is None else alone
        assert torch.equal(alone, logits), "the cut must not change the starting weights"
    assert full.config.id2label == {0: "no", 1: "perhaps", 2: "yes"}
