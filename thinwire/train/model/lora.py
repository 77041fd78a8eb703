"""LoRA adapters on a stage, by peft, with the base frozen and, on request, stored in 8 or 4 bits by bitsandbytes.

A classifier's head, which begins at random, is trained whole and saved with the adapters.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.errors import UsageError
from thinwire.train.config.families import Family
from thinwire.train.config.sections import LoraConfig
from thinwire.train.model.stage import Stage
from thinwire.train.model.weights import generator

ADAPTER = "default"  # peft's name for it; left out of the saved names


def check(config: LoraConfig, bits: int | None, family: Family, full: nn.Module) -> None:
    """Every target must be a linear module of a decoder layer, `from_layer` a layer, and `bits` possible here."""
    layers = full.get_submodule(f"{family.root}.{family.layers}")
    linear = {name.rpartition(".")[2] for name, m in layers.named_modules() if _is_linear(m)}
    for target in config.targets or ():
        if target not in linear:
            raise UsageError(f"[model.lora] targets = {target!r}: allowed are {', '.join(sorted(linear))}")
    count = len(list(layers.children()))
    if config.from_layer >= count:
        raise UsageError(f"[model.lora] from_layer = {config.from_layer}: the last layer is {count - 1}")
    if bits is not None and not any(isinstance(module, nn.Linear) for module in layers.modules()):
        raise UsageError(f"[model] base_bits = {bits}: not for {family.architecture}, whose weights lie transposed")
    if bits is not None and importlib.util.find_spec("bitsandbytes") is None:
        raise UsageError(f"[model] base_bits = {bits}: needs bitsandbytes, which is not installed")


def peft_config(config: LoraConfig, hf_config: Any, family: Family, base: str | None = None) -> Any:
    """peft's own configuration; `base` is the path of the checkpoint, for those who load the adapter later."""
    import peft

    classify = family.task == "classify"  # where modules outside the layers have the same names as in them
    some = classify or config.from_layer > 0
    chosen = list(range(config.from_layer, hf_config.num_hidden_layers)) if some else None
    return peft.LoraConfig(
        r=config.r, lora_alpha=config.alpha, lora_dropout=config.dropout,  # type: ignore[arg-type]
        target_modules=list(config.targets or family.targets), layers_to_transform=chosen,
        fan_in_fan_out=hf_config.model_type == "gpt2", task_type="SEQ_CLS" if classify else "CAUSAL_LM",
        base_model_name_or_path=base,
        modules_to_save=[name.rpartition(".")[2] for name in family.fresh if not name.endswith("dropout")] or None,
    )  # fmt: skip


def attach(stage: Stage, config: LoraConfig, bits: int | None, seed: int, device: torch.device) -> None:
    """Freeze the stage and add adapters to its layers. Their weights are seeded by name, so that every way to split the
    model starts from the same ones. `bits`: of the stored base, None for its own dtype."""
    import peft

    stage.requires_grad_(False)
    stage.tied = None  # frozen copies stay equal by themselves
    stage.needs_input_grad = stage.layers.start > config.from_layer
    if bits is not None:
        _quantise(stage, bits)
    if stage.layers.stop > config.from_layer:
        own = peft_config(config, stage.config, stage.family)
        own.modules_to_save = None  # the head is trained in its own place
        peft.inject_adapter_in_model(own, stage, low_cpu_mem_usage=True)
    for name, weight in list(stage.named_parameters()):
        if ".lora_" in name:
            owner, _, leaf = name.rpartition(".")
            drawn = nn.Parameter(_adapter_weight(name, weight.shape, seed).to(device))
            setattr(stage.get_submodule(owner), leaf, drawn)
        elif name.startswith(tuple(f"{module}." for module in stage.family.fresh)):
            weight.requires_grad_(True)


def saved_name(name: str) -> str:
    """An adapter's parameter as peft's files call it."""
    return "base_model.model." + name.replace(f".{ADAPTER}.", ".")


def _adapter_weight(name: str, shape: torch.Size, seed: int) -> Tensor:
    """peft's default start in float32: B zero, A uniform in ±1/√(inputs)."""
    if ".lora_B." in name:
        return torch.zeros(shape)
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator(seed, name))


def _is_linear(module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, nn.Linear | Conv1D)


def _quantise(stage: Stage, bits: int) -> None:
    """The linear modules of the stage's layers, in place; embedding, norms and head stay as they are."""
    import bitsandbytes as bnb

    layers = stage.get_submodule(f"{stage.family.root}.{stage.family.layers}")
    for name, module in list(layers.named_modules()):
        if isinstance(module, nn.Linear):
            owner, _, leaf = name.rpartition(".")
            setattr(layers.get_submodule(owner), leaf, _quantised(bnb, module, bits))
    setattr(stage, f"is_loaded_in_{bits}bit", True)  # how peft knows


def _quantised(bnb: Any, module: nn.Linear, bits: int) -> nn.Module:
    """The same linear map with blockwise nf4 (4 bits) or row-wise absmax (8 bits) weights."""
    sizes = (module.in_features, module.out_features, module.bias is not None)
    weight, device = module.weight.data, module.weight.device
    made: Any
    if bits == 4:
        made = bnb.nn.Linear4bit(*sizes, compute_dtype=weight.dtype, quant_type="nf4")
        made.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4")
    else:
        made = bnb.nn.Linear8bitLt(*sizes, has_fp16_weights=False)
        made.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    made.bias = module.bias
    return made.to(device).requires_grad_(False)
