"""Gradients that leave before the schedule ends: the same bits as of those that do not, under all six schedules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from train_ranks import MAX, settings

from thinwire.lab import check
from thinwire.train.config.sections import TrainConfig
from thinwire.train.loop import Trainer

lab = pytest.mark.skipif(not check()[0].ok, reason="this machine forbids network namespaces (thinwire doctor)")
MESHES: dict[str, dict[str, Any]] = {
    "GPipe": {}, "1F1B": {}, "Interleaved1F1B": {"virtual": 2}, "InterleavedZeroBubble": {"virtual": 2},
    "ZBVZeroBubble": {}, "DualPipeV": {},
}  # fmt: skip
EMBEDDING = "model.embed_tokens.weight"
GRADIENT = {"collective": "quantized", "bits": 4, "memory": "error_feedback", "unit_mb": 0.02}


def weights_and_early(config: TrainConfig, early: bool) -> tuple[list[float], list[set[str]]]:
    """Train; sums that any changed bit would change, and per step the parameters whose gradients had left when the
    schedule ended."""
    trainer = Trainer(config, say=lambda line: None)
    update, left = trainer.parts.update, []
    if not early:
        update.watch.close()
    end_backward = update.watch.end_backward

    def noted() -> None:
        passes = [reducer.current_pass for reducer in update.early if reducer.size > 1]
        names = {name for reducer in update.early if reducer.size > 1 for name in reducer.parameters}
        if any(passes):
            names -= {name for one in passes if one is not None for name in one.missing_names()}
        left.append(names if any(passes) else set())
        end_backward()

    update.watch.end_backward = noted
    for _ in range(trainer.steps):
        trainer._train_step()
    sums = [
        float((p.detach().double().flatten() * torch.arange(1, p.numel() + 1).double().sqrt()).sum())
        for p in trainer.parts.named.values()
    ]
    trainer.parts.close()
    trainer.vote.close()
    if trainer.metrics is not None:
        trainer.metrics.close()
    return sums, left


def early_and_late(configs: list[tuple[TrainConfig, TrainConfig]]) -> list[Any]:
    """On every rank: what each configuration gives with gradients that leave early, and without."""
    dist.init_process_group("gloo")
    return [[weights_and_early(one, early=True), weights_and_early(two, early=False)] for one, two in configs]


@lab
@pytest.mark.lab
@pytest.mark.timeout(200)
def test_gradients_leave_early_with_the_same_bits(four_hosts, tmp_path):
    """Four ranks, two passes per step. The first rank's leave while it computes under every schedule; those of a rank
    with two stages under every schedule with two; those of the only stage of the second never."""
    pairs = []
    for name, more in MESHES.items():
        mesh = {"dp": 2, "pp": 2, "microbatches": 4, "schedule": name, **more}
        wire = {**MAX, "gradient": GRADIENT}
        optim = {"batch": 16, "accumulate": 2, "steps": 3}
        pairs.append(tuple(
            settings(tmp_path / f"{name} {which}", wire, mesh=mesh, optim=optim, data={"held_out": 0.0},
                     run={"eval_every": 0, "checkpoint_every": 0})
            for which in ("early", "late")
        ))  # fmt: skip
    ranks = four_hosts.run(early_and_late, pairs, timeout=150, echo=False)
    for at, name in enumerate(MESHES):
        for rank in range(4):
            (early, left), (late, none) = ranks[rank][at]
            assert early == late, f"{name}, rank {rank}: other weights"
            assert not any(none), f"{name}, rank {rank}: {none} left early, although nothing may"
            two_stages = name not in ("GPipe", "1F1B")
            assert bool(left[-1]) == (rank % 2 == 0 or two_stages), f"{name}, rank {rank}: {left}"
            shared = name in ("ZBVZeroBubble", "DualPipeV") and rank % 2 == 0  # by its two stages: final with both
            assert not shared or (len(early) - len(left[-1]) >= 1 and EMBEDDING not in left[-1]), f"{name}: {left}"
            assert not left[0] or two_stages, f"{name}: left before it was known how often gradients come"
