"""Stages cut by hand equal the Hugging Face model they come from: logits, loss and gradients, there and back."""

import json
from dataclasses import replace

import pytest
import torch
from inputs import agree
from safetensors.torch import load_file, save_file

from thinwire.cli import main
from thinwire.errors import UsageError
from thinwire.train.config.sections import ModelConfig
from thinwire.train.model.blueprint import build_stages, named_parameters, plan_model
from thinwire.train.model.export import export_weights, write_index, write_shard
from thinwire.train.model.families import build_config, skeleton

VOCAB, SEQ = 97, 12
SMALL = ModelConfig(hidden=32, layers=4, heads=4, kv_heads=2, ffn=48)
KINDS = [("llama", True), ("llama", False), ("qwen2", True), ("qwen3", False), ("gpt2", True), ("gpt2", False)]
IDS = torch.randint(0, VOCAB, (3, SEQ), generator=torch.Generator().manual_seed(1))
LABELS = torch.cat([IDS[:, 1:], torch.full((3, 1), -100)], dim=1)  # each position's next token


def loss_of(logits, labels):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def built(model, count, seed=0, **options):
    """Every stage as if each were on a rank of its own."""
    blueprint = plan_model(model, count, VOCAB, SEQ)
    return blueprint, {i: build_stages(blueprint, [i], seed, **options)[i] for i in range(count)}


def chained(stages, x=IDS):
    for _, stage in sorted(stages.items()):
        x = stage(x)
    return x


def saved(blueprint, stages, folder):
    for i, stage in stages.items():
        write_shard(blueprint, i, export_weights(stage), folder)
    write_index(blueprint, folder)
    return folder


def hugging_face(folder, **options):
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(info.values()), info
    return model


@pytest.fixture(params=KINDS, ids=[f"{kind}-{'tied' if tied else 'untied'}" for kind, tied in KINDS])
def model(request) -> ModelConfig:
    kind, tied = request.param
    return replace(SMALL, type=kind, tied=tied)


def test_stages_equal_the_full_model_and_transformers_loads_them(model, tmp_path) -> None:
    """Save → from_pretrained → same logits, loss and gradients, for 1, 2 and 4 stages of the same seed."""
    alone = None
    for count in (1, 2, 4):
        blueprint, stages = built(model, count)
        full = hugging_face(saved(blueprint, stages, tmp_path / str(count))).train()
        logits = chained(stages)
        loss = loss_of(logits, LABELS)
        assert agree(logits, full(IDS).logits)
        expected = full(IDS, labels=IDS).loss
        assert abs(loss - expected) <= 1e-5
        loss.backward()
        expected.backward()
        gradients = {}
        for stage in stages.values():
            for name, weight in stage.named_parameters():
                source = blueprint.family.embedding if name == "lm_head.weight" and model.tied else name
                gradients[source] = gradients.get(source, 0) + weight.grad
        assert set(gradients) == {name for name, _ in full.named_parameters()}
        for name, weight in full.named_parameters():
            torch.testing.assert_close(gradients[name], weight.grad, rtol=1e-4, atol=1e-6)
        alone = logits if alone is None else alone
        assert torch.equal(alone, logits), "the cut must not change the starting weights"


def test_a_checkpoint_of_transformers_becomes_stages_and_goes_back(model, tmp_path) -> None:
    import transformers

    torch.manual_seed(3)
    config = build_config(model, VOCAB, SEQ)
    full = getattr(transformers, plan_model(model, 1, VOCAB, SEQ).family.architecture)(config)
    full.save_pretrained(tmp_path / "in", max_shard_size="40KB")
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 1
    blueprint, stages = built(ModelConfig(path=str(tmp_path / "in")), 3)
    expected = full.eval()(IDS).logits
    assert agree(chained(stages), expected)
    back = hugging_face(saved(blueprint, stages, tmp_path / "out"))
    assert agree(back(IDS).logits, expected)
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_random_weights_are_drawn_as_transformers_draws_them(model) -> None:
    import transformers

    wide = replace(model, hidden=128, ffn=256)
    blueprint, stages = built(wide, 2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        full = getattr(transformers, blueprint.family.architecture)(blueprint.config)
    ours = {name: weight for stage in stages.values() for name, weight in stage.named_parameters()}
    for name, weight in full.named_parameters():
        spread, expected = ours[name].std().item(), weight.std().item()
        assert abs(spread - expected) <= 0.05 * expected, (name, spread, expected)
        assert abs(ours[name].mean() - weight.mean()) < 2e-3, name


def test_building_leaves_torchs_generator_alone_and_seeds_differ(model) -> None:
    before = torch.random.get_rng_state()
    first, second = (chained(built(model, 2, seed)[1]) for seed in (0, 1))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not torch.equal(first, second)
    weights = list(built(model, 1)[1][0].named_parameters())
    drawn = [w.flatten()[:20] for _, w in weights if w.dim() > 1]
    assert all(not torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])


