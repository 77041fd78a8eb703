"""What a run whose members come and go cannot be combined with, said before torch is imported."""

from __future__ import annotations

from dataclasses import replace

from thinwire.config.presets import written_out
from thinwire.errors import UsageError
from thinwire.train.config.sections import TrainConfig


def check_elastic(config: TrainConfig) -> None:
    """UsageError where `[run] elastic` is asked for with what it does not take."""
    mesh, wire = config.mesh, written_out(config.wire)
    refused = {
        f"[mesh] tp = {mesh.tp}": mesh.tp > 1,
        f"[mesh] sites = {mesh.sites}": mesh.sites > 1,
        f"[optim] name = {config.optim.name!r}": config.optim.name != "adamw",
        f"[boundary] open = {config.boundary.open}": config.boundary.open > 0,
        "[wire] auto = true": bool(wire.get("auto")),
        f"[wire] streams = {wire.get('streams')!r}": wire.get("streams", 1) != 1,
        f"[run] device = {config.run.device!r}": config.run.device != "cpu",
        f"[mesh] split = {mesh.split!r}": mesh.pp > 1 and mesh.split != "parameters",
        f"[boundary] rank = {config.boundary.rank}": mesh.pp > 1 and config.boundary.rank > 0,
        "[wire.embedding] sync = 'rows'": mesh.pp > 1 and wire.get("embedding", {}).get("sync") == "rows",
    }
    for what, is_asked in refused.items():
        if is_asked:
            raise UsageError(
                f"{what}: not with [run] elastic, where a member is one rank or a pipeline on Gloo, with AdamW "
                "(docs/elastic.md)"
            )
    if config.run.min_replicas > config.optim.batch:
        raise UsageError(
            f"[run] min_replicas = {config.run.min_replicas}: more than [optim] batch = {config.optim.batch}"
        )


def unit(config: TrainConfig) -> int:
    """Sequences by which a step is dealt out to members: a pipeline takes micro-batches of one size."""
    return config.optim.accumulate * config.mesh.microbatches if config.mesh.pp > 1 else 1


def alone(config: TrainConfig) -> TrainConfig:
    """The configuration by which one member is built: it has no replicas that stay."""
    return replace(config, mesh=replace(config.mesh, dp=1))
