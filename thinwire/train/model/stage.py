"""A pipeline stage of a Hugging Face model: some of its own modules, under their own names, and how they are called.

Cut by hand: embedding on the first stage, consecutive layers, final norm and head on the last. Positions, rotary angles
and masks are made inside each stage, so only hidden states cross a boundary. This is a decoder's; encoder.py has the
other kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from thinwire.data_parallel.tied_embedding import RowEmbedding
from thinwire.train.config.families import FAMILIES, HEAD


class Stage(nn.Module):
    """token ids [batch, seq] (first) or hidden [batch, seq, hidden] → hidden, or logits [batch, seq, vocab] (last).

    Parameter names are those of the full model ("model.layers.3.self_attn.q_proj.weight"). Where embedding and
    head are tied, first and last stage each hold a copy, and `tied` is the name of this stage's; it is None where
    no other rank has a copy, or where copies are frozen.

    full: the whole model without storage. layers: those of this stage. index, stages: which stage of how
    many. recompute: compute activations again in backward instead of keeping them.
    """

    def __init__(self, full: Any, layers: range, index: int, stages: int, recompute: bool = False) -> None:
        super().__init__()
        self.config = full.config
        self.family = FAMILIES[self.config.model_type]
        self.layers = layers
        self.index = index
        self.stages = stages
        self.recompute = recompute
        self.needs_input_grad = index > 0  # false too where nothing before this stage is trained
        self.tied = self._tied_copy()
        self.shared: tuple[str, ...] = ()  # parameters that every stage has a copy of
        self.by_rows = False  # the last stage's copy of a tied embedding is the only one
        self.add_module(self.family.root, self._body(full.get_submodule(self.family.root)))
        if self.is_last:
            for name in self.family.head:
                self.add_module(name, full.get_submodule(name))

    def _body(self, whole: Any) -> nn.Module:
        """The modules of the model's trunk that are on this stage; a ModuleDict keeps a layer's number in its name."""
        body, family = nn.Module(), self.family
        if self.is_first:
            for name in family.embeddings:
                body.add_module(name, whole.get_submodule(name))
            if hasattr(whole, "drop"):
                body.add_module("drop", whole.drop)
        every = whole.get_submodule(family.layers)
        body.add_module(family.layers, nn.ModuleDict({str(i): every.get_submodule(str(i)) for i in self.layers}))
        if self.is_last:
            body.add_module(family.norm, whole.get_submodule(family.norm))
        if hasattr(whole, "rotary_emb"):  # its frequencies are computed, not stored: made here, off the meta device
            body.add_module("rotary_emb", type(whole.rotary_emb)(config=self.config))
        return body

    def tie_by_rows(self) -> RowEmbedding | None:
        """From now on the last stage owns the tied embedding. On the first stage: what stands in place of its copy."""
        self.by_rows = True
        if not self.is_first:
            return None
        body = self.get_submodule(self.family.root)
        held = RowEmbedding(body.get_submodule(self.family.embeddings[0]))  # type: ignore[arg-type]
        body.add_module(self.family.embeddings[0], held)
        self.tied = None
        return held

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.stages - 1

    def _tied_copy(self) -> str | None:
        if not self.config.tie_word_embeddings or self.stages == 1 or not (self.is_first or self.is_last):
            return None
        return self.family.embedding if self.is_first else HEAD

    def forward(self, x: Tensor, segments: Tensor | None = None) -> Tensor:
        """segments: [batch, seq], of an encoder only; None there: all is one text."""
        body: Any = self.get_submodule(self.family.root)
        hidden = self._embed(body, x, segments) if self.is_first else x
        arguments = self._arguments(body, hidden, segments)
        for number, layer in body.get_submodule(self.family.layers).named_children():
            hidden = self._layer(body, int(number), layer, hidden, arguments(int(number)))
        if not self.is_last:
            return hidden
        if self.family.norm:
            hidden = body.get_submodule(self.family.norm)(hidden)
        for name in self.family.head:
            hidden = self.get_submodule(name)(hidden)
        return hidden

    def _layer(self, body: Any, number: int, layer: nn.Module, hidden: Tensor, arguments: dict[str, Any]) -> Any:
        if self.recompute and self.training and torch.is_grad_enabled():
            return checkpoint(layer, hidden, use_reentrant=False, **arguments)
        return layer(hidden, **arguments)

    def _arguments(self, body: Any, hidden: Tensor, segments: Tensor | None) -> Callable[[int], dict[str, Any]]:
        """What layers are called with beside the hidden states, by number."""
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]  # [1, seq]
        masks = self._masks(hidden)
        shared: dict[str, Any] = {"position_ids": positions, "use_cache": False}
        if hasattr(body, "rotary_emb"):
            shared["position_embeddings"] = body.rotary_emb(hidden, position_ids=positions)
        return lambda number: {"attention_mask": masks[self._kind(number)], **shared}

    def _embed(self, body: Any, ids: Tensor, segments: Tensor | None) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)[None]  # [1, seq]
        tokens, *places = (body.get_submodule(name) for name in self.family.embeddings)
        hidden = tokens(ids)
        for place in places:
            hidden = hidden + place(positions)
        return body.drop(hidden) if hasattr(body, "drop") else hidden

    def _kind(self, layer: int) -> str:
        kinds = getattr(self.config, "layer_types", None)
        return kinds[layer] if kinds else "full_attention"

    def _masks(self, hidden: Tensor) -> dict[str, Any]:
        """A causal mask for each kind of attention on this stage, as the full model makes it."""
        from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

        makers = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
        arguments = {"config": self.config, "inputs_embeds": hidden, "attention_mask": None, "past_key_values": None}
        return {kind: makers[kind](**arguments) for kind in {self._kind(i) for i in self.layers}}
