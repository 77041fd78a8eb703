"""A mean per token, that both ends of a boundary hold; it grows with the largest token seen."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional


def following(tokens: Tensor) -> Tensor:
    """What gradients' means are kept by: of every token, int[.., length], 1 + the one after it, 0 after the last.

    What a language model's hidden state is wrong about is mostly which token comes next.
    """
    return functional.pad(tokens[..., 1:] + 1, (0, 1))


class TokenMeans:
    """Of rows of one width.

    rate: at which a token's mean follows what was decoded, or 1/visits where that is more.
    table: float32[tokens, width]; visits: int32[tokens], steps in which a token was seen.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.table = torch.zeros(0, 0)
        self.visits = torch.zeros(0, dtype=torch.int32)
        self._factor = 1.0  # of the open step's unit over the table's
        self._total: Tensor | None = None  # of the open step
        self._count: Tensor | None = None

    def of(self, tokens: Tensor, like: Tensor) -> Tensor:
        """The tokens' means, [.., width]. like: a tensor of that width, of the dtype and device wanted."""
        self._make_room(tokens, like)
        return (functional.embedding(tokens, self.table) * self._factor).to(like.dtype)

    def note(self, tokens: Tensor, decoded: Tensor) -> None:
        """Add what was decoded beside the means, [.., width]; in the same order with the same bits."""
        rows, flat = decoded.detach().float().reshape(-1, decoded.shape[-1]), tokens.reshape(-1)
        if self._total is None or self._count is None:
            self._total, self._count = torch.zeros_like(self.table), torch.zeros_like(self.table[:, 0])
        grown = len(self.table) - len(self._count)
        if grown:
            self._total = functional.pad(self._total, (0, 0, 0, grown))
            self._count = functional.pad(self._count, (0, grown))
        for total, values in ((self._total, rows), (self._count, torch.ones_like(rows[:, 0]))):
            if total.is_cuda:
                total.index_put_((flat,), values, accumulate=True)  # sorts, where index_add_ adds in any order
            else:
                total.index_add_(0, flat, values)  # one after the other, where index_put_ adds in any order

    def end_step(self, keep: bool) -> None:
        """Move the means by what the step's messages held beside them, or drop that."""
        if keep and self._factor != 1:
            self.table *= self._factor
        if keep and self._total is not None and self._count is not None:
            grown = len(self.table) - len(self._count)
            total, count = functional.pad(self._total, (0, 0, 0, grown)), functional.pad(self._count, (0, grown))
            self.visits += count > 0
            rate = (1 / self.visits.clamp_min(1).float()).clamp_min(self.rate)
            self.table += (rate / count.clamp_min(1))[:, None] * total
        self._total, self._count, self._factor = None, None, 1.0

    def rescale(self, factor: float) -> None:
        """What is coded is in another unit from the open step on, if that is kept."""
        self._factor *= factor

    def tensors(self) -> dict[str, Tensor]:
        """For checkpoints."""
        return {"table": self.table, "visits": self.visits}

    def read(self, state: Mapping[str, Tensor]) -> None:
        """Take over `tensors()`; nothing: begin anew."""
        self.table = state["table"].clone() if "table" in state else torch.zeros(0, 0)
        self.visits = state["visits"].clone() if "visits" in state else torch.zeros(0, dtype=torch.int32)
        self._total, self._count, self._factor = None, None, 1.0

    def _make_room(self, tokens: Tensor, like: Tensor) -> None:
        """Rows for all of these tokens; another width or device than before begins anew. Waits for a card."""
        width, needed = like.shape[-1], int(tokens.max()) + 1 if tokens.numel() else 1
        if self.table.shape[1] != width or self.table.device != like.device:
            same = self.table.shape[1] == width
            self.table = self.table.to(like.device) if same else torch.zeros(0, width, device=like.device)
            self.visits = self.visits.to(like.device) if same else self.visits.new_zeros(0, device=like.device)
        if needed > len(self.table):
            more = max(needed, 2 * len(self.table)) - len(self.table)
            self.table = functional.pad(self.table, (0, 0, 0, more))
            self.visits = functional.pad(self.visits, (0, more))
