"""Two pipelines of two stages, as an engineer would write it with torch, and what crosses slow links compressed.

    torchrun --nproc-per-node 4 examples/three_d.py               # dp 2 × pp 2, preset max
    torchrun --nproc-per-node 4 examples/three_d.py --wire off    # the same, as torch sends it

The lines that thinwire adds are marked. Tensor parallelism stays inside a machine and inside the stage's module: for it
nothing here changes, as long as each slice has its own pipeline and replica groups (docs/three-d.md).

Its data are scikit-learn's digits: pip install scikit-learn, or thinwire's extra `theory`.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B

import thinwire as tw

REPLICAS, STAGES, MICROBATCHES, BATCH, HELD_OUT, EPOCHS = 2, 2, 4, 64, 360, 6


def data(replica: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Digits: this replica's half of the training set with its labels, and the held-out samples with theirs."""
    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(x / 16, dtype=torch.float32)[order], torch.tensor(y)[order]
    mine = slice(HELD_OUT + replica, None, REPLICAS)
    return x[mine], y[mine], x[:HELD_OUT], y[:HELD_OUT]


def build(stage: int) -> nn.Module:
    """Seeded by the stage: replicas start equal. (Nothing here broadcasts weights.)"""
    torch.manual_seed(stage)
    if stage == 0:
        return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
    return nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wire", default="max", help="a preset's name")
    wire = parser.parse_args().wire

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (REPLICAS, STAGES), mesh_dim_names=("replica", "stage"))
    replica, index = mesh.get_local_rank("replica"), mesh.get_local_rank("stage")
    along, across = mesh.get_group("stage"), mesh.get_group("replica")
    first, last = index == 0, index == STAGES - 1
    x, y, held_x, held_y = data(replica)

    module = build(index)
    stage = tw.parallel.CompressedStage(module, index, STAGES, torch.device("cpu"), group=along, wire=wire)  # thinwire
    reducer = tw.parallel.Reducer(module.named_parameters(), wire, across)  # thinwire
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.cross_entropy)
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(EPOCHS):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        for ids in order.split(BATCH)[:-1]:
            optimiser.zero_grad()
            with stage.step(ids=ids.tolist()):  # thinwire
                schedule.step(*([x[ids]] if first else []), **({"target": y[ids]} if last else {}))
            if reducer.finish():  # thinwire: .grad is the mean over replicas; False: rolled back, on all ranks
                optimiser.step()

    pipe, gradients = stage.pipeline.stats, reducer.exchange.sent
    with stage.step(train=False, shape=held_x.shape):  # thinwire: as it is, and in any shape
        answer = schedule.eval(*([held_x] if first else []), **({"target": held_y} if last else {}))
    sent = torch.tensor([pipe.forward_bytes + pipe.backward_bytes, gradients])
    dist.all_reduce(sent)
    if last and replica == 0:
        right = (answer.argmax(1) == held_y).float().mean()
        pipes, replicas = (sent / 1e6).tolist()
        print(f"{wire}: held-out accuracy {right:.3f}; {pipes:.1f} MB along pipelines, {replicas:.1f} between replicas")
    reducer.close()  # thinwire
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
