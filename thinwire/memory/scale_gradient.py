"""The gradient through a code's scale: what a sender adds to the gradient that comes back of what it sent.

A code C of rows takes its steps from the row's own scale, so C(λz) = λC(z) for λ > 0, and by Euler's theorem its
derivative J has J·z = C(z). The straight-through gradient takes J = 1, for which J·z = z: it does not see that large
values are coded with large errors, and nothing keeps what a model does not need from growing. The least change of it
that does is of rank one:

    J = 1 + e·zᵀ/‖z‖²,  e = C(z) − z        so       Jᵀg = g + z·(e·g)/‖z‖²

e·g is what the error did to the loss, to first order. It is known at the sender, which has z and e, and is sent g: not
a byte more crosses. Per row, that is over the last dimension. Beside token means z is what is left of x, and means are
taken for constants (docs/from-scratch.md has what it gains).
"""

from __future__ import annotations

import torch
from torch import Tensor

TINY = torch.finfo(torch.float32).tiny


def through_code(gradient: Tensor, z: Tensor, error: Tensor) -> Tensor:
    """Jᵀg, all of them [.., width]; in the dtype of `gradient`.

    gradient: of what the other end has. z: what was coded. error: what the code made of it, less z.
    """
    g, rows = gradient.float(), z.float()
    along = (g * error.float()).sum(-1, keepdim=True) / rows.square().sum(-1, keepdim=True).clamp_min(TINY)
    return (g + rows * along).to(gradient.dtype)


class KeptCodes:
    """What a sender keeps of its messages until their gradients come back, by micro-batch."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Tensor, Tensor, torch.cuda.Event | None]] = {}

    def keep(self, microbatch: int, z: Tensor, decoded: Tensor) -> None:
        """Of a message. decoded: what the other end has of z."""
        error = decoded - z
        event = torch.cuda.Event() if z.is_cuda else None
        if event is not None:
            event.record()
        self._kept[microbatch] = z, error, event

    def correct(self, microbatch: int, gradient: Tensor) -> Tensor:
        """The gradient that came back of that message, through its code; as it is where nothing was kept of it."""
        kept = self._kept.pop(microbatch, None)
        if kept is None:
            return gradient
        z, error, event = kept
        if event is not None:
            stream = torch.cuda.current_stream(z.device)
            stream.wait_event(event)  # frames may be made on a stream of their own
            for one in (z, error):
                one.record_stream(stream)
        return through_code(gradient, z, error)

    def clear(self) -> None:
        """Forget messages whose gradients did not come back."""
        self._kept.clear()
