"""Cases of links that are fitted to what they send, between real ranks: books of a transform, and token means."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from pipeline_support import LENGTH, Run, batch, fitting, gathered, loss_of
from rank_cases import check, check_equal, refused
from torch import Tensor

from thinwire.codecs import Quantize, Transform
from thinwire.config.wire import Link, Wire

FITTED = Wire(
    forward=Link(Transform(6, every=3), tokens=0.1, scale_gradient=True), backward=Link(Transform(6), tokens=0.1)
)
EARLY = Wire(
    forward=Link(Transform(5, every=3, early_bits=7, early_steps=6), tokens=0.1, scale_gradient=True),
    backward=Link(Transform(5, early_bits=7, early_steps=6), tokens=0.1),
)
STEPS = 7  # books come with steps 3 and 4, and 7


class Tokened(Run):
    """A pipeline whose stages are told the tokens."""

    tokens: Tensor | None = None

    def torch_step(self, x: Tensor, y: Tensor, losses: list[Tensor]) -> None:
        arguments = (x,) if self.first else ()
        targets = {"target": y, "losses": losses} if self.last else {}
        given = {} if self.tokens is None else {"tokens": self.tokens}
        self.schedule.step(*arguments, **targets, **given)

    def train(self, step: int, rows: int, *, tokens: bool = True) -> None:
        """One step. Rows of one token have something in common."""
        x, y = batch(rows, step)
        ids = torch.randint(5, (rows, LENGTH), generator=torch.Generator().manual_seed(step))
        self.tokens = ids if tokens else None
        self.step(x + 2 * ids[..., None] / 5, y, update=True)

    def weights(self) -> dict[str, Tensor]:
        return {f"{s.stage_index}.{n}": p.detach().clone() for s in self.stages for n, p in s.submod.named_parameters()}

    def fitted(self) -> dict[tuple[str, str], dict[str, Any]]:
        """By lane and end: means and basis."""
        out = {}
        for lane in self.pipe.lanes():
            if lane.name.startswith("forward"):
                channel: Any = lane.coded[0]
                book = channel.codec.book
                out[lane.name, lane.end] = {"means": channel.means.table.numpy(), "basis": book.basis.numpy()}
        return out


def fitted_links_train(name: str) -> None:
    """Both ends hold one table and one book, and the model is nearly that of exact messages.

    Bits fall with the seventh step.
    """
    microbatches = fitting(name, 2)[-1]
    exact, ours = Tokened(name, microbatches, Wire()), Tokened(name, microbatches, EARLY)
    for step in range(STEPS):
        exact.train(step, 2 * microbatches, tokens=False)
        ours.train(step, 2 * microbatches)
    check(ours.pipe.stats.skips == 0, "a step was skipped")
    for key, value in exact.weights().items():
        off = float((ours.weights()[key] - value).norm() / value.norm())
        check(off < 0.02, f"{name}: {key} is off by {off:.3f}")
    ends: dict[Any, Any] = {key: value for theirs in gathered(ours.fitted()) for key, value in theirs.items()}
    check(len(ends) >= 2, f"{name}: no boundary was fitted")
    for lane in {lane for lane, _ in ends}:
        for field in ("means", "basis"):
            sent, had = (torch.from_numpy(ends[lane, end][field]) for end in ("send", "recv"))
            check(bool(sent.any()) and torch.equal(sent, had), f"{name}: ends of {lane} differ in {field}")


def resumed_fitted_links_have_the_same_bits() -> None:
    """Saved after four steps: a book is in use, another is being made, and bits are still to fall."""
    whole, again = Tokened("1F1B", 4, EARLY), Tokened("1F1B", 4, EARLY)
    for step in range(4):
        whole.train(step, 8)
    for stage, new in zip(whole.stages, again.stages):
        new.submod.load_state_dict(stage.submod.state_dict())
    again.pipe.load_state_dict(whole.pipe.state_dict())
    for step in range(4, 9):
        whole.train(step, 8)
        again.train(step, 8)
        check_equal(f"step {step}", again.weights(), whole.weights())


def states_of_another_revision_are_refused() -> None:
    """Older ones say none, which is the first; what was sent by another codec says so, and goes on."""
    run = Tokened("1F1B", 4, FITTED)
    for step in range(4):
        run.train(step, 8)
    saved = run.pipe.state_dict()
    older = {name: value for name, value in saved.items() if "/revision/" not in name}
    for state, now, then in ((older, 2, 1), (saved, 4, 3)):
        with (
            mock.patch.object(Transform, "revision", now),
            refused(f"the state is of Transform, revision {then}, and this thinwire has revision {now}"),
        ):
            run.pipe.load_state_dict(state)
    run.pipe.load_state_dict(saved)
    run.train(4, 8)
    check(not run.pipe.skipped, "the step after the states that were refused was skipped")
    link = Link(Quantize(4, block=16), tokens=0.1)
    other = Tokened("1F1B", 4, Wire(forward=link, backward=Link(Quantize(8, block=16))))
    other.pipe.load_state_dict(saved)
    other.train(4, 8)
    back = other.pipe.state_dict()
    run.pipe.load_state_dict(back)
    run.train(5, 8)
    check(not other.pipe.skipped and not run.pipe.skipped, "a step with another codec was skipped")


def fitted_links_roll_back() -> None:
    """A NaN on the first stage: neither means nor books nor their counts move, and training goes on."""
    run = Tokened("1F1B", 4, FITTED)
    for step in range(5):
        run.train(step, 8)
    before = run.pipe.state_dict()
    x, y = batch(8)
    run.tokens = torch.zeros(8, LENGTH, dtype=torch.long)
    run.step(x * torch.nan, y)
    after = run.pipe.state_dict()
    check(run.pipe.skipped, "the step was not skipped")
    moved = [n for n in before if "fitted/" in n and not torch.equal(before[n], after[n])]
    check(not moved and any("fitted/" in name for name in before), f"moved: {moved}")
    run.train(5, 8)
    check(not run.pipe.skipped, "the step after it was skipped too")


def means_of_gradients_follow_the_loss_scale() -> None:
    """At both ends: what arrives, unscaled, is the same but for other rotations; also after dropped steps."""
    wire, scale = Wire(backward=Link(Transform(8), tokens=0.5)), {"now": 1.0}
    still, moving = Tokened("1F1B", 4, wire), Tokened("1F1B", 4, wire, scale=lambda: scale["now"])
    moving.schedule._loss_fn = lambda output, target: scale["now"] * loss_of(output, target)
    for step, factor in enumerate((1.0, 8.0, 8.0, 0.5)):
        scale["now"] = factor
        x, y = batch(8, 0)
        still.tokens = moving.tokens = torch.arange(8 * LENGTH).view(8, LENGTH) % 5
        still.step(x, y)
        moving.step(x, y)
        for name, gradient in still.gradients().items():
            off = float((moving.gradients()[name] / factor - gradient).norm() / gradient.norm())
            check(off < 0.05, f"step {step}: {name} is off by {off:.3f}")
        scale["now"] = 4 * factor
        moving.step(torch.full_like(x, torch.nan), y)
        check(moving.pipe.skipped, f"a step of NaN after step {step} was kept")


def tokens_are_needed() -> None:
    with refused("token means need schedule.step"):
        Tokened("1F1B", 2, FITTED).train(0, 4, tokens=False)
