"""dp × pp ranks on a DeviceMesh, and the groups that cross it: rank = replica · pp + position in the pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from thinwire.train.config import MeshConfig


@dataclass(frozen=True)
class Mesh:
    config: MeshConfig
    replica: int
    position: int
    dp: Any  # this position over all replicas
    pp: Any  # this replica's pipeline
    ends: Any = None  # first and last stage over all replicas, on ranks that hold one of them
    pair: Any = None  # the two of this replica

    @property
    def is_first(self) -> bool:
        """Does this rank hold the first stage?"""
        return self.position == self.config.plan().rank_of[0]

    @property
    def is_last(self) -> bool:
        return self.position == self.config.plan().rank_of[-1]


def make_mesh(config: MeshConfig, device: str = "cpu") -> Mesh:
    """Groups for this rank; every rank of the world calls it."""
    mesh = init_device_mesh(device, (config.dp, config.pp), mesh_dim_names=("dp", "pp"))
    replica, position = divmod(dist.get_rank(), config.pp)
    plan = config.plan()
    places = sorted({plan.rank_of[0], plan.rank_of[-1]})
    ends = pair = None
    if len(places) == 2:
        pairs = [[r * config.pp + place for place in places] for r in range(config.dp)]
        ends = dist.new_group([rank for one in pairs for rank in one])
        pair = [dist.new_group(one) for one in pairs][replica]
    mine = position in places
    return Mesh(
        config, replica, position, mesh.get_group("dp"), mesh.get_group("pp"), ends if mine else None,
        pair if mine else None,
    )  # fmt: skip
