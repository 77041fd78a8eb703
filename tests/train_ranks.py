"""What the ranks of the training tests run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from numba.core.dispatcher import Dispatcher
from rounds import Log, recording

from thinwire.collectives.messages import gather
from thinwire.pipeline.lane import AS_IS
from thinwire.train.build import check
from thinwire.train.config.sections import TrainConfig, read_config
from thinwire.train.data.batches import Batches
from thinwire.train.engine import Piped
from thinwire.train.loop import Trainer
from thinwire.train.model.tensor_parallel import saved_name
from thinwire.train.rank import train_rank
from thinwire.train.tune import auto, mesh_choice, replan
from thinwire.train.tune.auto import Decision

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
    return read_config({**document, "wire": wire or {}, "local": changed.get("local", {})})


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


def alone(configs: list[TrainConfig]) -> dict[str, float]:
    """A run of one process on each of the first ranks, beside each other."""
    rank = int(os.environ["RANK"])
    if rank >= len(configs):
        return {}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return digests(configs[rank])


def trained_and_gradients(
    configs: list[tuple[TrainConfig, bool]], config: TrainConfig
) -> tuple[list[dict[str, float]], dict[str, list[float]]]:
    """`several`; and of another run the gradients of its first step, as the optimiser gets them."""
    return several(configs), gradients(config)


def gradients(config: TrainConfig) -> dict[str, list[float]]:
    trainer, found = Trainer(config, say=lambda line: None), {}
    apply = trainer.parts.update.apply

    def noting(*arguments: Any) -> None:
        if not found:
            found.update({n: p.grad.flatten().tolist() for n, p in trainer.parts.named.items() if p.grad is not None})
        apply(*arguments)

    with mock.patch.object(trainer.parts.update, "apply", noting):
        trainer.fit()
    return found


def live(config: TrainConfig, resume: bool) -> int:
    return train_rank(config, resume, patience=20.0)


def norms(config: TrainConfig) -> list[float | None]:
    """Of every step, as this rank clips by."""
    dist.init_process_group("gloo")
    trainer, found = Trainer(config, say=lambda line: None), []
    apply = trainer.parts.update.apply

    def noting(rate: float, norm: float, skipped: bool) -> None:
        found.append(None if skipped else norm)
        apply(rate, norm, skipped)

    with mock.patch.object(trainer.parts.update, "apply", noting):
        trainer.fit()
    return found


def rounds_of(config: TrainConfig) -> Log:
    """A record of the whole run, with a mark before every step and behind the last."""
    with recording() as (log, mark):
        dist.init_process_group("gloo")
        trainer = Trainer(config, say=lambda line: None)
        step = trainer._train_step

        def marked() -> None:
            mark()
            step()

        with mock.patch.object(trainer, "_train_step", marked):
            trainer.fit()
        mark()
    return log


class Troubled(NamedTuple):
    changed: list[str]  # what a skipped step has changed of weights, moments and compression state
    stops: bool  # once one rank was asked to
    skips: list[int]  # counted here, and after resuming
    healed: int
    copy: float  # of the tied embedding and its moments, as a sum


def troubled(config: TrainConfig) -> Troubled:
    """Three steps, the last with a NaN in one rank's last weight; two more, before which its tied copy is changed."""
    dist.init_process_group("gloo")
    trainer = Trainer(config, say=lambda line: None)
    update, struck = trainer.parts.update, dist.get_rank() == dist.get_world_size() - 1
    weight = trainer.parts.named[trainer.parts.stages[max(trainer.parts.stages)].tied]

    def state() -> dict[str, torch.Tensor]:
        kept = update.state_dict() | {name: p.detach() for name, p in trainer.parts.named.items()}
        counters = [name for name in kept if name.endswith("/step") and not name.startswith("optim/")]
        return {name: value.clone() for name, value in kept.items() if name not in counters}

    for _ in range(2):
        trainer._train_step()
    before = state()
    some = next(p for name, p in trainer.parts.named.items() if p is not weight)
    spoil = some.register_hook(lambda g: g.fill_(torch.nan)) if struck else None
    trainer._train_step()
    after = state()
    if spoil is not None:
        spoil.remove()
        with torch.no_grad():
            weight[5, 7] += 1
    trainer._train_step()
    stopped_before = trainer.agreed_to_stop
    trainer.stop.asked = struck
    trainer._train_step()
    stops = trainer.agreed_to_stop and not stopped_before
    trainer._save()
    update.close()
    resumed = Trainer(config, resume=True, say=lambda line: None).parts.update
    dist.barrier()  # rank 0 keeps the store by which other ranks may still be making their groups
    resumed.close()
    assert update.tied is not None and update.adam is not None
    held = [weight.detach(), *(v for _, v in sorted(update.adam.state[weight].items()))]
    changed = [name for name in before | after if not torch.equal(before[name], after[name])]
    return Troubled(
        changed,
        stops,
        [update.skips, resumed.skips],
        update.tied.healed,
        sum(float(value.double().sum()) for value in held),
    )


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
    """Train each; what the planner decided there, and what came of it. Where micro-batches are left to it, it takes
    twice as many as usual."""
    out = []
    for config, resume in configs:
        with mock.patch.object(mesh_choice, "TIMES", (2,)):
            sums, trainer = trained(config, resume)
        stages = trainer.parts.engine.parts if isinstance(trainer.parts.engine, Piped) else []
        sends = {
            (way, stage.stage_index, m)
            for stage in stages
            for way, lane in stage.lanes.outgoing.items()
            for m in range(trainer.parts.engine.microbatches)
            if lane.link is not AS_IS and stage.predicates[way](stage.stage_index, m)
        }
        out.append(Decided(trainer.parts.decision, sends, sums))
    return out


