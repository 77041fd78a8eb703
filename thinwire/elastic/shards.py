"""What a newcomer takes where members are FSDP sites: each of its ranks the shards of the same rank elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from thinwire.errors import UsageError


class Shards:
    """This rank's shards of a model's weights and buffers, and of its optimiser's moments. Part of a Quorum's state:

        quorum = tw.elastic.Quorum({"site": tw.elastic.Shards(model, optimizer)}, address, inside=site.get_group())

    model: after `fully_shard`. optimizer: of its parameters.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Without anything of other ranks."""
        moments = {
            name: {field: _local(value) for field, value in self.optimizer.state.get(p, {}).items()}
            for name, p in self.model.named_parameters()
        }
        groups = [
            {key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups
        ]
        return {
            "model": {n: _local(x) for n, x in self.model.state_dict().items()}, "moments": moments, "groups": groups
        }  # fmt: skip

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Of the same rank of another site. UsageError where its shards have other shapes."""
        for name, held in self.model.state_dict().items():
            found, mine = state["model"].get(name), _local(held)
            if found is None or found.shape != mine.shape:
                theirs = "not there" if found is None else f"{tuple(found.shape)} there"
                raise UsageError(f"this rank's shard of {name} is {tuple(mine.shape)}, {theirs}: sites differ")
            mine.copy_(found)
        for name, p in self.model.named_parameters():
            fields = state["moments"].get(name, {})
            self.optimizer.state[p] = {field: _like(p, value) for field, value in fields.items()}
        for group, saved in zip(self.optimizer.param_groups, state["groups"]):
            group.update(saved)


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _like(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """A moment of the parameter, sharded as it is; a count of steps stays as it is."""
    value = value.clone()
    if not isinstance(parameter, DTensor) or value.shape != parameter.to_local().shape:
        return value
    return DTensor.from_local(
        value, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
        stride=parameter.stride(),
    )  # fmt: skip
