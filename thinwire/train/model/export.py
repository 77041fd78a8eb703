"""Write a model as transformers (or peft) loads it: one shard per stage, the index, configuration, tokenizer.

    write_shard(blueprint, stage.index, export_weights(stage), folder)     on the rank of each stage
    write_index(blueprint, folder)                                         once, after the shards
Without a shared disk, send `export_weights(stage)` to one rank and write all shards there.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from thinwire.errors import UsageError
from thinwire.train.config.families import HEAD
from thinwire.train.model.blueprint import Blueprint
from thinwire.train.model.lora import peft_config, saved_name
from thinwire.train.model.stage import Stage
from thinwire.train.model.weights import INDEX

NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".index.json", ".gguf", ".onnx")


def export_weights(stage: Stage) -> dict[str, Tensor]:
    """What this stage contributes to the saved model, on the CPU: its weights, or what is trained of it beside a
    frozen base.

    A tied head is not among them, since the first stage saves it as the embedding; by rows the last stage does so. What
    all stages have a copy of is the first one's to save.
    """
    named = dict(stage.named_parameters())
    trained = {name: weight for name, weight in named.items() if weight.requires_grad}
    if len(trained) < len(named):  # a frozen base: adapters, and a classifier's head
        return {saved_name(name): _whole(weight) for name, weight in trained.items()}
    if not stage.is_first:
        named = {name: weight for name, weight in named.items() if name not in stage.shared}
    if stage.config.tie_word_embeddings:
        head = named.pop(HEAD, None)
        if stage.by_rows:
            named.pop(stage.family.embedding, None)
            named |= {} if head is None else {stage.family.embedding: head}
    return {name: _whole(weight) for name, weight in named.items()}


def _whole(weight: Tensor) -> Tensor:
    """The weight on the CPU; one that is split is gathered by all ranks that hold a slice."""
    held = weight.detach()
    return (held.full_tensor() if isinstance(held, DTensor) else held).cpu()


def write_shard(blueprint: Blueprint, index: int, weights: Mapping[str, Tensor], folder: str | Path) -> Path:
    """One stage of a full model as its own safetensors file."""
    target = Path(folder) / _shard(index, blueprint.stages)
    write_tensors(weights, target)
    return target


def write_index(blueprint: Blueprint, folder: str | Path, tokenizer: str | None = None) -> None:
    """Write the index of the shards, config.json, and all files but weights of the checkpoint and of `tokenizer`'s
    folder."""
    files = {name: _shard(blueprint.stage_of(name), blueprint.stages) for name in blueprint.shapes}
    missing = [name for name in sorted(set(files.values())) if not (Path(folder) / name).exists()]
    if missing:
        raise UsageError(f"{folder}: the shard {missing[0]} has not been written")
    size = sum(shape.numel() for shape in blueprint.shapes.values()) * blueprint.dtype.itemsize
    document = {"metadata": {"total_size": size}, "weight_map": files}
    for source in (blueprint.model.path, tokenizer):
        if source is not None:
            copy_companions(source, folder)
    _write_text(Path(folder) / "config.json", json.dumps(_config(blueprint), indent=2) + "\n")
    _write_text(Path(folder) / INDEX, json.dumps(document, indent=2) + "\n")


def write_adapter(blueprint: Blueprint, weights: Mapping[str, Tensor], folder: str | Path) -> None:
    """All stages' adapters in one file, as peft.PeftModel.from_pretrained loads it."""
    model = blueprint.model
    if model.lora is None:
        raise UsageError("write_adapter: the model has no [model.lora]")
    write_tensors(weights, Path(folder) / "adapter_model.safetensors")
    peft_config(model.lora, blueprint.config, blueprint.family, model.path).save_pretrained(str(folder))


def copy_companions(source: str | Path, folder: str | Path) -> None:
    """Tokenizer, generation settings, licence: every plain file of a folder but weights."""
    for file in sorted(Path(source).iterdir()):
        if file.is_file() and not file.name.endswith(NOT_COPIED):
            shutil.copy2(file, Path(folder) / file.name)


def _shard(index: int, stages: int) -> str:
    return f"model-{index + 1:05d}-of-{stages:05d}.safetensors"


def _config(blueprint: Blueprint) -> dict[str, Any]:
    """The checkpoint's own configuration (our dropout and attention stay ours), with the dtype that was saved."""
    path = blueprint.model.path
    if path is None:
        document = blueprint.config.to_dict()
    else:
        document = json.loads((Path(path) / "config.json").read_text())
        document.pop("torch_dtype", None)  # older files; it would go before dtype
    if blueprint.family.task == "classify":  # the checkpoint may be of an encoder alone, or name other labels
        document.pop("num_labels", None)
        document |= {name: getattr(blueprint.config, name) for name in ("id2label", "label2id")}
    return {**document, "architectures": [blueprint.family.architecture], "dtype": blueprint.model.dtype}


def write_tensors(weights: Mapping[str, Tensor], target: Path) -> None:
    """Whole or not at all: written beside, then renamed."""
    from safetensors.torch import save_file

    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    save_file({name: weight.contiguous() for name, weight in weights.items()}, partial, metadata={"format": "pt"})
    os.replace(partial, target)


def _write_text(target: Path, text: str) -> None:
    partial = target.with_name(target.name + ".partial")
    partial.write_text(text)
    os.replace(partial, target)
