"""The Hugging Face models that can be cut into stages, by the `model_type` of their configuration. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Names inside a model class of transformers.

    architecture: the class.
    root: the module that holds all but the head.
    embeddings, layers, norm: modules inside the root.
    targets: modules that adapters are put on by default.
    residual: weights that start smaller, by 1/√(2·layers) (GPT-2's scheme).
    tensor_parallel: can its layers be cut over tensor-parallel ranks?
    """

    architecture: str
    root: str
    embeddings: tuple[str, ...]
    layers: str
    norm: str
    targets: tuple[str, ...]
    residual: str = ""
    tensor_parallel: bool = False

    @property
    def embedding(self) -> str:
        """The parameter that a tied head shares."""
        return f"{self.root}.{self.embeddings[0]}.weight"


HEAD = "lm_head.weight"
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM", "model", ("embed_tokens",), "layers", "norm", _PROJECTIONS, tensor_parallel=True
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM", "model", ("embed_tokens",), "layers", "norm", _PROJECTIONS, tensor_parallel=True
    ),
    "qwen3": Family("Qwen3ForCausalLM", "model", ("embed_tokens",), "layers", "norm", _PROJECTIONS),
    "gpt2": Family(
        "GPT2LMHeadModel", "transformer", ("wte", "wpe"), "h", "ln_f", ("c_attn", "c_proj", "c_fc"), "c_proj.weight"
    ),
}
TENSOR_PARALLEL = tuple(name for name, family in FAMILIES.items() if family.tensor_parallel)
