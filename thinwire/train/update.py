"""From local gradients to new weights: average over replicas, tie, clip over the whole mesh, step, or skip together."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.collectives.base import world
from thinwire.parallel.exchange import Exchange
from thinwire.parallel.reducer import Reducer
from thinwire.parallel.tied import TiedEmbedding
from thinwire.train.config import TrainConfig
from thinwire.train.mesh import Mesh
from thinwire.wire import Wire


class Update:
    """Owns the reducer, the tied embedding and the optimiser of this rank's parameters."""

    def __init__(
        self, config: TrainConfig, wire: Wire, mesh: Mesh, named: dict[str, nn.Parameter], tied: str | None,
        optimizer: torch.optim.Optimizer,
    ) -> None:  # fmt: skip
        self.config, self.mesh, self.named, self.optimizer = config, mesh, named, optimizer
        seed = config.run.seed
        rest = [(name, p) for name, p in named.items() if name != tied]
        self.reducer = Reducer(rest, wire, mesh.dp, seed=seed) if rest else None
        self.tied = None
        if tied is not None:
            self.tied = TiedEmbedding(named[tied], wire, mesh.ends, mesh.dp, mesh.pair, seed=seed)
        self.counted_once = [p for name, p in named.items() if name != tied or mesh.is_first]
        self.skips, self.waited = 0, 0.0
        self.last_norm: float | None = None

    def apply(self, rate: float) -> float | None:
        """One optimiser step at this learning rate; the gradient's norm, or None where the step was skipped."""
        with _bracket(self.reducer), _bracket(self.tied.reducer if self.tied else None):
            self._reduce()
            norm = self.norm()
            if not math.isfinite(norm):
                self._reject()
        if not math.isfinite(norm):
            self.skips += 1
            return None
        if self.config.optim.clip and norm > self.config.optim.clip:
            for parameter in self.named.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(self.config.optim.clip / norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        if self.tied is not None:
            self.tied.check()
        return norm

    def norm(self) -> float:
        """Of the whole gradient, over all stages; NaN or Inf anywhere is seen by everybody."""
        total = _squares(self.counted_once)
        if world(self.mesh.pp)[0] > 1:
            dist.all_reduce(total, group=self.mesh.pp)
        return float(total.sqrt())

    def zero_grad(self) -> None:
        for parameter in self.named.values():
            parameter.grad = None

    def scale_gradients(self, factor: float) -> None:
        if factor != 1:
            for parameter in self.named.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def close(self) -> None:
        for reducer in self._compressed().values():
            reducer.close()

    # --- what it has sent, for the metrics

    @property
    def gradient_sent(self) -> int:
        """Bytes of gradients that this rank has sent."""
        return self.reducer.exchange.sent if self.reducer else 0

    @property
    def embedding_sent(self) -> int:
        return self.tied.sent if self.tied else 0

    @property
    def raw_sent(self) -> int:
        """What an exact all-reduce in fp32 would have sent so far."""
        return sum(_ring(r.size, r.exchange) * r.exchange.steps for r in self._compressed().values())

    @property
    def gradient_error(self) -> float | None:
        """‖residual‖ / ‖gradient‖ of this rank: how many steps' worth of gradient is still owed."""
        if self.reducer is None or self.last_norm in (None, 0.0):
            return None
        owed = self.reducer.exchange.residual_norm()
        return None if owed is None else owed / self.last_norm

    def _reduce(self) -> None:
        began = time.perf_counter()
        self.last_norm = float(_squares(self.reducer.parameters.values()).sqrt()) if self.reducer else None
        if self.reducer is not None:
            self.reducer.finish()
        if self.tied is not None:
            self.tied.finish()
        self.waited = time.perf_counter() - began

    def _reject(self) -> None:
        for reducer in (self.reducer, self.tied.reducer if self.tied else None):
            if reducer is not None:
                reducer.failed = True

    # --- state: compression per replica and position, moments by parameter name

    def state_dict(self) -> dict[str, Tensor]:
        out = {}
        for name, parameter in self.named.items():
            for field, value in self.optimizer.state[parameter].items():
                out[f"optim/{name}/{field}"] = value
        for prefix, reducer in self._compressed().items():
            out |= {f"{prefix}/{name}": value for name, value in reducer.state_dict().items()}
        return out

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, parameter in self.named.items():
            prefix = f"optim/{name}/"
            fields = {n.removeprefix(prefix): v for n, v in state.items() if n.startswith(prefix)}
            if fields:
                self.optimizer.state[parameter] = fields
        for prefix, reducer in self._compressed().items():
            own = {n.removeprefix(f"{prefix}/"): v for n, v in state.items() if n.startswith(f"{prefix}/")}
            if own:
                reducer.load_state_dict(own)

    def wants(self, name: str) -> bool:
        """Is this name of a checkpoint for this rank?"""
        if any(name.startswith(f"{prefix}/") for prefix in self._compressed()):
            return True
        kind, _, rest = name.partition("/")
        return kind == "optim" and rest.rpartition("/")[0] in self.named

    def _compressed(self) -> dict[str, Reducer]:
        out = {} if self.reducer is None else {f"gradient-{self.mesh.position}": self.reducer}
        return out if self.tied is None else out | {"embedding": self.tied.reducer}


def _squares(parameters: Iterable[nn.Parameter]) -> Tensor:
    norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float64) for p in parameters if p.grad is not None]
    return torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64)


def _ring(size: int, exchange: Exchange) -> int:
    return 2 * 4 * sum(unit.numel for unit in exchange.units) * (size - 1) // size


def _bracket(reducer: Reducer | None) -> AbstractContextManager[Any]:
    return nullcontext() if reducer is None else reducer.step()
