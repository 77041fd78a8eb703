"""Both copies of a tied embedding in one process: their gradients are averaged as two ranks would."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from thinwire.collectives import Dense
from thinwire.collectives.in_process import InProcess, InProcessGroup
from thinwire.config.wire import Reduction, Wire, warmup_steps
from thinwire.data_parallel.exchange import Exchange
from thinwire.data_parallel.tied_embedding import NAME
from thinwire.errors import UsageError


class TiedPair:
    """The first and the last stage's copy of a tied embedding, as `TiedEmbedding` keeps them equal.

    copies: the two parameters. wire: its embedding section is used. seed: the run's.
    """

    def __init__(self, copies: tuple[nn.Parameter, nn.Parameter], wire: Wire, seed: int) -> None:
        reduction = wire.embedding or Reduction(Dense())
        if reduction.sync == "rows":
            raise UsageError("[wire.embedding] sync = 'rows': not in one process; take fused or separate")
        self.copies = copies
        self.sync = reduction.sync
        self.warmup = warmup_steps("embedding", reduction)
        self.group, inner = InProcessGroup(2), replace(reduction, exact_dims=0, exclude=())
        shapes = {NAME: tuple(copies[0].shape)}
        self.exchanges = [Exchange(shapes, inner, member, seed) for member in self.group.members]
        self.exact_bytes = 0

    def reduce(self) -> None:
        """Both .grad ← their sum, as the wire carries it."""
        if self.sync == "separate":  # one replica: nothing to average on a stage, and between stages it is exact
            total = _gradient(self.copies[0]) + _gradient(self.copies[1])
            self.exact_bytes += 2 * total.nbytes
            for copy in self.copies:
                _gradient(copy).copy_(total)
            return
        for copy, mean in zip(self.copies, self.group.run(self._mean)):
            _gradient(copy).copy_(mean.mul_(2))

    def settle(self, skipped: bool) -> None:
        """Keep what the step wrote, or drop it where it is `skipped`."""
        for exchange in self.exchanges if self.sync != "separate" else ():
            exchange.rollback() if skipped else exchange.commit()

    def sent(self) -> int:
        """Bytes that both have sent."""
        return self.exact_bytes + sum(exchange.sent for exchange in self.exchanges)

    def _mean(self, member: InProcess) -> Tensor:
        exchange, copy = self.exchanges[member.rank], self.copies[member.rank]
        (unit,) = exchange.units
        values = _gradient(copy).reshape(-1).clone()
        mean = exchange.reduce(unit, values, exact=exchange.steps < self.warmup)
        return mean.view(copy.shape)


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "a copy of the tied embedding has no gradient"
    return parameter.grad
