"""A rank's gradients in a quorum: averaged with the same rank of the other members.

The two copies of a tied embedding are first added up inside the member, as in any pipeline. Then each end averages its
copy by itself, with nothing else in the exchange: both ends send and get the same bits, and the copies stay equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from thinwire.collectives import Dense
from thinwire.config.wire import Reduction, Wire
from thinwire.data_parallel.reducer import Reducer
from thinwire.data_parallel.tied_embedding import NAME
from thinwire.elastic.quorum import Quorum
from thinwire.errors import UsageError
from thinwire.train.build import Parts
from thinwire.train.data.batches import Batch
from thinwire.train.engine import Piped

COUNTED = ("forward_bytes", "backward_bytes", "gradient_bytes", "embedding_bytes", "raw_bytes", "healed_bytes")


class Gradients:
    """Of this rank.

    parts: what it trains with. wire: its gradient and embedding sections are used. quorum: of the members.
    UsageError where the model has weights that all stages share.
    """

    def __init__(self, parts: Parts, wire: Wire, quorum: Quorum) -> None:
        update, seed = parts.update, parts.config.run.seed
        if update.shared is not None:
            raise UsageError("this model has weights that all stages share: not with [run] elastic and pp > 1")
        assert update.adam is not None
        self.parts = parts
        self.quorum = quorum
        self.adam = update.adam
        self.tied = update.tied
        self.open = False  # a pass of the engine waits for the vote
        own = None if self.tied is None else self.tied.parameter
        rest = [(name, p) for name, p in parts.named.items() if p is not own]
        self.reducers = {"exchange": Reducer(rest, wire, quorum, seed=seed)}
        if own is not None:
            given = replace(wire.embedding or Reduction(Dense()), exact_dims=0, exclude=())
            self.reducers["tied"] = Reducer([(NAME, own)], Wire(gradient=given), quorum, seed=seed, name=NAME)

    @property
    def skips(self) -> int:
        """Steps that did not count."""
        return self.reducers["exchange"].skips

    def backward(self, batch: Batch) -> float:
        """This rank's part of the member's loss on its samples; gradients are in .grad. Without samples they are 0."""
        self.open = bool(len(batch.ids))
        for p in self.parts.named.values():
            p.grad = None if self.open else torch.zeros_like(p)
        if not self.open:  # there are more members than sequences in a step
            return 0.0
        parts, run = batch.split(self.parts.config.optim.accumulate), self.parts.engine.run
        losses = [run(part, True, done=None if part is not parts[-1] else lambda: None) for part in parts]
        return sum(float(loss) for loss in losses if loss is not None)

    def faults(self) -> int:
        """What went wrong inside the member, as this rank saw it."""
        return self.parts.engine.faults() if self.open else 0

    def exchange(self) -> None:
        """.grad ← the mean over the members. What goes wrong between members is reported to the quorum."""
        if self.tied is not None:
            self.tied.exchanged()
        for reducer in self.reducers.values():  # one after the other: they share the quorum's connections
            reducer.finish()

    def squares(self) -> float:
        """Of this rank's part of the gradient, added up."""
        return self.parts.update.squares()

    def settle(self, counts: bool, rate: float) -> None:
        """After the vote: what was staged inside the member is kept where the step `counts`."""
        if self.tied is not None:
            self.tied.reducer.settle(not counts)
        if self.open:
            self.parts.engine.settle(not counts, rate)

    def optimise(self, rate: float, norm: float) -> None:
        """One step of the optimiser, from the means in .grad. norm: of the whole gradient."""
        clip = self.parts.config.optim.clip
        if clip and norm > clip:
            for p in self.parts.named.values():
                if p.grad is not None:
                    p.grad.mul_(clip / norm)
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()

    def counts(self) -> Tensor:
        """COUNTED, of this rank so far."""
        stats = self.parts.engine.pipeline.stats if isinstance(self.parts.engine, Piped) else None
        frames = [stats.forward_bytes, stats.backward_bytes] if stats else [0, 0]
        gradient, *tied = (reducer.exchange for reducer in self.reducers.values())
        inside = self.tied.sent if self.tied else 0
        raw = (stats.raw_bytes if stats else 0) + (self.tied.raw_sent if self.tied else 0)
        raw += sum(exchange.ring_bytes for exchange in (gradient, *tied))
        embedding = inside + sum(exchange.sent for exchange in tied)
        now = [*frames, gradient.sent, embedding, raw, self.quorum.healing.sent]
        return torch.tensor(now, dtype=torch.float64)

    # --- checkpoints: residuals and shifts of this rank, and what its pipeline remembers

    def state_dict(self, rank: int) -> dict[str, Tensor]:
        """rank: of this member's ranks."""
        parts = {name: reducer.exchange.state_dict() for name, reducer in self.reducers.items()}
        if self.tied is not None:
            parts["tied inside"] = self.tied.reducer.state_dict()
        parts["pipeline"] = self.parts.engine.state_dict()
        return {f"{_of(kind, rank)}{name}": v for kind, state in parts.items() for name, v in state.items()}

    def load_state_dict(self, state: Mapping[str, Tensor], rank: int) -> None:
        """Go on from there."""
        found = {kind: _under(_of(kind, rank), state) for kind in (*self.reducers, "tied inside", "pipeline")}
        for kind, reducer in self.reducers.items():
            reducer.exchange.load_state_dict(found[kind])
        if self.tied is not None and found["tied inside"]:
            self.tied.reducer.load_state_dict(found["tied inside"])
        if found["pipeline"]:
            self.parts.engine.load_state_dict(found["pipeline"])

    def close(self) -> None:
        for reducer in self.reducers.values():
            reducer.close()


def _of(kind: str, rank: int) -> str:
    return f"{kind}-{rank}/" if rank else f"{kind}/"


def _under(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
