"""The k largest magnitudes of every row, exactly: rows are the tiles of a matrix, and each keeps as many.

The bits of |x| as an integer are ordered like |x|. So the k-th largest is found bit by bit, from the highest: a bit is
set where at least k magnitudes still reach the number. Rows are short enough to stay in a cache or in registers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.dispatch import choose, load

LONGEST = 1 << 14  # values of a row


def top_rows(x: Tensor, k: int, impl: str | None = None) -> Tensor:
    """x: float[rows, length] → int64[rows, k], ascending in each row, ties by index; 1 ≤ k ≤ length ≤ LONGEST."""
    impl = choose(x, impl)
    if impl != "reference":
        return load(impl, "tiles").top_rows(x.contiguous(), k)
    order = torch.sort(x.abs(), dim=1, descending=True, stable=True).indices
    return order[:, :k].sort(dim=1).values
