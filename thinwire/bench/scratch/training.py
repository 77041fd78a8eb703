"""One run of `thinwire bench scratch`: a row and a seed, trained until it reaches a loss, or for so many steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from thinwire.bench.pipeline_ranks import loss_of
from thinwire.bench.scratch.corpus import text
from thinwire.bench.scratch.model import first_hidden, stages_of
from thinwire.bench.scratch.optimisers import Optimisers
from thinwire.bench.scratch.options import Scratch
from thinwire.bench.scratch.rows import DENSE, ROWS, Row
from thinwire.bench.scratch.sequence import Sequence
from thinwire.boundaries.projected import BoundedStage, Projected
from thinwire.config.wire import Wire


def sequence_of(row: Row, setup: Scratch, seed: int) -> Sequence:
    """The model of a seed, with boundaries as the row says."""
    modules = [module.to(setup.device) for module in bounded_stages(row, setup, seed)]
    return Sequence(modules, wire_of(row), setup.width, seed)


def bounded_stages(row: Row, setup: Scratch, seed: int) -> list[nn.Module]:
    """The model's stages, each between its boundaries where hidden states do not cross whole."""
    stages = stages_of(setup, seed)
    projected = projected_of(row, setup)
    if projected is None:
        return stages
    embedding = first_hidden(stages) if row.tables else None
    bounded = [projected.around(stage, i, setup.stages, setup.width) for i, stage in enumerate(stages)]
    for one in bounded:
        if embedding is not None:
            one.fill_table(embedding)
    return list(bounded)


def wire_of(row: Row) -> Wire:
    """The row's codecs."""
    forward = {**row.codec, "tokens": row.tokens, "scale_gradient": row.through}
    return Wire.of({"forward": forward, "backward": {**(row.back or row.codec), "tokens": row.next}})


def projected_of(row: Row, setup: Scratch) -> Projected | None:
    """How the row's boundaries learn; None where hidden states cross whole."""
    if row.share == 1 and not row.tables:
        return None
    return Projected(row.rank(setup.width), row.anchors, setup.vocabulary, rate=row.rate, tables=row.tables)


def train(
    row: Row, setup: Scratch, seed: int, target: float | None, advance: Callable[[str, int], None]
) -> dict[str, Any]:
    """Held-out losses by step, and where the target was reached.

    target: the held-out loss to stop at; None: train dense's steps. advance(note, steps): called at evaluations.
    """
    samples, held_out = (part.to(setup.device) for part in text(setup, seed))
    model = sequence_of(row, setup, seed)
    optimiser = Optimisers(setup, model.stages)
    limit = setup.steps if target is None else int(setup.steps * setup.most)
    losses: list[tuple[int, float]] = []
    computing = 0.0
    for step in range(limit):
        batch = samples[step * setup.rows : (step + 1) * setup.rows].long()
        rate = setup.rate * min(1.0, (step + 1) / setup.warmup)
        began = time.perf_counter()
        _train_step(model, optimiser, batch, rate)
        computing += time.perf_counter() - began
        if (step + 1) % setup.every == 0 or step + 1 == limit:
            held = _held_out(model, held_out)
            losses.append((step + 1, held))
            advance(f"{row.name}, seed {seed}, step {step + 1}: {held:.4f}", setup.every)
            if target is not None and held <= target and step + 1 >= setup.steps:
                break
    done = losses[-1][0]
    out = {
        "row": row.name, "seed": seed, "losses": losses, "seconds": computing / done,
        "bytes_per_token": model.sent() / (done * setup.tokens * (setup.stages - 1)),
    }  # fmt: skip
    if setup.opened and row.share < 1:
        out["opened"] = _open(model, optimiser, setup, samples[done * setup.rows :], held_out, seed)
    return out


def _open(
    model: Sequence, optimiser: Optimisers, setup: Scratch, samples: Tensor, held_out: Tensor, seed: int
) -> list[tuple[int, float]]:
    """Held-out losses without the boundaries, from now on: at once, and after so many steps of dense training. With
    `ramp` that share of the steps opens the boundaries little by little."""
    bare = [stage.module if isinstance(stage, BoundedStage) else stage for stage in model.stages]
    plain = Sequence(bare, wire_of(ROWS[DENSE]), setup.width, seed)
    opening = Opening(model, plain)
    losses = [(0, _held_out(plain, held_out))]
    for step in range(setup.opened):
        batch = samples[step * setup.rows : (step + 1) * setup.rows].long()
        share = (step + 1) / (setup.ramp * setup.opened) if setup.ramp else 1.0
        _train_step(plain if share >= 1 else opening.at(share), optimiser, batch, setup.rate)
        if (step + 1) % setup.every == 0 or step + 1 == setup.opened:
            losses.append((step + 1, _held_out(plain, held_out)))
    return losses


class Opening:
    """The stages of a model with boundaries over the dense lanes of a model without: hidden states cross whole."""

    def __init__(self, bounded: Sequence, plain: Sequence) -> None:
        self.bounded = bounded
        self.crossings = plain.crossings

    def at(self, share: float) -> Sequence:
        """The model while its boundaries pass `share` of what lies outside of them. They no longer learn."""
        self.bounded.crossings = self.crossings
        self.bounded.learns = False
        for stage in self.bounded.stages:
            cast(BoundedStage, stage).opening = share
        return self.bounded


def _held_out(model: Sequence, samples: Tensor) -> float:
    parts = [loss_of(model.evaluate(part[:, :-1].long()), part[:, 1:].long()) * len(part) for part in samples.split(64)]
    return float(torch.stack(parts).sum() / len(samples))


def _train_step(model: Sequence, optimiser: Optimisers, batch: Tensor, rate: float) -> None:
    optimiser.zero_grad()
    model.step(batch[:, :-1], batch[:, 1:], loss_of)
    optimiser.set_rate(rate)
    optimiser.step()
    if model.boundaries is not None:
        model.boundaries.step(rate, skipped=not model.learns)


def steps_to(losses: list[tuple[int, float]], target: float) -> float | None:
    """The step at which a curve first reaches the target, between two evaluations in proportion; None: never."""
    before: tuple[int, float] | None = None
    for step, loss in losses:
        if loss <= target:
            if before is None or before[1] <= loss:
                return float(step)
            return before[0] + (step - before[0]) * (before[1] - target) / (before[1] - loss)
        before = step, loss
    return None
