"""Between sites: local steps of this rank's weights, each kind of weight with the ranks that hold the same.

Inside a site a weight has copies: on every replica; a tied embedding on both ends of the pipeline too; what all stages
share, on all ranks. One rank of the copies speaks with the other sites and tells the rest, so that copies stay equal to
the bit. So there are up to three averagings (`KINDS`), each a `LocalSteps` of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.groups import Group
from thinwire.config.local import Local
from thinwire.data_parallel.checkpoint import concerns
from thinwire.data_parallel.tied_embedding import NAME as TIED
from thinwire.distributed.values import gather_json
from thinwire.local_steps.local_steps import LocalSteps
from thinwire.torch_private.groups import timeout_of
from thinwire.train.config.sections import TrainConfig
from thinwire.train.mesh import Mesh
from thinwire.train.sites.news import Sent
from thinwire.train.update import Update

KINDS = ("layers", "tied", "shared")


class Sites:
    """This rank's part of the averaging between sites; made and called on all ranks of all sites together, while all
    sites have the same weights.

    config, mesh, update: of this rank; its weights are those that `update` trains.
    """

    def __init__(self, config: TrainConfig, mesh: Mesh, update: Update) -> None:
        self.settings = Local.read(config.local)
        self.mesh = mesh
        self.update = update
        self.names = self._kinds()
        parts = _holders(mesh, bool(self.names["layers"]))
        ends = mesh.dp if update.rows is not None else mesh.ends
        copies: dict[str, Group] = {"layers": mesh.dp, "tied": ends, "shared": mesh.inside}
        self.averaged: dict[str, LocalSteps] = {}
        for kind, names in self.names.items():
            if names:
                assert update.adam is not None
                whole = kind != "layers"
                self.averaged[kind] = LocalSteps(
                    [(given, update.named[name]) for given, name in names.items()], update.adam,
                    self.settings.but(fragments=1) if whole else self.settings, mesh.across, seed=config.run.seed,
                    parts=None if whole else parts, copies=copies[kind],
                )  # fmt: skip

    def _kinds(self) -> dict[str, dict[str, str]]:
        """By kind: the name under which a weight is averaged → its name on this rank, which differs for a tied one."""
        named, tied, shared = self.update.named, self.update.tied, self.update.shared
        kinds: dict[str, dict[str, str]] = {kind: {} for kind in KINDS}
        for name, weight in named.items():
            if tied is not None and weight is tied.parameter:
                kinds["tied"][TIED] = name
            elif shared is not None and name in shared.named:
                kinds["shared"][name] = name
            else:
                kinds["layers"][name] = name
        return kinds

    # --- training

    def step(self, tokens: int) -> None:
        """After the optimiser's step of this site. tokens: that it was trained on, 0 where the step was skipped."""
        for local in self.averaged.values():
            local.step(float(tokens))

    def finish(self) -> None:
        """At the end of training: a last average; all sites then have the same weights."""
        for local in self.averaged.values():
            local.finish()

    @contextmanager
    def at_anchor(self) -> Iterator[None]:
        """Inside, the weights are those that all sites share."""
        with ExitStack() as stack:
            for local in self.averaged.values():
                stack.enter_context(local.at_anchor())
            yield

    @property
    def sent(self) -> Sent:
        """By this rank, since it was made."""
        found = [local.summary() for local in self.averaged.values()]
        return Sent(sum(one.sent for one in found), sum(one.would_have_sent for one in found))

    @property
    def dropped(self) -> int:
        """Rounds that did not count, on any site."""
        return max((local.skips for local in self.averaged.values()), default=0)

    def close(self) -> None:
        """End the communication threads, and free the groups."""
        for local in self.averaged.values():
            local.close()

    # --- checkpoints

    def anchors(self) -> dict[str, Tensor]:
        """The weights that all sites share, by this rank's names, as the model stores them."""
        found = {}
        for kind, local in self.averaged.items():
            for fragment in local.fragments:
                for given, anchor in fragment.anchors.items():
                    name = self.names[kind][given]
                    found[name] = anchor.detach().to(self.update.named[name])
        return found

    def state_dict(self) -> dict[str, Tensor]:
        """All in which this site differs from others, and what they share, under names that hold the site."""
        out: dict[str, Tensor] = {}
        for kind, local in self.averaged.items():
            state = local.state_dict()
            ranked: Mapping[str, Tensor] = state if local.shard is None else state[local.shard]
            out |= {f"{self._prefix(kind)}{name}": value for name, value in ranked.items()}
        return out

    def wants(self, name: str) -> bool:
        """Is this name of a checkpoint for this rank?"""
        for kind in self.averaged:
            prefix = self._prefix(kind)
            if name.startswith(prefix):
                return concerns(name.removeprefix(prefix), self.mesh.site, self.mesh.config.sites)
        return False

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from there, also where it is of another number of sites."""
        for kind, local in self.averaged.items():
            prefix = self._prefix(kind)
            own = {n.removeprefix(prefix): v for n, v in state.items() if n.startswith(prefix)}
            local.load_state_dict(own if local.shard is None else {local.shard: own})

    def _prefix(self, kind: str) -> str:
        return f"local-{kind}/{self.averaged[kind].shard or 'whole'}/"


def _holders(mesh: Mesh, holds: bool) -> dist.ProcessGroup | None:
    """The ranks of this replica that hold weights of layers to average, which with adapters may not be all of them;
    None where this rank has none. All ranks make all groups."""
    everyone = torch.tensor(gather_json(holds)).view(mesh.config.replicas, -1)
    mine: dist.ProcessGroup | None = None
    for replica, held in enumerate(everyone):
        ranks = (held.nonzero().flatten() + replica * everyone.shape[1]).tolist()
        group = dist.new_group(ranks, timeout=timeout_of(mesh.pp)) if ranks else None
        if replica == mesh.replica_of_all and holds:
            mine = group
    return mine
