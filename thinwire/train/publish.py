"""The trained model where transformers (or peft) loads it: [run] out/model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from thinwire.train.build import Parts
from thinwire.train.model.export import export_weights, write_adapter, write_index, write_shard


def publish(parts: Parts, folder: str | Path, shared: bool) -> Path:
    """Called by all ranks. The first replica's ranks write a shard a stage where all see the folder; without a shared
    folder, and for adapters, which are small, everything goes to rank 0."""
    config, target = parts.config, Path(folder)
    lora = config.model.lora is not None
    mine = {i: export_weights(stage) for i, stage in parts.stages.items()} if parts.mesh.replica == 0 else {}
    if parts.mesh.shard:  # all slices are put together; one rank keeps them
        mine = {}
    if lora or not shared:
        mine = _to_first(mine)
    if mine and not lora:
        target.mkdir(parents=True, exist_ok=True)
        for index, weights in mine.items():
            write_shard(parts.blueprint, index, weights, target)
    dist.barrier()
    if dist.get_rank() == 0:
        if lora:
            target.mkdir(parents=True, exist_ok=True)
            write_adapter(parts.blueprint, {n: w for part in mine.values() for n, w in part.items()}, target)
        else:
            tokenizer = config.data.tokenizer
            write_index(parts.blueprint, target, None if tokenizer in ("auto", "bytes") else tokenizer)
    dist.barrier()
    return target


def _to_first(mine: dict[int, Any]) -> dict[int, Any]:
    everyone: list[dict[int, Any]] | None = [{} for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.gather_object(mine, everyone)
    return {index: weights for part in everyone or [] for index, weights in part.items()}
