"""A pipeline in plain torch: digits read row by row by a small transformer, cut into one stage a process.

    torchrun --nproc-per-node 2 examples/pipeline_plain.py

pipeline_compressed.py is the same script with thinwire; the two differ in a few lines.

Its data are scikit-learn's digits: pip install scikit-learn, or thinwire's extra `theory`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

EPOCHS, BATCH, MICROBATCHES, WIDTH, LAYERS, HELD_OUT = 4, 64, 4, 64, 2, 384


def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """scikit-learn's digits as 8 rows of 8 pixels: (train x, train y, held-out x, held-out y)."""
    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(x / 16, dtype=torch.float32).view(-1, 8, 8)[order], torch.tensor(y)[order]
    return x[HELD_OUT:], y[HELD_OUT:], x[:HELD_OUT], y[:HELD_OUT]


def batches(samples: int) -> list[list[int]]:
    """Sample ids of every step of every epoch, the same on all ranks; torch wants whole batches."""
    g = torch.Generator().manual_seed(1)
    epochs = [torch.randperm(samples, generator=g).split(BATCH) for _ in range(EPOCHS)]
    return [part.tolist() for epoch in epochs for part in epoch if len(part) == BATCH]


class Embed(nn.Module):
    """float[rows, 8, 8] → float[rows, 8, WIDTH], with a place for each image row."""

    def __init__(self) -> None:
        super().__init__()
        self.pixels, self.place = nn.Linear(8, WIDTH), nn.Parameter(torch.randn(8, WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.pixels(x) + self.place


def build(rank: int, size: int) -> nn.Module:
    """This rank's share of the layers, with the embedding before the first and the classifier after the last."""
    torch.manual_seed(rank)
    layers = [nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
              for _ in range(LAYERS // size)]  # fmt: skip
    first = [Embed()] if rank == 0 else []
    last = [nn.Flatten(), nn.Linear(8 * WIDTH, 10)] if rank == size - 1 else []
    return nn.Sequential(*first, *layers, *last)


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    first, last = rank == 0, rank == size - 1
    x, y, held_x, held_y = data()
    stage = PipelineStage(build(rank, size), rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.cross_entropy)
    optimiser = torch.optim.Adam(stage.submod.parameters(), lr=2e-3)
    for ids in batches(len(x)):
        optimiser.zero_grad()
        schedule.step(*([x[ids]] if first else []), **({"target": y[ids]} if last else {}))
        optimiser.step()
    right = 0
    for part in torch.arange(HELD_OUT).split(BATCH):  # torch 2.11 wants every batch in the shape of the first
        answer = schedule.eval(*([held_x[part]] if first else []), **({"target": held_y[part]} if last else {}))
        right += 0 if answer is None else int((answer.argmax(1) == held_y[part]).sum())
    if last:
        print(f"held-out accuracy {right / HELD_OUT:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
