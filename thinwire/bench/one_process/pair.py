"""The copies of a tied embedding in one process: their gradients are averaged as the ranks of both ends would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from thinwire.collectives import Dense
from thinwire.collectives.in_process import InProcess, InProcessGroup
from thinwire.config.wire import Reduction, Wire, warmup_steps
from thinwire.data_parallel.exchange import Exchange
from thinwire.data_parallel.tied_embedding import NAME
from thinwire.errors import UsageError


class TiedPair:
    """The first and the last stage's copy of a tied embedding, as `TiedEmbedding` keeps them equal over all replicas.

    copies: the two parameters, whose values all replicas share. wire: its embedding section is used. seed: the run's.
    dp: replicas.
    """

    def __init__(self, copies: tuple[nn.Parameter, nn.Parameter], wire: Wire, seed: int, dp: int = 1) -> None:
        reduction = wire.embedding or Reduction(Dense())
        if reduction.sync == "rows":
            raise UsageError("[wire.embedding] sync = 'rows': not in one process; take fused or separate")
        self.copies, self.dp = copies, dp
        self.sync = reduction.sync
        self.warmup = warmup_steps("embedding", reduction)
        inner, shapes = replace(reduction, exact_dims=0, exclude=()), {NAME: tuple(copies[0].shape)}
        groups = [InProcessGroup(dp)] * 2 if self.sync == "separate" else [InProcessGroup(2 * dp)]
        self.groups = [(group, [Exchange(shapes, inner, one, seed) for one in group.members]) for group in groups]
        self.pair_bytes = 0

    def reduce(self, local: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Both .grad ← the sum of the two stages' means over the replicas, as the wire carries it.

        local: both copies' gradients, by replica.
        """
        if self.sync == "separate":  # on each stage, and then between the two, exactly
            first, last = (self._mean(place, [pair[place] for pair in local]) for place in (0, 1))
            total = first + last
            self.pair_bytes += 2 * self.dp * total.nbytes
        else:
            total = self._mean(0, [gradient for pair in local for gradient in pair]).mul_(2)
        for copy in self.copies:
            copy.grad = total.clone()

    def settle(self, skipped: bool) -> None:
        """Keep what the step wrote, or drop it where it is `skipped`."""
        for exchange in (exchange for _, exchanges in self.groups for exchange in exchanges):
            exchange.rollback() if skipped else exchange.commit()

    def sent(self) -> int:
        """Bytes that all have sent."""
        return self.pair_bytes + sum(exchange.sent for _, exchanges in self.groups for exchange in exchanges)

    def _mean(self, place: int, gradients: Sequence[Tensor]) -> Tensor:
        group, exchanges = self.groups[place]
        if group.size == 1:
            return gradients[0]

        def mean(member: InProcess) -> Tensor:
            exchange = exchanges[member.rank]
            (unit,) = exchange.units
            values = gradients[member.rank].reshape(-1).clone()
            return exchange.reduce(unit, values, exact=exchange.steps < self.warmup)

        return group.run(mean)[0].view(gradients[0].shape)
