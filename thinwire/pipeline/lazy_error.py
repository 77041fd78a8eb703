"""Does lazy error propagation help at this boundary? Try it, and compare the gradients that it is meant to repair.

Optimus-CC (ASPLOS 2023): the sender adds what a message left out, e_i, to the next one, so that what arrives
telescopes: ĝ_i = g_i + e_{i−1} − e_i. A layer with inputs x_i (dW = Σ x_iᵀg_i) then errs by Σ x_iᵀ(e_{i−1} − e_i).
What all tokens and micro-batches have in common cancels. The rest does not, and grows: e_{i−1} was cut from other
tokens, so a message errs by two residuals instead of one, each larger than before since the codec has to code it too.
With ν the growth of a message's error energy (2.1 for three bits) and s the share of the plain dW error's energy that
is common to the micro-batches of a step, lazy error is better where

    ν(1 − s) < 1,   that is   s > 1 − 1/ν.

s belongs to the errors as much as to the activations, to the number of tokens and of micro-batches, and it falls as
training goes on (docs/pipeline.md): activations alone do not tell it. So both are tried beside what is sent:
every message of a few steps is also encoded without and with a residual, but not sent, and the errors of Σ aᵀĝ over a
step are compared, with the boundary's own activations a for x. The better one is used from then on, until the next
trial at AGAIN times as many steps.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.codecs.base import Codec
from thinwire.codecs.lowrank import gaussian, matrix_shape
from thinwire.memory import ErrorFeedback, Memory, Plain
from thinwire.memory.channel import Channel

logger = logging.getLogger("thinwire.pipeline")

STEPS = 4  # in which the residual grows, and again as many that are compared
AGAIN = 4
SKETCH = 64  # columns of the random projection of activations
SHADOWS = {
    "plain": Memory("Watched", beta=1.0),  # Plain, but what messages leave out is added up, and so can be read off
    "lazy": ErrorFeedback(),
}


class Trial:
    """The trials of one boundary, at its sending end. `lazy` is the last decision; False before the first.

    name: the lane's. codec: its link's. seed: the run's.
    """

    def __init__(self, name: str, codec: Codec, seed: int) -> None:
        self.name = name
        self.step = 0
        self.began = 0  # the step at which the last trial began, or the next will begin
        self.lazy = False
        self.sums = dict.fromkeys(SHADOWS, 0.0)  # Σ over steps of ‖Σ aᵀ(ĝ − g)‖²
        self._codec, self._seed = codec, seed
        self._shadows: dict[str, Channel] = {}
        self._seen: dict[tuple[int, int], Tensor] = {}  # (micro-batch, tensor) → activations' sketch
        self._errors: dict[tuple[str, int], Tensor] = {}  # (kind, tensor) → Σ aᵀ(ĝ − g) of this step, sketched

    @property
    def on(self) -> bool:
        """Is this step one of a trial?"""
        return self.began <= self.step < self.began + 2 * STEPS

    @property
    def memory(self) -> Memory:
        """What the last decision asks for."""
        return ErrorFeedback() if self.lazy else Plain()

    @property
    def ratio(self) -> float:
        """The gradients' error energy with a residual over that without, in the last trial."""
        return self.sums["lazy"] / self.sums["plain"] if self.sums["plain"] else 1.0

    def begin(self, step: int) -> None:
        """Open step number `step` of the pipeline."""
        if self.step == self.began:
            self._shadows = {kind: self._shadow(kind) for kind in SHADOWS}
            self.sums = dict.fromkeys(SHADOWS, 0.0)
        for shadow in self._shadows.values():
            shadow.begin(step)

    def note_activation(self, microbatch: int, index: int, a: Tensor) -> None:
        """a: float[rows, …, width], the activation whose gradient will be sent as tensor `index` of a micro-batch."""
        if self.on:
            self._seen[microbatch, index] = _sketch(a.detach())

    def note_activations(self, microbatch: int, tensors: Sequence[Tensor]) -> None:
        """All inputs of a stage for one micro-batch; those that are not floating point have no gradient."""
        for index, a in enumerate(x for x in tensors if x.is_floating_point()):
            self.note_activation(microbatch, index, a)

    def note_message(self, microbatch: int, index: int, g: Tensor) -> None:
        """g: float[rows, …, width], which is being sent. In the shadows ĝ − g = residual before − after."""
        a = self._seen.pop((microbatch, index), None)
        if a is not None and a.is_cuda:  # made on the computation's stream, used on the transport's
            a.record_stream(torch.cuda.current_stream(a.device))
        for kind, shadow in self._shadows.items():
            before = shadow.state.read("e", str(index))
            shadow.send(str(index), g, nonfinite="later")
            after = shadow.state.read("e", str(index))
            if a is not None and after is not None and after.shape == g.shape:
                left = after if before is None or before.shape != g.shape else after - before
                error = a.T @ _matrix(left)
                so_far = self._errors.get((kind, index))
                self._errors[kind, index] = error if so_far is None else so_far + error

    def end_step(self, keep: bool) -> None:
        """Close the step; one that is rolled back (not `keep`) does not count."""
        for shadow in self._shadows.values():
            shadow.resolve_checks()
            if keep:
                shadow.commit()
            else:
                shadow.rollback()
        if keep:
            if self.on and self.step >= self.began + STEPS:
                for (kind, _), error in self._errors.items():
                    self.sums[kind] += float(error.square().sum())
            self.step += 1
            if self.step == self.began + 2 * STEPS:
                self._decide()
        self._seen = {}
        self._errors = {}

    def _decide(self) -> None:
        self.lazy = self.ratio < 1
        self.began = AGAIN * self.step
        self._shadows = {}
        logger.info("%s: error energy with lazy error %.2f times that without: %s until step %d", self.name, self.ratio,
                    "on" if self.lazy else "off", self.began)  # fmt: skip

    def _shadow(self, kind: str) -> Channel:
        return Channel(self._codec, SHADOWS[kind], seed=self._seed, name=f"{kind} {self.name}", measure_every=0)

    def state_dict(self) -> dict[str, Tensor]:
        """Decision, sums, and the state of a trial under way."""
        values = [self.step, self.began, self.lazy, *self.sums.values()]
        out = {"trial": torch.tensor([float(value) for value in values], dtype=torch.float64)}
        for kind, shadow in self._shadows.items():
            out |= {f"trial/{kind}/{name}": value for name, value in shadow.state_dict().items()}
        return out

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over a `state_dict()`."""
        step, began, lazy, *sums = state["trial"].tolist()
        self.step = int(step)
        self.began = int(began)
        self.lazy = bool(lazy)
        self.sums = dict(zip(SHADOWS, sums))
        self._shadows = {}
        for kind in SHADOWS:
            prefix = f"trial/{kind}/"
            saved = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
            if saved:
                self._shadows[kind] = self._shadow(kind)
                self._shadows[kind].load_state_dict(saved)


def _matrix(x: Tensor) -> Tensor:
    return x.detach().float().reshape(matrix_shape(tuple(x.shape)))


def _sketch(a: Tensor) -> Tensor:
    """float[tokens, at most SKETCH]: E‖(aR)ᵀe‖² ∝ ‖aᵀe‖² for a Gaussian R, the same for every message."""
    a = _matrix(a)
    width = a.shape[1]
    return a if width <= SKETCH else a @ gaussian(width * SKETCH, 0, a.device).view(width, SKETCH)
