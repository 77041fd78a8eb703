"""What the ranks of the training tests run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from numba.core.dispatcher import Dispatcher

from thinwire.parallel.boundary import AS_IS
from thinwire.train import auto
from thinwire.train.auto import Decision
from thinwire.train.config import TrainConfig, read_config
from thinwire.train.engine import Piped
from thinwire.train.loop import Trainer
from thinwire.train.rank import train_rank
from thinwire.train.tensor import saved_name

SMALL: dict[str, dict[str, Any]] = {
    "model": {"hidden": 32, "layers": 4, "heads": 4},
    "data": {"seq_len": 32, "corpus_bytes": 6000, "held_out": 0.1},
    "mesh": {"dp": 1, "pp": 1, "microbatches": 2},
    "optim": {"batch": 8, "steps": 9, "warmup": 2, "lr": 3e-3},
    "run": {"eval_every": 3, "checkpoint_every": 3, "keep": 9},
}
MAX = {
    "forward": {
        "codec": "quantize",
        "bits": 3,
        "memory": {"memory": "delta", "cold": {"codec": "quantize", "bits": 8}},
    },
    "backward": {"codec": "quantize", "bits": 4, "memory": "error_feedback"},
    "gradient": {"collective": "ok_topk", "density": 0.05, "tau": 3, "tau_prime": 2},
    "embedding": {"collective": "ok_topk", "density": 0.1, "sync": "fused"},
}


def settings(out: str | Path, wire: dict[str, Any] | None = None, **changed: dict[str, Any]) -> TrainConfig:
    """SMALL with some keys changed, by section."""
    document = {name: {**table, **changed.get(name, {})} for name, table in SMALL.items()}
    document["run"]["out"] = str(out)
    return read_config({**document, "wire": wire or {}})


def digests(config: TrainConfig, resume: bool = False) -> dict[str, float]:
    """Train; every parameter (or slice of one) of this rank as a sum that any changed bit would change."""
    return trained(config, resume)[0]


def trained(config: TrainConfig, resume: bool) -> tuple[dict[str, float], Trainer]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    trainer = Trainer(config, resume=resume, say=lambda line: None)
    trainer.fit()
    sums = {
        saved_name(name, p, p, trainer.parts.mesh.slice): float(
            (p.detach().double().flatten() * torch.arange(1, p.numel() + 1).double().sqrt()).sum()
        )
        for name, p in trainer.parts.named.items()
    }
    return sums, trainer


def several(configs: list[tuple[TrainConfig, bool]]) -> list[dict[str, float]]:
    """One after the other, in one launch."""
    return [digests(config, resume) for config, resume in configs]


def live(config: TrainConfig, resume: bool) -> int:
    return train_rank(config, resume, patience=20.0)


def compressed(configs: list[TrainConfig]) -> list[set[int]]:
    """Of every run, the layers of this rank whose gradients are compressed; nothing is trained."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    out = []
    for config in configs:
        update = Trainer(config, say=lambda line: None).parts.update
        assert update.reducer is not None
        names = [name for unit in update.reducer.exchange.compressed for name in unit.parameters]
        out.append({int(name.split(".")[2]) for name in names})
        update.close()
    return out


def compiled(configs: list[TrainConfig]) -> list[dict[str, list[str]]]:
    """Of every run, the kernels that were compiled or loaded: before anything was timed, while the ranks measured, and
    in the steps."""
    return [_compiled(config) for config in configs]


def _compiled(config: TrainConfig) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {"before": [], "measuring": [], "steps": []}
    phase, compile_, measure = ["before"], Dispatcher.compile, auto.measure

    def noted(self: Any, signature: Any) -> Any:
        found[phase[0]].append(self.__name__)
        return compile_(self, signature)

    def measured(*args: Any) -> Any:
        phase[0] = "measuring"
        out = measure(*args)
        phase[0] = "before"
        return out

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    with mock.patch.object(Dispatcher, "compile", noted), mock.patch.object(auto, "measure", measured):
        trainer = Trainer(config, say=lambda line: None)
        phase[0] = "steps"
        trainer.fit()
    return found


class Decided(NamedTuple):
    decision: Decision | None
    sends: set[tuple[str, int, int]]  # direction, stage, micro-batch: what this rank compresses
    weights: dict[str, float]


def decided(configs: list[tuple[TrainConfig, bool]]) -> list[Decided]:
    """Train each; what the planner decided there, and what came of it."""
    out = []
    for config, resume in configs:
        sums, trainer = trained(config, resume)
        stages = trainer.parts.engine.parts if isinstance(trainer.parts.engine, Piped) else []
        sends = {
            (way, stage.stage_index, m)
            for stage in stages
            for way, lane in (("forward", stage.lanes.forward_out), ("backward", stage.lanes.backward_out))
            for m in range(config.mesh.microbatches)
            if lane is not None and lane.link is not AS_IS and stage.predicates[way](stage.stage_index, m)
        }
        out.append(Decided(trainer.parts.decision, sends, sums))
    return out


def without_measuring(configs: list[tuple[TrainConfig, bool]]) -> list[Decided]:
    """The same where nothing may be measured."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("a resumed run measures nothing")

    auto.measure = refuse
    return decided(configs)
