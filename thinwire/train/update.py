"""From local gradients to new weights: average over replicas, tie, clip over the whole mesh, step, or skip together.

Some gradients leave before the schedule has ended (early_gradients.py).

With AdamW gradients are averaged here (Reducer). FrozenAdam averages momenta itself and takes local gradients; a tied
embedding, or what all stages share, then still goes through its own reduction and AdamW: its copies stay one parameter.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from thinwire.collectives.groups import world
from thinwire.config.wire import Wire
from thinwire.data_parallel.checkpoint import concerns
from thinwire.data_parallel.exchange import Exchange
from thinwire.data_parallel.frozen_adam import FrozenAdam
from thinwire.data_parallel.reducer import Reducer
from thinwire.data_parallel.tied_embedding import TiedEmbedding
from thinwire.data_parallel.tied_rows import TiedRows
from thinwire.train.config.sections import TrainConfig
from thinwire.train.early_gradients import EarlyGradients
from thinwire.train.learning_rate import frozen_adam, groups, moments
from thinwire.train.mesh import Mesh, groups_of_ends, groups_of_replicas
from thinwire.train.model.shared import SharedWeights
from thinwire.train.model.tensor_parallel import concerns as cut_concerns
from thinwire.train.model.tensor_parallel import dim_cut, plain_name, read_back, saved_name
from thinwire.train.vote import Exchanging

Named = dict[str, nn.Parameter]


class Update:
    """Owns the reducer, the tied embedding and the optimisers of this rank's parameters.

    named: the parameters by name. tied: the name of this rank's copy of a tied embedding, None without one. rows: this
    end of a tied embedding by rows; its copy is then the owner's. epoch: steps of one. stages: by number, the names of
    their parameters. shared: names of weights that all stages have.
    """

    def __init__(
        self, config: TrainConfig, wire: Wire, mesh: Mesh, named: Named, tied: str | None, rows: TiedRows | None,
        epoch: int, stages: Mapping[int, Iterable[str]], shared: Iterable[str] = (),
    ) -> None:  # fmt: skip
        self.config = config
        self.mesh = mesh
        self.named = named
        copies = {name: named[name] for name in shared if name in named}
        apart = {*copies, tied}
        rest = {name: p for name, p in named.items() if name not in apart}
        self.fused = wire.embedding is not None and wire.embedding.sync == "fused"
        self.frozen: FrozenAdam | None = None
        self.reducer: Reducer | None = None
        self.tied: TiedEmbedding | None = None
        self.rows = rows
        self.adam: torch.optim.AdamW | None = None
        if config.optim.name == "frozen_adam" and rest:
            self.frozen = frozen_adam(config, wire, mesh.dp, rest, epoch)
        elif rest:
            self.reducer = Reducer(rest.items(), wire, mesh.dp, seed=config.run.seed, agrees=False)
        # on a card, kernels of two communicators that ranks launch in different orders can wait for each other
        thread = self.reducer.thread if self.reducer is not None and config.run.device == "cuda" else None
        if tied is not None:
            groups_of_tied = (mesh.ends if rows is None else mesh.dp, mesh.dp, mesh.pair)
            seed = config.run.seed
            self.tied = TiedEmbedding(named[tied], wire, *groups_of_tied, seed=seed, agrees=False, thread=thread)
        self.shared = SharedWeights(copies, config.mesh.pp, config.run.seed, mesh.inside, thread) if copies else None
        by_adam = named if self.frozen is None else {name: p for name, p in named.items() if name in apart}
        if by_adam:
            self.adam = torch.optim.AdamW(groups(config.optim, by_adam), **moments(config), foreach=True)
        once = {n: p for n, p in named.items() if n not in apart or mesh.is_first or (n == tied and rows is not None)}
        self.counted_once = [p for p in once.values() if dim_cut(p) is not None or not mesh.shard]
        waits = None if rows is None or self.tied is None else self.tied.reducer  # for gradients of rows
        self.early = [reducer for reducer in self._reducers().values() if reducer is not waits]
        early = self.early if config.run.device == "cpu" else []
        self.watch = EarlyGradients(early, stages)
        self.begun = False  # the exchange of this step's gradients
        self.skips = 0
        self.waited = 0.0  # seconds of the last step that exchanges took after backward
        self.last_norm: float | None = None

    def begin(self) -> None:
        """This rank's gradients are complete: they are exchanged while earlier stages still compute."""
        if not self.begun:
            self.begun = True
            self.watch.end_backward()
            self.last_norm = float(sum_of_squares(self.reducer.parameters.values()).sqrt()) if self.reducer else None
            if self.rows is not None:
                self.rows.send_gradients()
            for reducer in self.early:
                reducer.put_rest()

    def exchanged(self) -> bool:
        """Wait for the exchange; did this rank see nothing wrong with it? The ranks vote on it, and call `apply`."""
        self.begin()
        began = time.perf_counter()
        if self.rows is not None and self.tied is not None:
            self.rows.add_gradients()
            self.tied.reducer.put_rest()
        good = self.reducer.exchanged() if self.reducer is not None else True
        if self.tied is not None:
            good &= self.tied.exchanged()
        if self.shared is not None:
            good &= self.shared.exchanged()
        self.waited = time.perf_counter() - began
        return good

    def squares(self) -> float:
        """Of this rank's part of the gradient, added up."""
        return float(sum_of_squares(self.counted_once))

    @property
    def exchanging(self) -> list[Exchanging]:
        """The kinds of gradient exchanges of a site: of replicas, of the tied embedding, of what all stages share."""
        replicas = Exchanging(groups_of_replicas(self.config.mesh))
        kinds = [replicas, Exchanging(groups_of_ends(self.config.mesh)) if self.fused else replicas]
        return kinds if self.shared is None else [*kinds, Exchanging([list(range(self.config.mesh.site_ranks))])]

    def tables(self) -> list[Tensor | None]:
        """This rank's checksums of gradient messages, by `exchanging`; None where it has no part."""
        reducers = [self.reducer, None if self.tied is None else self.tied.reducer]
        reducers += [] if self.shared is None else [self.shared.reducer]
        return [None if reducer is None else reducer.message_table() for reducer in reducers]

    def tied_checksum(self) -> int:
        """Of this rank's copy of a tied embedding, or of what all stages share; 0 without one."""
        held = self.tied or self.shared
        return 0 if held is None else held.checksum()

    def heal_tied(self, checksums: Sequence[int]) -> None:
        """Make the copies of a tied embedding, or of what all stages share, equal where they are not: `checksums` of
        the site's ranks."""
        if self.shared is not None and len({*checksums}) > 1:
            assert self.adam is not None
            states = [self.adam.state[p] for p in self.shared.named.values()]
            self.shared.heal(value for state in states for _, value in sorted(state.items()))
        if self.tied is not None:
            members = groups_of_ends if self.rows is None else groups_of_replicas
            mine = next(ranks for ranks in members(self.config.mesh) if self.mesh.rank_in_site in ranks)
            if len({checksums[rank] for rank in mine}) > 1:
                assert self.adam is not None
                self.tied.heal(value for _, value in sorted(self.adam.state[self.tied.parameter].items()))

    def norm(self, squares: Sequence[float]) -> float:
        """The norm of the whole gradient, from the squares of the site's ranks. Those of the replicas are equal, unless
        gradients are local (FrozenAdam's): then the root of their mean."""
        per_replica = len(squares) // self.config.mesh.dp
        sums = [sum(squares[r * per_replica : (r + 1) * per_replica]) for r in range(self.config.mesh.dp)]
        if self.config.optim.name == "frozen_adam":
            return math.sqrt(sum(sums) / len(sums))
        return math.sqrt(sums[self.mesh.replica])

    def apply(self, rate: float, norm: float, skipped: bool) -> None:
        """One optimiser step at this learning rate, or none where the step is `skipped`; on all ranks alike."""
        self.begun = False
        for reducer in self._reducers().values():
            reducer.settle(skipped)
        if self.rows is not None:
            (self.rows.rollback if skipped else self.rows.commit)()
        if skipped:
            self.skips += 1
            return
        if self.config.optim.clip and norm > self.config.optim.clip:
            self._scale(self.config.optim.clip / norm)
        for optimizer in self._optimizers():
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()

    def zero_grad(self) -> None:
        for parameter in self.named.values():
            parameter.grad = None

    def close(self) -> None:
        self.watch.close()
        for reducer in self._reducers().values():
            reducer.close()
        if self.rows is not None:
            self.rows.close()

    # --- what it has sent, for the metrics

    @property
    def gradient_sent(self) -> int:
        """Bytes of gradients (or momenta) that this rank has sent."""
        return sum(exchange.sent for exchange in self._exchanges())

    @property
    def embedding_sent(self) -> int:
        return (self.tied.sent if self.tied else 0) + (self.rows.sent if self.rows else 0)

    @property
    def raw_sent(self) -> int:
        """What exact all-reduces in fp32 would have sent so far."""
        own = sum(exchange.ring_bytes for exchange in self._exchanges())
        return own + (self.tied.raw_sent if self.tied else 0)

    @property
    def gradient_error(self) -> float | None:
        """‖residual‖ / ‖gradient‖ of this rank: how many steps' worth of gradient has not been sent yet."""
        if self.reducer is None or not self.last_norm:
            return None
        residual = self.reducer.exchange.residual_norm()
        return None if residual is None else residual / self.last_norm

    # --- state: compression per replica and position, moments by parameter name

    def state_dict(self) -> dict[str, Tensor]:
        out = {}
        for optimizer in self._optimizers():
            for name, parameter in self.named.items():
                for field, value in optimizer.state.get(parameter, {}).items():
                    out[saved_name(f"optim/{name}/{field}", value, parameter, self.mesh.slice)] = value
        for prefix, reducer in self._reducers().items():
            out |= {f"{prefix}/{name}": value for name, value in reducer.state_dict().items()}
        if self.frozen is not None:
            saved = self.frozen.state_dict()
            out |= {f"{self._momentum}/{name}": value for name, value in saved["wire"].items()}
            out["frozen"] = torch.tensor(self.frozen.frozen)
        if self.rows is not None:
            out |= {f"{self._rows}/{name}": value for name, value in self.rows.state_dict().items()}
        return out

    def load_state_dict(self, state: dict[str, Tensor], compression: bool = True) -> None:
        """Moments, and where `compression` (the pipeline is split as it was) the state of the compression."""
        for optimizer in self._optimizers():
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                name = next(n for n, p in self.named.items() if p is parameter)
                fields = {plain_name(field) for field in _under(f"optim/{name}/", state)}
                if fields:
                    optimizer.state[parameter] = {
                        f: read_back(f"optim/{name}/{f}", state, parameter, self.mesh.slice) for f in fields
                    }
        for prefix, reducer in self._reducers().items():
            own = _under(f"{prefix}/", state)
            if own and compression:
                reducer.load_state_dict(own)
        if self.rows is not None:
            self.rows.load_state_dict(_under(f"{self._rows}/", state) if compression else {})
        if self.frozen is not None:
            whole = self.frozen.state_dict()
            if compression:
                whole["wire"] = _under(f"{self._momentum}/", state)
            whole["freezing"] = {"frozen": bool(state["frozen"]), "norms": [], "skips": 0}
            self.frozen.load_state_dict(whole)

    def wants(self, name: str) -> bool:
        """Is this name of a checkpoint for this rank?"""
        kind, _, rest = name.partition("/")
        if kind == "optim":
            return rest.rpartition("/")[0] in self.named and cut_concerns(name, self.mesh.slice)
        if kind in self._reducers():
            reducer = self._reducers()[kind]
            return concerns(rest, reducer.rank, reducer.size)
        if kind == self._momentum:
            return concerns(rest, *reversed(world(self.mesh.dp)))
        return name == "frozen" or kind == self._rows

    # --- inside

    @property
    def _momentum(self) -> str:
        return f"momentum-{self.mesh.place}"

    @property
    def _rows(self) -> str:
        return f"rows-{self.mesh.replica}"

    def _scale(self, factor: float) -> None:
        for parameter in self.named.values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [optimizer for optimizer in (self.adam, self.frozen) if optimizer is not None]

    def _reducers(self) -> dict[str, Reducer]:
        out = {} if self.reducer is None else {f"gradient-{self.mesh.place}": self.reducer}
        out |= {} if self.shared is None else {"shared": self.shared.reducer}
        return out if self.tied is None else out | {f"embedding-{self.mesh.shard}": self.tied.reducer}

    def _exchanges(self) -> list[Exchange]:
        own = self.reducer.exchange if self.reducer else self.frozen.exchange if self.frozen else None
        every = [own, None if self.shared is None else self.shared.reducer.exchange]
        return [exchange for exchange in every if exchange is not None]


def _under(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def sum_of_squares(parameters: Iterable[nn.Parameter]) -> Tensor:
    """0-d float64: of all gradients."""
    norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float64) for p in parameters if p.grad is not None]
    return torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64)
