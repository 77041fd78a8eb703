"""Tables of a run's boundaries: a vector per token at every receiving stage, trained as the model's weights are.

boundary.<layer before which the boundary lies>.table     a parameter of the rank that holds the stage

Under that name the optimiser, the reduction over replicas, clipping and checkpoints take it as any other parameter.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor, nn

from thinwire.boundaries.projected import BoundedStage
from thinwire.collectives.groups import world
from thinwire.train.model.blueprint import Blueprint, token_embedding
from thinwire.train.model.stage import Stage


class Tables:
    """Those of this rank; there may be none.

    modules: the stages' modules, between their boundaries if they have any, by number. stages: of the same numbers.
    """

    def __init__(self, modules: Mapping[int, nn.Module], stages: Mapping[int, Stage]) -> None:
        found = {i: m for i, m in modules.items() if isinstance(m, BoundedStage) and m.table is not None}
        self.modules: dict[int, BoundedStage] = dict(sorted(found.items()))
        self.layers = [stages[index].layers.start for index in self.modules]
        self.names = {index: f"boundary.{layer}.table" for index, layer in zip(self.modules, self.layers)}

    def named(self) -> dict[str, nn.Parameter]:
        """The parameters, by name."""
        return {self.names[i]: m.table for i, m in self.modules.items() if m.table is not None}

    def saved(self) -> dict[str, Tensor]:
        """What boundaries.safetensors holds of them."""
        return {f"{layer}/table": p.detach().cpu() for layer, p in zip(self.layers, self.named().values())}

    def begin(self, blueprint: Blueprint, seed: int, replicas: dist.ProcessGroup) -> None:
        """How tables begin in a run that goes on from no checkpoint: as `BoundedStage.fill_table` says, of the tokens'
        embeddings. What else is in a model's first hidden states (GPT-2's positions) is not in the tables; embeddings
        of another width than the hidden states leave them zero.

        Every rank makes or reads the embedding itself, 4 · vocabulary · width bytes for a moment, so that none of it is
        sent over the pipeline. A product of matrices has other bits on another processor: `replicas`, the ranks with
        the same stages, take the first one's tables, of as many bytes each, once. seed: of random weights.
        """
        if not self.modules:
            return
        embedding = token_embedding(blueprint, seed)
        if embedding.shape[1] != blueprint.hidden:
            return
        for module, table in zip(self.modules.values(), self.named().values()):
            module.fill_table(embedding.to(table.device))
            if world(replicas)[0] > 1:
                dist.broadcast(table.detach(), group=replicas, group_src=0)
