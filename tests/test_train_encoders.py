"""Stages of encoders equal the Hugging Face classifier they come from: logits, loss and gradients, there and back."""

from __future__ import annotations

import json
from dataclasses import replace
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from thinwire.errors import UsageError
from thinwire.train.config.families import FAMILIES
from thinwire.train.config.sections import LoraConfig, MeshConfig, ModelConfig, TrainConfig
from thinwire.train.data.batches import Batch
from thinwire.train.engine import Alone
from thinwire.train.model.blueprint import build_stages, named_parameters, plan_model
from thinwire.train.model.encoder import check_schedule
from thinwire.train.model.export import export_weights, write_adapter, write_index, write_shard
from thinwire.train.model.families import Classes
from thinwire.train.model.tensor_parallel import check

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


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_model_takes_micro_batches_without_their_padding(kind) -> None:
    """Each as long as its longest text, with the same loss and gradients."""
    rows = torch.tensor([1, 2, 3, 2])
    batch = Batch(rows, IDS[rows], LABELS[rows], len(rows), SEGMENTS[rows])
    lengths, found = [], []
    for trimmed in (True, False):
        stage = built(replace(SMALL, type=kind), 1)[1][0]
        stage.register_forward_pre_hook(lambda module, given: lengths.append(given[0].shape[1]))
        alone = Alone(TrainConfig(mesh=MeshConfig(microbatches=2)), stage)
        with mock.patch.object(Batch, "trimmed", Batch.trimmed if trimmed else lambda batch: batch):
            found.append((alone.run(batch, train=True), dict(stage.named_parameters())))
    assert lengths == [7, 9, SEQ, SEQ]
    (loss, ours), (expected, whole) = found
    torch.testing.assert_close(loss, expected)
    for name, weight in whole.items():
        torch.testing.assert_close(ours[name].grad, weight.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pretrained_encoder_gets_a_head_of_the_runs_seed(kind, tmp_path) -> None:
    """Its own weights are read, under the names that files have; the head is the one of a run at random."""
    import transformers

    model = replace(SMALL, type=kind)
    blueprint, stages = built(model, 1)
    full = hugging_face(saved(blueprint, stages, tmp_path / "full"))
    with torch.no_grad():
        for weight in full.base_model.parameters():
            weight.add_(0.01)
    full.base_model.save_pretrained(tmp_path / "base")
    assert isinstance(full.base_model, transformers.PreTrainedModel)
    if kind == "bert":  # as the first BERT checkpoints spell it
        file = tmp_path / "base/model.safetensors"
        old = {n.replace("LayerNorm.weight", "LayerNorm.gamma"): w for n, w in load_file(file).items()}
        save_file(old, file, metadata={"format": "pt"})
    path = tmp_path / "base/config.json"
    said = {name: value for name, value in json.loads(path.read_text()).items() if name not in ("id2label", "label2id")}
    path.write_text(json.dumps(said))
    blueprint, again = built(replace(model, path=str(tmp_path / "base")), 2)
    torch.testing.assert_close(chained(again), called(full, kind).logits, rtol=1e-4, atol=1e-6)
    back = hugging_face(saved(blueprint, again, tmp_path / "back"))
    torch.testing.assert_close(called(back, kind).logits, chained(again), rtol=1e-4, atol=1e-6)
    assert back.config.label2id == {"no": 0, "perhaps": 1, "yes": 2}
    with pytest.raises(UsageError, match=r"classifier.*has shape \(3,.*\), but the configuration says \(2,"):
        two = plan_model(ModelConfig(path=str(tmp_path / "full")), 1, VOCAB, SEQ, Classes(("a", "b"), PAD))
        build_stages(two, [0], 0)


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_and_head_are_as_peft_loads_them(kind, tmp_path) -> None:
    from peft import PeftModel

    model = replace(SMALL, type=kind)
    blueprint, stages = built(model, 1)
    saved(blueprint, stages, tmp_path / "base")
    blueprint, stages = built(replace(model, path=str(tmp_path / "base"), lora=LoraConfig(from_layer=1)), 2)
    trained = named_parameters(stages)
    adapted = {name.split(".lora_")[0].split(".")[-1] for name in trained if ".lora_" in name}
    assert adapted == {*blueprint.family.targets}
    with torch.no_grad():
        for weight in trained.values():
            weight.add_(0.02)
    adapters = {name: weight for stage in stages.values() for name, weight in export_weights(stage).items()}
    assert len(adapters) == len(trained)
    write_adapter(blueprint, adapters, tmp_path / "adapter")
    full = PeftModel.from_pretrained(hugging_face(tmp_path / "base"), tmp_path / "adapter").eval()
    torch.testing.assert_close(chained(stages), called(full, kind).logits, rtol=1e-4, atol=1e-6)


def test_a_convolution_after_the_first_layer(tmp_path) -> None:
    """DeBERTa's second version has one, in its largest models."""
    blueprint, stages = built(replace(SMALL, type="deberta-v2"), 1)
    folder = saved(blueprint, stages, tmp_path / "plain")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "conv_kernel_size": 3, "conv_act": "gelu"}))
    blueprint, stages = built(ModelConfig(config=str(tmp_path / "config.json")), 2)
    full = hugging_face(saved(blueprint, stages, tmp_path / "conv"))
    torch.testing.assert_close(chained(stages), called(full, "deberta-v2").logits, rtol=1e-4, atol=1e-6)


def test_encoders_are_refused_where_they_do_not_fit(tmp_path) -> None:
    blueprint, stages = built(replace(SMALL, type="roberta"), 1)
    model = ModelConfig(path=str(saved(blueprint, stages, tmp_path)))
    with pytest.raises(UsageError, match=r"'roberta' cannot be cut; allowed are llama.*it is for \[task\] kind"):
        plan_model(model, 1, VOCAB, SEQ)
    with pytest.raises(UsageError, match=r"pads with 3, but the tokenizer with 7"):
        plan_model(model, 1, VOCAB, SEQ, Classes(("a", "b"), 7))
    with pytest.raises(UsageError, match=r"at most 12 positions, but seq_len = 13"):
        plan_model(model, 1, VOCAB, SEQ + 1, CLASSES)
    with pytest.raises(UsageError, match=r'schedule = "ZBVZeroBubble": not for Deberta.*allowed are GPipe, 1F1B'):
        check_schedule(FAMILIES["deberta-v2"], "ZBVZeroBubble")
    with pytest.raises(UsageError, match=r"tp = 2: not for roberta"):
        check(blueprint.config, lora=False, tp=2)