def test_names_shapes_and_tied_copies(model) -> None:
    blueprint, stages = built(model, 4)
    tied = [stage.tied for stage in stages.values()]
    assert tied == ([blueprint.family.embedding, None, None, "lm_head.weight"] if model.tied else [None] * 4)
    assert all("lm_head.weight" not in export_weights(stage) for stage in stages.values()) == model.tied
    assert [stage.needs_input_grad for stage in stages.values()] == [False, True, True, True]
    whole = {name: weight.shape for name, weight in skeleton(blueprint.config).named_parameters()}
    held = {name: (i, w.shape) for i, stage in stages.items() for name, w in stage.named_parameters()}
    if model.tied:
        assert held.pop("lm_head.weight")[1] == whole[blueprint.family.embedding]
    assert {name: shape for name, (_, shape) in held.items()} == whole == blueprint.shapes
    assert all(blueprint.stage_of(name) == i for name, (i, _) in held.items())


def test_a_rank_with_both_ends_shares_the_tied_weight() -> None:
    blueprint = plan_model(SMALL, 4, VOCAB, SEQ)
    stages = build_stages(blueprint, [0, 3], seed=0)
    assert stages[3].lm_head.weight is stages[0].get_parameter("model.embed_tokens.weight")
    assert stages[0].tied is None and stages[3].tied is None
    named = named_parameters(stages)
    assert "lm_head.weight" not in named and len({id(w) for w in named.values()}) == len(named)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_recomputing_changes_no_gradient(kind) -> None:
    gradients = []
    for recompute in (False, True):
        _, stages = built(replace(SMALL, type=kind), 2, recompute=recompute)
        loss_of(chained(stages), LABELS).backward()
        gradients.append([w.grad for stage in stages.values() for w in stage.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


def test_recomputing_keeps_less(monkeypatch) -> None:
    """The number of tensors that autograd keeps falls, so recomputation really happens."""
    kept = []
    for recompute in (False, True):
        _, stages = built(SMALL, 1, recompute=recompute)
        count = 0

        def pack(tensor):
            nonlocal count
            count += 1
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            chained(stages)
        kept.append(count)
    assert kept[1] < kept[0] / 3


def test_bfloat16_weights_and_sliding_windows_as_transformers_has_them(tmp_path) -> None:
    _, stages = built(replace(SMALL, type="qwen2", dtype="bfloat16"), 2)
    folder = saved(plan_model(replace(SMALL, type="qwen2", dtype="bfloat16"), 2, VOCAB, SEQ), stages, tmp_path / "a")
    full = hugging_face(folder)
    assert full.dtype == torch.bfloat16, "from config.json"
    assert agree(chained(stages), full(IDS).logits)
    path = tmp_path / "a" / "config.json"
    changed = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}
    kinds = ["full_attention"] * 2 + ["sliding_attention"] * 2
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed, "layer_types": kinds}))
    _, windowed = built(ModelConfig(path=str(folder), dtype="bfloat16"), 2)
    full = hugging_face(folder, dtype=torch.bfloat16)(IDS).logits
    assert agree(chained(windowed), full)
    assert not agree(chained(stages), full)


def test_config_says_the_dtype_that_was_saved(tmp_path) -> None:
    """A half-precision checkpoint trained in float32 comes back in float32, also where its file is an old one."""
    model = checkpoint(tmp_path / "in", torch_dtype="bfloat16", dtype="bfloat16")
    blueprint, stages = built(model, 2)
    full = hugging_face(saved(blueprint, stages, tmp_path / "out"))
    assert full.dtype == torch.float32
    assert "torch_dtype" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_eager_attention_and_dropout_are_ours(tmp_path) -> None:
    blueprint, stages = built(replace(SMALL, type="gpt2", attention="eager", dropout=0.5), 2)
    assert blueprint.config._attn_implementation == "eager"
    assert not torch.equal(chained(stages), chained(stages)), "dropout is drawn anew"
    calm = {i: stage.eval() for i, stage in stages.items()}
    torch.testing.assert_close(chained(calm), chained(built(replace(SMALL, type="gpt2"), 2)[1]))


