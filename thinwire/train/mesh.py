"""dp × pp × tp ranks on a DeviceMesh, and their process groups: rank = (replica · pp + position) · tp + slice.

Ranks of one tensor-parallel group have consecutive numbers, so that they are on one host. All other groups consist of
ranks that hold the same slice.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from thinwire.torch_private.groups import timeout_of
from thinwire.train.config.sections import MeshConfig


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

    @property
    def is_first(self) -> bool:
        """Does this rank hold the first stage?"""
        return self.position == self.config.plan().rank_of[0]

    @property
    def is_last(self) -> bool:
        return self.position == self.config.plan().rank_of[-1]

    @property
    def slice(self) -> tuple[int, int]:
        """(number, of how many)."""
        return self.shard, self.config.tp

    @property
    def place(self) -> str:
        """Part of the saved names: what the replicas of this rank have in common."""
        return str(self.position) if self.config.tp == 1 else f"{self.position}.{self.shard}"


def groups_of_replicas(config: MeshConfig) -> list[list[int]]:
    """The ranks of every group `dp`."""
    layout = torch.arange(config.ranks).view(config.dp, config.pp * config.tp)
    ranks: list[list[int]] = layout.T.tolist()
    return ranks


def groups_of_ends(config: MeshConfig) -> list[list[int]]:
    """The ranks of every group `ends`."""
    rank_of = config.plan().rank_of
    layout = torch.arange(config.ranks).view(config.dp, config.pp, config.tp)
    ranks: list[list[int]] = layout[:, sorted({rank_of[0], rank_of[-1]})].flatten(0, 1).T.tolist()
    return ranks


def make_mesh(config: MeshConfig, device: str = "cpu") -> Mesh:
    """This rank's place and groups; every rank of the world calls it. `device`: "cpu" or "cuda"."""
    layout = torch.arange(config.ranks).view(config.dp, config.pp, config.tp)
    timeout = timeout_of(None)
    dp, pp, tp = (_group_along(layout, dimension, timeout) for dimension in range(3))
    mesh = DeviceMesh.from_group([dp, pp, tp], device, mesh=layout, mesh_dim_names=("dp", "pp", "tp"))
    replica, rest = divmod(dist.get_rank(), config.pp * config.tp)
    position, shard = divmod(rest, config.tp)
    plan = config.plan()
    places = sorted({plan.rank_of[0], plan.rank_of[-1]})
    ends: dist.ProcessGroup | None = None
    pair: dist.ProcessGroup | None = None
    if len(places) == 2:
        for t in range(config.tp):  # every rank makes all groups, and keeps its own
            pairs = [[(r * config.pp + place) * config.tp + t for place in places] for r in range(config.dp)]
            both = dist.new_group([rank for one in pairs for rank in one], timeout=timeout)
            each = [dist.new_group(one, timeout=timeout) for one in pairs]
            if t == shard:
                ends, pair = both, each[replica]
    mine = position in places
    return Mesh(
        config, replica, position, shard, dp, pp, mesh["tp"],
        ends if mine else None, pair if mine else None,
    )  # fmt: skip


def _group_along(layout: Tensor, dimension: int, timeout: timedelta) -> dist.ProcessGroup:
    """This rank's group along a dimension of the mesh, while all ranks make all groups of it.

    Made here and not by torch's `init_device_mesh`, whose groups wait for half an hour, whatever the default one does.
    """
    made = [
        (ranks, dist.new_group(ranks, timeout=timeout))
        for ranks in layout.movedim(dimension, -1).reshape(-1, layout.shape[dimension]).tolist()
    ]
    return next(group for ranks, group in made if dist.get_rank() in ranks)
