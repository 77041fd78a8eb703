"""The first stage's end of a tied embedding by rows (tied_rows.py): an embedding that holds some of its rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from thinwire.errors import UsageError


class RowEmbedding(nn.Module):
    """Stands in the first stage for its copy of a tied embedding, and holds some of its rows, at first all.

    like: the embedding that it replaces. A token whose row is not there is an IndexError.
    """

    def __init__(self, like: nn.Embedding) -> None:
        super().__init__()
        if like.max_norm is not None or like.scale_grad_by_freq or like.sparse:
            raise UsageError("a tied embedding by rows: max_norm, scale_grad_by_freq and sparse are not supported")
        self.vocabulary, self.width = like.weight.shape
        self.padding = like.padding_idx
        self.padding_row = like.padding_idx  # the row here that gets no gradient, if any
        self.ids = torch.arange(self.vocabulary)
        self.weight = nn.Parameter(like.weight.detach())
        self.register_buffer("places", self.ids.to(self.weight.device, copy=True), persistent=False)

    def put(self, ids: Tensor, rows: Tensor) -> None:
        """From now on hold the rows [k, d] of these tokens, sorted, and no others; `weight` is another parameter."""
        places = self.get_buffer("places").fill_(-1)
        places[ids.to(places.device)] = torch.arange(len(ids), device=places.device)
        self.ids = ids
        found = [] if self.padding is None else torch.nonzero(ids == self.padding).flatten().tolist()
        self.padding_row = found[0] if found else None
        self.weight = rows if isinstance(rows, nn.Parameter) else nn.Parameter(rows)

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.embedding(self.get_buffer("places")[tokens], self.weight, self.padding_row)
