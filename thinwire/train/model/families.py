"""Configurations and skeletons of the Hugging Face models that can be cut into stages (train/config/families.py)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thinwire.errors import UsageError
from thinwire.train.config.families import FAMILIES
from thinwire.train.config.sections import ModelConfig
from thinwire.train.foreign_code import refuse_own_code

DROPOUTS = ("embd_pdrop", "attn_pdrop", "resid_pdrop", "attention_dropout")


def build_config(model: ModelConfig, vocab: int, seq_len: int) -> Any:
    """The transformers configuration: the checkpoint's, a file's, or from sizes.

    `vocab` is the tokenizer's size, used where `[model] vocab` is 0. Dropout is `[model] dropout` whatever the
    checkpoint says, because dropout before a boundary spoils deltas against the last visit.
    """
    source = model.path or model.config
    config = read_supported(source) if source else _from_sizes(model, model.vocab or vocab, seq_len)
    if getattr(config, "quantization_config", None) is not None:
        raise UsageError(f"{source}: the checkpoint is quantised; give the full one, and base_bits = 8 or 4")
    if config.vocab_size < vocab:
        raise UsageError(f"{source or '[model] vocab'}: {config.vocab_size} tokens, but the tokenizer has {vocab}")
    if config.max_position_embeddings < seq_len:
        raise UsageError(f"{source}: at most {config.max_position_embeddings} positions, but seq_len = {seq_len}")
    for name in DROPOUTS:
        if hasattr(config, name):
            setattr(config, name, model.dropout)
    config._attn_implementation = model.attention
    config.use_cache = False
    return config


def read_supported(source: str) -> Any:
    """The transformers configuration in `source`, a checkpoint's folder or a config.json; a mistake where the model is
    of a type that cannot be cut."""
    from transformers import AutoConfig

    refuse_own_code(source)
    try:
        config = AutoConfig.from_pretrained(Path(source), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        line = str(error).strip().splitlines()[0]
        raise UsageError(f"{source}: no configuration that transformers can read: {line}") from None
    if config.model_type not in FAMILIES:
        raise UsageError(f"{source}: model_type {config.model_type!r} cannot be cut; allowed are {', '.join(FAMILIES)}")
    return config


def _from_sizes(model: ModelConfig, vocab: int, seq_len: int) -> Any:
    from transformers import AutoConfig

    positions = model.positions or seq_len
    common = {"vocab_size": vocab, "tie_word_embeddings": model.tied, "bos_token_id": None, "eos_token_id": None}
    if model.type == "gpt2":
        sizes = {"n_embd": model.hidden, "n_layer": model.layers, "n_head": model.heads, "n_positions": positions}
        return AutoConfig.for_model("gpt2", **common, **sizes, n_inner=model.ffn or None)
    ffn = model.ffn or 64 * math.ceil(model.hidden * 8 / 3 / 64)
    sizes = {
        "hidden_size": model.hidden, "num_hidden_layers": model.layers, "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads or model.heads, "intermediate_size": ffn,
        "max_position_embeddings": positions,
    }  # fmt: skip
    heads = {"head_dim": model.hidden // model.heads} if model.type == "qwen3" else {}
    return AutoConfig.for_model(model.type, **common, **sizes, **heads)


def skeleton(config: Any) -> nn.Module:
    """The whole model without storage: shapes and names only."""
    import transformers

    with torch.device("meta"):
        return getattr(transformers, FAMILIES[config.model_type].architecture)(config)
