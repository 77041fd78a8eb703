"""What the ranks of a member do together: torch's default process group."""

from __future__ import annotations

import math

import torch

from thinwire.collectives.messages import gather
from thinwire.train.build import Parts
from thinwire.train.config.sections import TrainConfig
from thinwire.train.data.batches import held_out_batches


def any_rank(said: bool) -> bool:
    """Does any of them say so? All ask."""
    return any(bool(one) for one in gather(torch.tensor([said]), None))


def held_out_loss(parts: Parts, config: TrainConfig) -> float:
    """The mean over all held-out samples, of which a member computes all; equal on its ranks; NaN without any."""
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
