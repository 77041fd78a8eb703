"""Adapters on stages: peft loads what was saved with the same logits; frozen bases, also in 8 and 4 bits."""

from dataclasses import replace

import pytest
import torch
from inputs import agree

from thinwire.errors import UsageError
from thinwire.train.config.sections import LoraConfig, ModelConfig
from thinwire.train.model.blueprint import build_stages, named_parameters, plan_model
from thinwire.train.model.export import export_weights, write_adapter, write_index, write_shard

VOCAB, SEQ = 97, 12
SMALL = ModelConfig(hidden=32, layers=4, heads=4, kv_heads=2, ffn=48)
IDS = torch.randint(0, VOCAB, (3, SEQ), generator=torch.Generator().manual_seed(1))
LABELS = IDS.roll(-1, dims=1)


def base(folder, kind="llama") -> ModelConfig:
    blueprint = plan_model(replace(SMALL, type=kind), 1, VOCAB, SEQ)
    write_shard(blueprint, 0, export_weights(build_stages(blueprint, [0], 0)[0]), folder)
    write_index(blueprint, folder)
    return ModelConfig(path=str(folder), lora=LoraConfig(r=4))


def loss_of(logits, labels):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def built(model, count, seed=0):
    blueprint = plan_model(model, count, VOCAB, SEQ)
    return blueprint, {i: build_stages(blueprint, [i], seed)[i] for i in range(count)}


def chained(stages):
    x = IDS
    for _, stage in sorted(stages.items()):
        x = stage(x)
    return x


def stepped(stages) -> list[float]:
    weights = [w for stage in stages.values() for w in stage.parameters() if w.requires_grad]
    optimiser, losses = torch.optim.Adam(weights, lr=1e-2), []
    for _ in range(3):
        loss = loss_of(chained(stages), LABELS)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("from_layer", [0, 2])
def test_peft_loads_the_adapters_of_all_stages(kind, from_layer, tmp_path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = base(tmp_path / "base", kind)
    model = replace(model, lora=replace(model.lora, from_layer=from_layer))
    blueprint, stages = built(model, 3)
    full = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    plain = full(IDS).logits
    assert agree(chained(stages), plain), "adapters start as nothing"
    losses = stepped(stages)
    assert losses[-1] < losses[0]
    weights = {name: w for stage in stages.values() for name, w in export_weights(stage).items()}
    write_adapter(blueprint, weights, tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(full, str(tmp_path / "adapter")).eval()
    logits = chained(stages)
    assert not agree(logits, plain)
    assert agree(loaded(IDS).logits, logits)
    assert {n for n, _ in loaded.named_parameters() if "lora_" in n} == {
        f"base_model.model.{n}" for stage in stages.values() for n, w in stage.named_parameters() if w.requires_grad
    }


def test_the_cut_changes_neither_start_nor_course(tmp_path) -> None:
    model, before = base(tmp_path), torch.random.get_rng_state()
    runs = [stepped(built(model, count)[1]) for count in (1, 2, 4)]
    assert runs[0] == runs[1] == runs[2]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert stepped(built(model, 2, seed=1)[1]) != runs[0]


def test_only_adapters_are_trained_and_nothing_is_tied(tmp_path) -> None:
    _, stages = built(base(tmp_path), 2)
    named = named_parameters(stages)
    assert named and all(".lora_" in name for name in named)
    assert [stage.tied for stage in stages.values()] == [None, None]


def test_stages_before_the_first_adapter_need_no_backward(tmp_path) -> None:
    model = base(tmp_path)
    model = replace(model, lora=replace(model.lora, from_layer=2))
    _, stages = built(model, 4)
    assert [stage.needs_input_grad for stage in stages.values()] == [False, False, False, True]
    assert [bool(named_parameters({i: s})) for i, s in stages.items()] == [False, False, True, True]
    hidden = stages[1](stages[0](IDS))
    assert not hidden.requires_grad
    assert export_weights(stages[0]) == {}


def test_adapters_start_as_pefts_do(tmp_path) -> None:
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    from thinwire.train.model.lora import peft_config

    model = base(tmp_path)
    blueprint, stages = built(model, 1)
    full = AutoModelForCausalLM.from_pretrained(tmp_path)
    theirs = dict(get_peft_model(full, peft_config(model.lora, blueprint.config, blueprint.family)).named_parameters())
    for name, weight in stages[0].named_parameters():
        if ".lora_" in name:
            other = theirs[f"base_model.model.{name}"]
            assert abs(weight.abs().max() - other.abs().max()) <= 0.15 * other.abs().max()
            assert weight.dtype == other.dtype


@pytest.mark.parametrize(("bits", "error"), [(8, 0.02), (4, 0.3)])
def test_a_base_in_fewer_bits(bits, error, tmp_path) -> None:
    pytest.importorskip("bitsandbytes")
    model = base(tmp_path)
    exact = chained(built(model, 2)[1])
    _, stages = built(replace(model, base_bits=bits), 2)
    assert (chained(stages) - exact).norm() <= error * exact.norm()
    stored = stages[0].get_submodule("model.layers.0.self_attn.q_proj").base_layer.weight
    assert stored.dtype == (torch.int8 if bits == 8 else torch.uint8)
    assert stored.numel() * 8 == 32 * 32 * bits
    losses = stepped(stages)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"targets": ("q_porj",)}, r"\[model.lora\] targets = 'q_porj': allowed are down_proj, gate_proj, k_proj"),
        ({"targets": ("lm_head",)}, r"\[model.lora\] targets = 'lm_head': allowed are"),
        ({"from_layer": 4}, r"\[model.lora\] from_layer = 4: the last layer is 3"),
    ],
)
def test_mistakes(change, said) -> None:
    with pytest.raises(UsageError, match=said):
        plan_model(replace(SMALL, lora=LoraConfig(**change)), 2, VOCAB, SEQ)


def test_gpt2_in_fewer_bits_is_refused() -> None:
    model = replace(SMALL, type="gpt2", lora=LoraConfig(), base_bits=8)
    with pytest.raises(UsageError, match=r"\[model\] base_bits = 8: not for GPT2LMHeadModel"):
        plan_model(model, 1, VOCAB, SEQ)


def test_fewer_bits_without_bitsandbytes(monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="needs bitsandbytes, which is not installed"):
        plan_model(replace(SMALL, lora=LoraConfig(), base_bits=4), 1, VOCAB, SEQ)


def test_a_model_without_adapters_has_none_to_write() -> None:
    with pytest.raises(UsageError, match=r"no \[model.lora\]"):
        write_adapter(plan_model(SMALL, 1, VOCAB, SEQ), {}, "unused")
