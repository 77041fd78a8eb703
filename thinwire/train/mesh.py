"""dp × pp × tp ranks on a DeviceMesh, and the groups that cross it: rank = (replica · pp + position) · tp + slice.

Ranks of one tensor-parallel group are neighbours, so that they lie on one host; all other groups join ranks of a slice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from thinwire.train.config.sections import MeshConfig


@dataclass(frozen=True)
class Mesh:
    config: MeshConfig
    replica: int
    position: int
    shard: int  # which slice of the weights
    dp: Any  # this position and slice over all replicas
    pp: Any  # this replica's pipeline, this slice
    tp: Any  # the other slices of this position: a DeviceMesh
    ends: Any = None  # first and last stage over all replicas, on ranks that hold one of them
    pair: Any = None  # the two of this replica

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
        """Names what the replicas of this rank have in common."""
        return str(self.position) if self.config.tp == 1 else f"{self.position}.{self.shard}"


def make_mesh(config: MeshConfig, device: str = "cpu") -> Mesh:
    """Groups for this rank; every rank of the world calls it."""
    mesh = init_device_mesh(device, (config.dp, config.pp, config.tp), mesh_dim_names=("dp", "pp", "tp"))
    replica, rest = divmod(dist.get_rank(), config.pp * config.tp)
    position, shard = divmod(rest, config.tp)
    plan = config.plan()
    places = sorted({plan.rank_of[0], plan.rank_of[-1]})
    ends = pair = None
    if len(places) == 2:
        for t in range(config.tp):  # every rank makes all groups, and keeps its own
            pairs = [[(r * config.pp + place) * config.tp + t for place in places] for r in range(config.dp)]
            both = dist.new_group([rank for one in pairs for rank in one])
            each = [dist.new_group(one) for one in pairs]
            if t == shard:
                ends, pair = both, each[replica]
    mine = position in places
    return Mesh(
        config, replica, position, shard, mesh.get_group("dp"), mesh.get_group("pp"), mesh["tp"],
        ends if mine else None, pair if mine else None,
    )  # fmt: skip
