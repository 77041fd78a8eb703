"""GGUF and safetensors files as `[model] path`: a damaged one is refused in one line, or gives the same model."""

from __future__ import annotations

import random
import struct
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from thinwire.cli import main
from thinwire.errors import UsageError
from thinwire.train.config.sections import ModelConfig
from thinwire.train.model.blueprint import build_stages, plan_model
from thinwire.train.model.export import export_weights, write_index, write_shard
from thinwire.train.model.gguf import as_folder, check_header, is_gguf

SMALL = ModelConfig(hidden=32, layers=1, heads=4, kv_heads=2, ffn=48, tied=False)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def header(count: int = 1) -> bytes:
    """A small file by hand: one value of each kind, and a tensor of `count` × 4 floats."""
    values = [
        text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama"),
        text(b"llama.block_count") + struct.pack("<II", 4, 1),
        text(b"some.numbers") + struct.pack("<IIQ3f", 9, 6, 3, 1, 2, 3),
        text(b"some.texts") + struct.pack("<IIQ", 9, 8, 2) + text(b"a") + text("ä".encode()),
    ]
    tensor = text(b"token_embd.weight") + struct.pack("<IQQIQ", 2, 4, count, 0, 0)
    start = b"GGUF" + struct.pack("<IQQ", 3, 1, len(values))
    return start + b"".join(values) + tensor + b"\0" * 32 + bytes(16 * count)


@given(st.integers(0, 2**31), st.sampled_from(["flip", "cut", "number"]))
def test_a_mutated_header_is_refused_in_one_line_or_sound(seed, how) -> None:
    """No count or length in it makes the check run on, or fail in another way."""
    rng = random.Random(seed)
    content = bytearray(header())
    at = rng.randrange(len(content))
    if how == "flip":
        content[at] ^= 1 << rng.randrange(8)
    elif how == "cut":
        del content[at:]
    else:
        content[at : at + 8] = struct.pack("<Q", rng.choice([2**63, 2**40, 2**32 - 1, len(content)]))
    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        file.write(content)
        file.flush()
        try:
            check_header(file.name)
        except UsageError as error:
            assert "\n" not in str(error) and file.name in str(error)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: b"GGML" + c[4:], "does not begin with GGUF"),
        (lambda c: c[:4] + struct.pack("<I", 9) + c[8:], "version 9; known are 2, 3"),
        (lambda c: c[:8] + struct.pack("<Q", 2**60) + c[16:], "1152921504606846976 entries do not fit"),
        (lambda c: c[:-80], "a tensor lies behind the end of the file"),
        (lambda c: c[:60], "ends too early|do not fit"),
        (lambda c: c.replace(b"llama.block_count", b"llama.block_c\xffunt"), "can't decode"),
    ],
)
def test_what_is_wrong_is_said(change, said, tmp_path) -> None:
    (tmp_path / "m.gguf").write_bytes(change(header(count=3)))
    with pytest.raises(UsageError, match=said):
        check_header(tmp_path / "m.gguf")


def test_a_gguf_file_without_the_package_is_one_line(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "model").write_bytes(header())
    (tmp_path / "other").write_bytes(b"x")
    assert is_gguf(str(tmp_path / "model")) and not is_gguf(str(tmp_path / "other")) and not is_gguf(str(tmp_path))
    monkeypatch.setattr("thinwire.installed.missing", lambda modules: [m for m in modules if m == "gguf"])
    (tmp_path / "run.toml").write_text(f'[model]\npath = "model"\n[run]\nout = "{tmp_path / "out"}"\n')
    assert main(["train", str(tmp_path / "run.toml")]) == 2
    said = capsys.readouterr().err.strip()
    assert "model: a GGUF file needs gguf: pip install 'thinwire[gguf]'" in said and "\n" not in said


