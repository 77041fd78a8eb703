"""The trained model where transformers (or peft) loads it: [run] out/model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from thinwire.distributed.values import tensors_on_first
from thinwire.train.build import Parts
from thinwire.train.engine import Piped
from thinwire.train.model.boundaries import FILE, by_layer
from thinwire.train.model.export import export_weights, write_adapter, write_index, write_shard, write_tensors


def publish(parts: Parts, folder: str | Path, shared: bool) -> Path:
    """Write the trained model to `folder`; called by all ranks.

    The ranks of the first replica of the first site write one shard per stage where all ranks see the folder
    (`shared`). Without a shared folder, and for adapters, which are small, everything is sent to rank 0.
    """
    config, target = parts.config, Path(folder)
    lora = config.model.lora is not None
    mine = {i: export_weights(stage) for i, stage in parts.stages.items()} if parts.mesh.replica_of_all == 0 else {}
    if parts.mesh.shard:  # `export_weights` has gathered all slices; one rank keeps them
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
    _write_boundaries(parts, target)
    dist.barrier()
    return target


def _write_boundaries(parts: Parts, target: Path) -> None:
    """Beside the model, where boundaries learn: each is its sender's to save, but for a table, the receiver's."""
    boundaries = parts.engine.boundaries if isinstance(parts.engine, Piped) else None
    if not parts.config.boundary.rank:
        return
    ends = boundaries.senders if boundaries is not None and parts.mesh.replica == 0 else {}
    mine = by_layer(ends, parts.blueprint.layers)
    mine |= parts.engine.tables.saved() if parts.mesh.replica == 0 else {}
    whole = {n: w for part in tensors_on_first(mine) for n, w in part.items()}
    if dist.get_rank() == 0:
        write_tensors(whole, target / FILE)


def _to_first(mine: Mapping[int, Mapping[str, Tensor]]) -> dict[int, dict[str, Tensor]]:
    """Every stage's weights on rank 0; nothing elsewhere."""
    named = {f"{index} {name}": weight for index, weights in mine.items() for name, weight in weights.items()}
    out: dict[int, dict[str, Tensor]] = {}
    for part in tensors_on_first(named):
        for key, weight in part.items():
            index, _, name = key.partition(" ")
            out.setdefault(int(index), {})[name] = weight
    return out