def test_gpt2_files_without_the_root_name(tmp_path) -> None:
    """The first GPT-2 checkpoints say h.0…, not transformer.h.0…, and hold mask buffers beside."""
    blueprint, stages = built(replace(SMALL, type="gpt2"), 1)
    saved(blueprint, stages, tmp_path)
    (shard,) = tmp_path.glob("model-*.safetensors")
    old = {name.removeprefix("transformer."): weight for name, weight in load_file(shard).items()}
    save_file({**old, "h.0.attn.bias": torch.zeros(1)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    shard.unlink()
    (tmp_path / "model.safetensors.index.json").unlink()
    _, again = built(ModelConfig(path=str(tmp_path)), 2)
    assert torch.equal(chained(again), chained(stages))


def test_each_stage_reads_only_its_own_shards(tmp_path) -> None:
    blueprint, stages = built(SMALL, 2)
    saved(blueprint, stages, tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    again = plan_model(ModelConfig(path=str(tmp_path)), 2, VOCAB, SEQ)
    build_stages(again, [0], seed=0)
    with pytest.raises(UsageError, match=r"model-00002-of-00002.safetensors: cannot be read"):
        build_stages(again, [1], seed=0)


def test_split_by_measured_times() -> None:
    times = (0.0, 1.0, 1.0, 1.0, 1.0, 2.0)
    assert plan_model(replace(SMALL, split_times=times), 2, VOCAB, SEQ).layers == (range(3), range(3, 4))
    with pytest.raises(UsageError, match=r"\[model\] split_times: 3 times for embedding, 4 layers and head"):
        plan_model(replace(SMALL, split_times=(1.0, 1.0, 1.0)), 2, VOCAB, SEQ)


def checkpoint(folder, **changes):
    blueprint, stages = built(SMALL, 1)
    saved(blueprint, stages, folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return ModelConfig(path=str(folder))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "bert"}, "model_type 'bert' cannot be cut; allowed are llama"),
        ({"model_type": "nonsense"}, "no configuration that transformers can read"),
        ({"hidden_size": 64, "head_dim": 8}, "has shape .*, but the configuration says"),
        ({"num_hidden_layers": 5}, "the checkpoint has no tensor model.layers.4"),
        ({"vocab_size": 20}, "20 tokens, but the tokenizer has 97"),
        ({"max_position_embeddings": 8}, "at most 8 positions, but seq_len = 12"),
        ({"quantization_config": {"load_in_8bit": True}}, "the checkpoint is quantised"),
    ],
)
def test_checkpoints_that_do_not_fit(changes, said, tmp_path) -> None:
    with pytest.raises(UsageError, match=said):
        built(checkpoint(tmp_path, **changes), 1)


def test_the_type_of_a_model_is_looked_at_before_its_tokenizer(tmp_path, monkeypatch, capsys) -> None:
    """BERT's tokenizer has no end-of-text token: that is not what is wrong with it."""
    checkpoint(tmp_path / "bert", model_type="bert")
    monkeypatch.setattr("thinwire.train.build.open_tokenizer", lambda *_: pytest.fail("the tokenizer was opened"))
    (tmp_path / "run.toml").write_text(f'[model]\npath = "bert"\n[run]\nout = "{tmp_path / "out"}"\n')
    assert main(["train", str(tmp_path / "run.toml")]) == 2
    assert "model_type 'bert' cannot be cut; allowed are llama, qwen2, qwen3, gpt2" in capsys.readouterr().err


def test_other_mistakes(tmp_path) -> None:
    with pytest.raises(UsageError, match=r"\[mesh\] 4 layers cannot be split into 5 stages"):
        plan_model(SMALL, 5, VOCAB, SEQ)
    with pytest.raises(UsageError, match="no configuration that transformers can read"):
        plan_model(ModelConfig(path=str(tmp_path)), 1, VOCAB, SEQ)
    blueprint, stages = built(SMALL, 2)
    write_shard(blueprint, 0, export_weights(stages[0]), tmp_path)
    with pytest.raises(UsageError, match=r"the shard model-00002-of-00002.safetensors has not been written"):
        write_index(blueprint, tmp_path)
    model = checkpoint(tmp_path / "b")
    (tmp_path / "b" / "model-00001-of-00001.safetensors").write_bytes(b"\x00" * 20)
    with pytest.raises(UsageError, match=r"model-00001-of-00001.safetensors: cannot be read"):
        built(model, 1)
    (tmp_path / "b" / "model.safetensors.index.json").write_text("{")
    with pytest.raises(UsageError, match="the checkpoint cannot be read"):
        built(model, 1)
    (tmp_path / "b" / "model.safetensors.index.json").unlink()
    with pytest.raises(UsageError, match=r"neither model.safetensors nor model.safetensors.index.json"):
        built(model, 1)
