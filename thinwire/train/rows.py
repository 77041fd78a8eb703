"""When the rows of a tied embedding travel in a run (data_parallel/tied_rows.py); nothing is done where it has none.

Every function takes this rank's end, or None, and tokens of this replica, which are the same at both ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from thinwire.data_parallel.tied_rows import TiedRows


def offer_rows(rows: TiedRows | None, tokens: Tensor) -> None:
    """The weights are those of the next step, which uses these tokens: their rows leave for the first stage."""
    if rows is not None:
        rows.announce(tokens)
        rows.begin()


def fetch_rows(rows: TiedRows | None, tokens: Tensor) -> None:
    """A step begins; on the first stage its rows are there when this returns."""
    if rows is not None:
        if not rows.is_open:  # the first step of a run, or of a resumed one
            offer_rows(rows, tokens)
        rows.fetch()


def lend_rows(rows: TiedRows | None, tokens: Iterable[Tensor]) -> AbstractContextManager[None]:
    """For evaluation on these tokens, if there are any; nothing that training depends on changes."""
    used = [] if rows is None else [some.flatten() for some in tokens]
    return rows.lend(torch.cat(used)) if rows is not None and used else nullcontext()
