"""sites × dp × pp × tp ranks and their process groups: rank = ((site · dp + replica) · pp + position) · tp + slice.

Ranks of one tensor-parallel group have consecutive numbers, so that they are on one host. All other groups of a site
consist of ranks that hold the same slice. Between sites there is one group per place in a site.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from thinwire.torch_private.groups import timeout_of
from thinwire.train.config.mesh import MeshConfig

SITE_PATIENCE = (
    10  # how many times as long as inside a site ranks wait where other sites, which may be slower, take part
)


@dataclass(frozen=True)
class Mesh:
    """Where this rank is in the mesh, and the groups it belongs to."""

    config: MeshConfig
    replica: int
    position: int  # in the pipeline
    shard: int  # which slice of the weights
    dp: dist.ProcessGroup  # the ranks with this position and slice, of all replicas
    pp: dist.ProcessGroup  # the ranks of this replica's pipeline with this slice
    tp: DeviceMesh  # the ranks of this replica and position: all slices
    ends: dist.ProcessGroup | None = None  # on ranks with the first or last stage: the ranks of both, of all replicas
    pair: dist.ProcessGroup | None = None  # on the same ranks: the two of this replica
    site: int = 0
    inside: dist.ProcessGroup | None = None  # the ranks of this site; None: all ranks
    across: dist.ProcessGroup | None = None  # the ranks with this place, of all sites; None: there is one site

    @property
    def is_first(self) -> bool:
        """Does this rank hold the first stage?"""
        return self.position == self.config.plan().rank_of[0]

    @property
    def is_last(self) -> bool:
        return self.position == self.config.plan().rank_of[-1]

    @property
    def rank_in_site(self) -> int:
        """This rank's number among those of its site."""
        return (self.replica * self.config.pp + self.position) * self.config.tp + self.shard

    @property
    def replica_of_all(self) -> int:
        """The replica's number among those of all sites."""
        return self.site * self.config.dp + self.replica

    @property
    def slice(self) -> tuple[int, int]:
        """(number, of how many)."""
        return self.shard, self.config.tp

    @property
    def place(self) -> str:
        """Part of the saved names: what the replicas of this rank have in common."""
        return str(self.position) if self.config.tp == 1 else f"{self.position}.{self.shard}"


def groups_of_replicas(config: MeshConfig) -> list[list[int]]:
    """The ranks of every group `dp` of a site, numbered inside the site."""
    layout = torch.arange(config.site_ranks).view(config.dp, config.pp * config.tp)
    ranks: list[list[int]] = layout.T.tolist()
    return ranks


def groups_of_ends(config: MeshConfig) -> list[list[int]]:
    """The ranks of every group `ends` of a site, numbered inside the site."""
    rank_of = config.plan().rank_of
    layout = torch.arange(config.site_ranks).view(config.dp, config.pp, config.tp)
    ranks: list[list[int]] = layout[:, sorted({rank_of[0], rank_of[-1]})].flatten(0, 1).T.tolist()
    return ranks


def make_mesh(config: MeshConfig, device: str = "cpu") -> Mesh:
    """This rank's place and groups; every rank of the world calls it. `device`: "cpu" or "cuda".

    Groups wait as long as the default one; with several sites those inside a site wait SITE_PATIENCE times less."""
    layout = torch.arange(config.ranks).view(config.sites, config.dp, config.pp, config.tp)
    timeout = timeout_of(None) / (SITE_PATIENCE if config.sites > 1 else 1)
    dp, pp, tp = (_group_along(layout, dimension, timeout) for dimension in range(1, 4))
    site, rest = divmod(dist.get_rank(), config.site_ranks)
    mesh = DeviceMesh.from_group([dp, pp, tp], device, mesh=layout[site], mesh_dim_names=("dp", "pp", "tp"))
    replica, rest = divmod(rest, config.pp * config.tp)
    position, shard = divmod(rest, config.tp)
    ends, pair = _make_ends(config, layout, timeout)
    inside: dist.ProcessGroup | None = None
    across: dist.ProcessGroup | None = None
    if config.sites > 1:
        inside = _group_along(layout.flatten(1), 1, timeout)
        across = _group_along(layout.flatten(1), 0, timeout_of(None))
    return Mesh(config, replica, position, shard, dp, pp, mesh["tp"], ends, pair, site, inside, across)


def _make_ends(
    config: MeshConfig, layout: Tensor, timeout: timedelta
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """This rank's groups `ends` and `pair`; None where it holds neither end. layout: [sites, dp, pp, tp], the ranks."""
    rank_of = config.plan().rank_of
    places = sorted({rank_of[0], rank_of[-1]})
    ends: dist.ProcessGroup | None = None
    pair: dist.ProcessGroup | None = None
    if len(places) == 2:
        for both in layout[:, :, places].movedim(3, 1).reshape(-1, config.dp, 2).tolist():  # one per site and slice
            ranks = [rank for one in both for rank in one]
            made = dist.new_group(ranks, timeout=timeout)  # every rank makes all groups, and keeps its own
            each = [dist.new_group(one, timeout=timeout) for one in both]
            if dist.get_rank() in ranks:
                ends = made
                pair = next(group for group, one in zip(each, both) if dist.get_rank() in one)
    return ends, pair


def _group_along(layout: Tensor, dimension: int, timeout: timedelta) -> dist.ProcessGroup:
    """This rank's group along a dimension of the mesh, while all ranks make all groups of it.

    Made here and not by torch's `init_device_mesh`, whose groups wait for half an hour, whatever the default one does.
    """
    made = [
        (ranks, dist.new_group(ranks, timeout=timeout))
        for ranks in layout.movedim(dimension, -1).reshape(-1, layout.shape[dimension]).tolist()
    ]
    return next(group for ranks, group in made if dist.get_rank() in ranks)
