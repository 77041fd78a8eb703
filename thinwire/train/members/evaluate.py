"""The held-out loss of a member, which computes all of it: weights are the same on all."""

from __future__ import annotations

import math

import torch

from thinwire.collectives.messages import gather
from thinwire.train.build import Parts
from thinwire.train.config.sections import TrainConfig
from thinwire.train.data.batches import held_out_batches


def held_out_loss(parts: Parts, config: TrainConfig) -> float:
    """The mean, equal on all ranks of the member; NaN without held-out samples. parts: of this rank."""
    engine = parts.engine
    replicas, engine.loss.replicas = engine.loss.replicas, 1
    total, labels = 0.0, 0
    for batch in held_out_batches(parts.samples, config.optim.batch):
        losses = [engine.run(part, False) for part in batch.split(config.optim.accumulate)]
        total += sum(float(loss) for loss in losses if loss is not None) * batch.labelled
        labels += batch.labelled
    engine.loss.replicas = replicas
    total = float(torch.stack(gather(torch.tensor([total], dtype=torch.float64), None)).sum())
    return total / labels if labels else math.nan