def impatient(config: TrainConfig) -> Decided:
    """A run that doubts its plan after three steps that take twice as long, or half."""
    with mock.patch.object(replan, "STEPS", 3), mock.patch.object(replan, "FACTOR", 2.0):
        return decided([(config, False)])[0]


def without_measuring(configs: list[tuple[TrainConfig, bool]]) -> list[Decided]:
    """The same where nothing may be measured."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("a resumed run measures nothing")

    with mock.patch.object(auto, "measure", refuse):
        return decided(configs)


def used_rows(config: TrainConfig) -> list[list[int]]:
    """Of every step, how many rows of the embedding each replica's batch uses."""
    samples = check(config).samples
    dp, every = config.mesh.dp, []
    for replica in range(dp):
        batches = Batches(samples, config.optim.batch, config.data.seed, replica, dp)
        every.append([len(batches.next().inputs.unique()) for _ in range(config.optim.steps or 0)])
    return [list(rows) for rows in zip(*every)]


def spoilt_rows(config: TrainConfig) -> tuple[list[str], list[str], int, int]:
    """Three steps, the second with a NaN in one first stage's gradient, the third after one owner's weight was changed:
    what the second has changed of this rank's state, what the ends of a pair remember, or the owners hold, differently
    at the end, how many steps were skipped, and how often owners were made equal."""
    dist.init_process_group("gloo")
    trainer = Trainer(config, say=lambda line: None)
    update = trainer.parts.update

    def state() -> dict[str, torch.Tensor]:
        kept = update.state_dict() | {name: p.detach() for name, p in trainer.parts.named.items()}
        counters = [name for name in kept if name.endswith("/step") and not name.startswith("optim/")]
        return {name: value.clone() for name, value in kept.items() if name not in counters}

    trainer._train_step()
    before = state()
    some = next(p for p in trainer.parts.named.values())
    spoil = some.register_hook(lambda g: g.fill_(torch.nan)) if dist.get_rank() == 0 else None
    trainer._train_step()
    after = state()
    if spoil is not None:
        spoil.remove()
    owner = update.tied
    if owner is not None and dist.get_rank() == dist.get_world_size() - 1:
        with torch.no_grad():
            owner.parameter[5, 7] += 1
    trainer._train_step()
    assert update.rows is not None and update.rows.mirror is not None
    held = [("mirror", update.rows.mirror, trainer.parts.mesh.pair)]
    if owner is not None:
        held.append(("weight", owner.parameter.detach(), trainer.parts.mesh.dp))
    differ = [name for name, value, group in held if not torch.equal(*gather(value, group))]
    changed = [name for name in before | after if not torch.equal(before[name], after[name])]
    update.close()
    return changed, differ, update.skips, owner.healed if owner is not None else 0


class Stopped(NamedTuple):
    step: int  # after which the run stopped
    agreed: bool


def several_and_stopped(
    configs: list[tuple[TrainConfig, bool]], config: TrainConfig
) -> tuple[list[dict[str, float]], Stopped]:
    """`several`; and a run of which the last rank is asked to stop in its second step."""
    done = several(configs)
    trainer = Trainer(config, say=lambda line: None)
    step = trainer._train_step

    def asked() -> None:
        if trainer.step == 1 and dist.get_rank() == dist.get_world_size() - 1:
            trainer.stop.asked = True
        step()

    with mock.patch.object(trainer, "_train_step", asked):
        trainer.fit()
    return done, Stopped(trainer.step, trainer.agreed_to_stop)
