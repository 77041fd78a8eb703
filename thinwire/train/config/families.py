"""The Hugging Face models that can be cut into stages, by the `model_type` of their configuration. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Names inside a model class of transformers.

    architecture: the class.
    root: the module that holds all but the head.
    embeddings, layers, norm: modules inside the root; norm is what follows the last layer, "" for nothing.
    targets: modules that adapters are put on by default.
    residual: weights that start smaller, by 1/√(2·layers) (GPT-2's scheme).
    tensor_parallel: can its layers be cut over tensor-parallel ranks?
    task: the kind of `[task]` that the class is for.
    head: modules outside the root, called one after the other on the last stage.
    shared: modules inside the root that every layer uses, so that every stage has a copy.
    eager: its attention has one form only.
    """

    architecture: str
    root: str
    embeddings: tuple[str, ...]
    layers: str
    norm: str
    targets: tuple[str, ...]
    residual: str = ""
    tensor_parallel: bool = False
    task: str = "causal"
    head: tuple[str, ...] = ("lm_head",)
    shared: tuple[str, ...] = ()
    eager: bool = False

    @property
    def embedding(self) -> str:
        """The table of the tokens' embeddings: the parameter that a tied head shares."""
        inner = ".word_embeddings" if self.task == "classify" else ""
        return f"{self.root}.{self.embeddings[0]}{inner}.weight"

    @property
    def fresh(self) -> tuple[str, ...]:
        """Modules of a classifier, by full name, that a checkpoint may lack: they then begin at random."""
        if self.task != "classify":
            return ()
        return (f"{self.root}.{self.norm}", *self.head) if self.norm else self.head


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
    "bert": Family(
        "BertForSequenceClassification", "bert", ("embeddings",), "encoder.layer", "pooler", ("query", "key", "value"),
        task="classify", head=("dropout", "classifier"),
    ),
    "roberta": Family(
        "RobertaForSequenceClassification", "roberta", ("embeddings",), "encoder.layer", "", ("query", "key", "value"),
        task="classify", head=("classifier",),
    ),
    "deberta-v2": Family(
        "DebertaV2ForSequenceClassification", "deberta", ("embeddings", "encoder.conv"), "encoder.layer", "",
        ("query_proj", "key_proj", "value_proj"), task="classify", head=("pooler", "dropout", "classifier"),
        shared=("encoder.rel_embeddings", "encoder.LayerNorm"), eager=True,
    ),
}  # fmt: skip
TASKS = ("causal", "classify")


def names_for(task: str) -> tuple[str, ...]:
    """The types of models that can be trained for this kind of `[task]`."""
    return tuple(name for name, family in FAMILIES.items() if family.task == task)


TENSOR_PARALLEL = tuple(name for name, family in FAMILIES.items() if family.tensor_parallel)