def write_gguf(path: Path, folder: Path) -> dict[str, torch.Tensor]:
    """The small llama of `folder` in GGUF's names, by the package itself; its weights."""
    import gguf

    weights = folder_weights(folder)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(16)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(40)
    tokens = ["t", "0", *(f"t{i}" for i in range(38))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 40)
    writer.add_token_merges(["t 0"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    inside = {
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    names |= {f"blk.0.{short}": f"model.layers.0.{name}" for short, name in inside.items()}
    for short, name in names.items():
        values = weights[f"{name}.weight"]
        if short.endswith(("attn_q", "attn_k")):
            values = permuted(values, heads=4 if short.endswith("q") else 2)
        writer.add_tensor(f"{short}.weight", values.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Queries and keys lie in GGUF with the two halves of a head's rotation interleaved."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns).contiguous()


def folder_weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def small_checkpoint(folder: Path) -> Path:
    blueprint = plan_model(SMALL, 1, 40, 16)
    stage = build_stages(blueprint, [0], 0)[0]
    write_shard(blueprint, 0, export_weights(stage), folder)
    write_index(blueprint, folder)
    return folder


@pytest.mark.slow
def test_a_gguf_file_becomes_a_folder_and_damaged_ones_do_not(tmp_path) -> None:
    pytest.importorskip("gguf")
    weights = write_gguf(tmp_path / "m.gguf", small_checkpoint(tmp_path / "in"))
    lines: list[str] = []
    folder = as_folder(str(tmp_path / "m.gguf"), str(tmp_path / "out"), lines.append)
    found = folder_weights(Path(folder))
    assert found.keys() == weights.keys() and all(torch.equal(found[n], weights[n]) for n in weights)
    assert "quantization_config" not in (Path(folder) / "config.json").read_text()
    assert as_folder(str(tmp_path / "m.gguf"), str(tmp_path / "out"), lines.append) == folder and len(lines) == 1
    build_stages(plan_model(ModelConfig(path=folder), 1, 40, 16), [0], 0)
    content, rng = (tmp_path / "m.gguf").read_bytes(), random.Random(0)
    end = content.index(b"blk.0.ffn_down.weight") + 60
    for _ in range(3):
        mutated = bytearray(content)
        mutated[rng.randrange(end)] ^= 1 << rng.randrange(8)
        (tmp_path / "bad.gguf").write_bytes(mutated)
        try:
            made = Path(as_folder(str(tmp_path / "bad.gguf"), str(tmp_path / "out"), lines.append))
        except UsageError as error:
            assert "\n" not in str(error)
        else:
            assert folder_weights(made).keys() == weights.keys()


def test_mutated_safetensors_are_refused_in_one_line_or_give_the_same_model(tmp_path) -> None:
    """Its header; values have no checksum in this format, and whoever made the file could say anything there."""
    (shard,) = small_checkpoint(tmp_path / "in").glob("model-*.safetensors")
    content, rng = shard.read_bytes(), random.Random(0)
    length = struct.unpack("<Q", content[:8])[0]
    model = replace(SMALL, path=str(tmp_path / "in"))
    blueprint = plan_model(model, 1, 40, 16)
    expected = dict(build_stages(blueprint, [0], 0)[0].named_parameters())
    for _ in range(60):
        mutated = bytearray(content)
        mutated[rng.randrange(8 + length)] ^= 1 << rng.randrange(8)
        shard.write_bytes(mutated)
        try:
            found = dict(build_stages(blueprint, [0], 0)[0].named_parameters())
        except UsageError as error:
            assert "\n" not in str(error)
        else:
            assert all(torch.equal(found[name], weight) for name, weight in expected.items()), bytes(mutated[:900])


def test_whole_numbers_are_no_weights(tmp_path) -> None:
    (shard,) = small_checkpoint(tmp_path).glob("model-*.safetensors")
    weights = folder_weights(tmp_path)
    save_file({**weights, "lm_head.weight": weights["lm_head.weight"].int()}, shard, metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"lm_head.weight is torch.int32, and no floating-point weight"):
        build_stages(plan_model(replace(SMALL, path=str(tmp_path)), 1, 40, 16), [0], 0)
