"""Small memory on a card that kernels find as they need it, without a launch that prepares it.

Flags that are true are made many at a time. A counter that is zero stays with its stream, whose kernels run one after
the other, and a kernel that used it leaves zero. A CUDA graph that is being captured gets memory of its own, which
its replays prepare: they may run beside the stream it was captured on.
"""

from __future__ import annotations

import torch
from triton.runtime import driver

FLAGS, APART = 256, 16  # made at a time; bytes from one to the next: Triton compiles for the alignment of an address
_flags = {}  # (card, stream) → flags that nobody has
_zeros = {}  # (card, stream) → int64[1]


def true_flag(like):
    """0-d bool that is true, on the device of `like`, for one kernel of the current stream to make false."""
    where = _stream(like)
    if where is None:
        return torch.ones((), dtype=torch.bool, device=like.device)
    left = _flags.get(where)
    flag = None if left is None else next(left, None)
    if flag is None:
        made = torch.ones(FLAGS, APART, dtype=torch.bool, device=like.device)
        left = _flags[where] = iter(made[:, 0].unbind())
        flag = next(left)
    return flag


def zero_counter(like):
    """int64[1], a zero on the device of `like`, for one kernel of the current stream that leaves a zero."""
    where = _stream(like)
    if where is None:
        return torch.zeros(1, dtype=torch.int64, device=like.device)
    found = _zeros.get(where)
    if found is None:
        found = _zeros[where] = torch.zeros(1, dtype=torch.int64, device=like.device)
    return found


def _stream(like):
    """(card, stream) of the kernels that are launched now; None where memory cannot be kept for them."""
    if not like.is_cuda or torch.cuda.is_current_stream_capturing():
        return None
    card = like.get_device()
    return card, driver.active.get_current_stream(card)
