"""A pipeline stage of an encoder that classifies: BERT, RoBERTa, DeBERTa.

Its layers see a whole text at once, so every stage needs to know where the padding is. Segments, which all ranks have
from the data, say it. DeBERTa's table of relative positions is used by every layer: every stage has a copy (`shared`),
and the gradients of all copies are summed before a step (train/update.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.errors import UsageError
from thinwire.train.config.families import Family
from thinwire.train.model.stage import Stage

WHOLE_BACKWARD = ("GPipe", "1F1B", "Interleaved1F1B")  # torch's schedules that differentiate a stage in one go


def check_schedule(family: Family, schedule: str) -> None:
    """UsageError where the schedule takes gradients of activations first and of weights later: torch cannot do that
    where layers share weights."""
    if family.shared and schedule not in WHOLE_BACKWARD:
        raise UsageError(
            f'[mesh] schedule = "{schedule}": not for {family.architecture}, whose layers share weights; allowed are '
            f"{', '.join(WHOLE_BACKWARD)}"
        )


class EncoderStage(Stage):
    """token ids [batch, seq] (first) or hidden [batch, seq, hidden] → hidden, or logits [batch, classes] (last).

    Its arguments are Stage's.
    """

    def __init__(self, full: Any, layers: range, index: int, stages: int, recompute: bool = False) -> None:
        super().__init__(full, layers, index, stages, recompute)
        prefixes = tuple(f"{self.family.root}.{name}." for name in self.family.shared)
        if stages > 1:
            self.shared = tuple(name for name, _ in self.named_parameters() if name.startswith(prefixes))

    def _body(self, whole: Any) -> nn.Module:
        """The encoder itself stays, with this stage's layers only; a ModuleDict keeps a layer's number in its name."""
        body, encoder = nn.Module(), whole.encoder
        if self.is_first:
            body.add_module("embeddings", _with_buffers(whole.embeddings))
        elif getattr(encoder, "conv", None) is not None:
            encoder.conv = None  # DeBERTa's: it follows the first layer
        encoder.layer = nn.ModuleDict({str(i): encoder.layer[i] for i in self.layers})
        body.add_module("encoder", encoder)
        if self.is_last and self.family.norm:
            body.add_module(self.family.norm, whole.get_submodule(self.family.norm))
        return body

    def _embed(self, body: Any, ids: Tensor, segments: Tensor | None) -> Tensor:
        if segments is None:
            segments = torch.ones_like(ids)
        kinds = (segments - 1).clamp(0, max(0, self.config.type_vocab_size - 1))
        masked = {"mask": _mask(segments, ids)} if self.family.shared else {}
        return body.embeddings(input_ids=ids, token_type_ids=kinds, **masked)

    def _arguments(self, body: Any, hidden: Tensor, segments: Tensor | None) -> Callable[[int], dict[str, Any]]:
        from transformers.masking_utils import create_bidirectional_mask

        mask = _mask(segments, hidden)
        if self.family.shared:
            encoder = body.encoder
            shared = {
                "attention_mask": encoder.get_attention_mask(mask),
                "relative_pos": encoder.get_rel_pos(hidden),
                "rel_embeddings": encoder.get_rel_embedding(),
            }
        else:
            made = create_bidirectional_mask(config=self.config, inputs_embeds=hidden, attention_mask=mask)
            shared = {"attention_mask": made}
        return lambda number: shared

    def _layer(self, body: Any, number: int, layer: nn.Module, hidden: Tensor, arguments: dict[str, Any]) -> Tensor:
        out = super()._layer(body, number, layer, hidden, arguments)
        out = out[0] if isinstance(out, tuple) else out
        conv = getattr(body.encoder, "conv", None)
        if conv is None or number > 0:
            return out
        tokens = arguments["attention_mask"].diagonal(dim1=-2, dim2=-1)[:, 0]  # a token sees itself, padding does not
        return conv(hidden, out, tokens)


def _mask(segments: Tensor | None, like: Tensor) -> Tensor:
    """[batch, seq]: 1 on tokens, 0 on padding. like: [batch, seq, …], the tokens or hidden states."""
    if segments is None:
        return torch.ones(like.shape[:2], dtype=torch.int64, device=like.device)
    return (segments > 0).long()


def _with_buffers(embeddings: Any) -> nn.Module:
    """The positions that the module counts on are computed, not stored: made here, off the meta device."""
    for name, buffer in list(embeddings.named_buffers()):
        counted = torch.arange(buffer.shape[-1])[None]
        embeddings.register_buffer(name, counted if name == "position_ids" else counted * 0, persistent=False)
    return embeddings
