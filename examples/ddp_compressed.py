"""DistributedDataParallel with compressed gradients: the two lines marked `thinwire`.

torchrun --nproc-per-node 2 examples/ddp_compressed.py            # compressed
torchrun --nproc-per-node 2 examples/ddp_compressed.py --plain    # what it was before

Its data are scikit-learn's digits: pip install scikit-learn, or thinwire's extra `theory`.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw  # thinwire


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="without thinwire")
    parser.add_argument("--wire", default="max", help="a preset's name, or auto")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    inputs, labels = map(torch.tensor, load_digits(return_X_y=True))
    order = torch.randperm(len(inputs))
    inputs, labels = inputs.float()[order] / 16, labels[order]
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    model = DistributedDataParallel(model)
    if not options.plain:
        handle = tw.parallel.compress_ddp(model, options.wire)  # thinwire
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    for step in range(options.steps):
        batch = torch.randint(360, len(inputs), (32,), generator=torch.Generator().manual_seed(step * size + rank))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs[batch]), labels[batch])
        loss.backward()
        optimizer.step()

    accuracy = (model.module(inputs[:360]).argmax(1) == labels[:360]).float().mean()
    if rank == 0:
        print(f"{'plain DDP' if options.plain else 'thinwire'}: held-out accuracy {accuracy:.3f}, loss {loss:.4f}")
        if not options.plain:
            print(f"compressing: {handle.compressing}, steps skipped: {handle.skips}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
