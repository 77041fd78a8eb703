"""Configurations and skeletons of the Hugging Face models that can be cut into stages (train/config/families.py)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from thinwire.errors import UsageError
from thinwire.train.config.families import FAMILIES, names_for
from thinwire.train.config.sections import ModelConfig
from thinwire.train.foreign_code import refuse_own_code

DROPOUTS = (
    "embd_pdrop", "attn_pdrop", "resid_pdrop", "attention_dropout",
    "hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout", "pooler_dropout", "cls_dropout",
)  # fmt: skip


class Classes(NamedTuple):
    """What an encoder needs to know of its data: the names of the labels, and the tokenizer's padding token."""

    names: tuple[str, ...]
    pad: int


def build_config(model: ModelConfig, vocab: int, seq_len: int, classes: Classes | None = None) -> Any:
    """The transformers configuration: the checkpoint's, a file's, or from sizes.

    `vocab` is the tokenizer's size, used where `[model] vocab` is 0. Dropout is `[model] dropout` whatever the
    checkpoint says, because dropout before a boundary spoils deltas against the last visit. `classes`: of an encoder,
    None for a language model.
    """
    source = model.path or model.config
    task = "causal" if classes is None else "classify"
    config = read_supported(source, task) if source else _from_sizes(model, model.vocab or vocab, seq_len, classes)
    if getattr(config, "quantization_config", None) is not None:
        raise UsageError(f"{source}: the checkpoint is quantised; give the full one, and base_bits = 8 or 4")
    if config.vocab_size < vocab:
        raise UsageError(f"{source or '[model] vocab'}: {config.vocab_size} tokens, but the tokenizer has {vocab}")
    positions = config.max_position_embeddings - _first_position(config)
    if positions < seq_len:
        raise UsageError(f"{source}: at most {positions} positions, but seq_len = {seq_len}")
    for name in DROPOUTS:
        if hasattr(config, name):
            setattr(config, name, model.dropout)
    config._attn_implementation = "eager" if FAMILIES[config.model_type].eager else model.attention
    config.use_cache = False
    if classes is not None:
        if config.model_type == "roberta" and config.pad_token_id != classes.pad:
            raise UsageError(f"{source}: pads with {config.pad_token_id}, but the tokenizer with {classes.pad}")
        config.tie_word_embeddings = False  # a classifier has no output embedding
        config.id2label = dict(enumerate(classes.names))
        config.label2id = {name: number for number, name in enumerate(classes.names)}
    return config


def _first_position(config: Any) -> int:
    """RoBERTa's positions begin after the padding's: so many rows of its table are no positions."""
    return config.pad_token_id + 1 if config.model_type == "roberta" else 0


def read_supported(source: str, task: str = "causal") -> Any:
    """The transformers configuration in `source`, a checkpoint's folder or a config.json; a mistake where the model is
    of a type that cannot be cut, or not for this kind of `[task]`."""
    from transformers import AutoConfig

    refuse_own_code(source)
    try:
        config = AutoConfig.from_pretrained(Path(source), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        line = str(error).strip().splitlines()[0]
        raise UsageError(f"{source}: no configuration that transformers can read: {line}") from None
    allowed = names_for(task)
    if config.model_type not in allowed:
        other = FAMILIES.get(config.model_type)
        hint = f'; it is for [task] kind = "{other.task}"' if other else ""
        known = f'{", ".join(allowed)} for [task] kind = "{task}"'
        raise UsageError(f"{source}: model_type {config.model_type!r} cannot be cut; allowed are {known}{hint}")
    return config


def _from_sizes(model: ModelConfig, vocab: int, seq_len: int, classes: Classes | None) -> Any:
    from transformers import AutoConfig

    positions = model.positions or seq_len
    common = {"vocab_size": vocab, "tie_word_embeddings": model.tied, "bos_token_id": None, "eos_token_id": None}
    if model.type == "gpt2":
        sizes = {"n_embd": model.hidden, "n_layer": model.layers, "n_head": model.heads, "n_positions": positions}
        return AutoConfig.for_model("gpt2", **common, **sizes, n_inner=model.ffn or None)
    if classes is not None:
        return _encoder_from_sizes(model, vocab, positions, classes.pad)
    ffn = model.ffn or 64 * math.ceil(model.hidden * 8 / 3 / 64)
    sizes = {
        "hidden_size": model.hidden, "num_hidden_layers": model.layers, "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads or model.heads, "intermediate_size": ffn,
        "max_position_embeddings": positions,
    }  # fmt: skip
    heads = {"head_dim": model.hidden // model.heads} if model.type == "qwen3" else {}
    return AutoConfig.for_model(model.type, **common, **sizes, **heads)


def _encoder_from_sizes(model: ModelConfig, vocab: int, positions: int, pad: int) -> Any:
    """BERT, RoBERTa, or DeBERTa as its third version is: relative positions in buckets, shared by all layers."""
    from transformers import AutoConfig

    sizes = {
        "vocab_size": vocab, "hidden_size": model.hidden, "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads, "intermediate_size": model.ffn or 4 * model.hidden,
        "max_position_embeddings": positions, "pad_token_id": pad,
    }  # fmt: skip
    if model.type == "roberta":
        sizes |= {"max_position_embeddings": pad + 1 + positions, "type_vocab_size": 1}
    if model.type != "deberta-v2":
        return AutoConfig.for_model(model.type, **sizes)
    relative = {
        "relative_attention": True, "position_buckets": 256, "norm_rel_ebd": "layer_norm", "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"], "position_biased_input": False, "type_vocab_size": 0,
    }  # fmt: skip
    return AutoConfig.for_model(model.type, **sizes, **relative)


def skeleton(config: Any) -> nn.Module:
    """The whole model without storage: shapes and names only."""
    import transformers

    with torch.device("meta"):
        return getattr(transformers, FAMILIES[config.model_type].architecture)(config)
