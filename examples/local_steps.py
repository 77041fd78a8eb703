"""Two sites that train by themselves and average every ten steps, compressed: the lines marked `thinwire`.

torchrun --nproc-per-node 2 examples/local_steps.py
torchrun --nproc-per-node 2 examples/local_steps.py --preset diloco --every 20

Each process is a site. There is no DDP: between two averagings nothing is sent.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire as tw  # thinwire


def batch(step: int, site: int) -> tuple[Tensor, Tensor]:
    """This site's part of the step's data."""
    g = torch.Generator().manual_seed(1000 * step + site)
    x = torch.randn(32, 64, generator=g)
    return x, torch.sin(2 * x).roll(1, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="local-max", help="such as diloco, sparseloco, local-max or local-signs")
    parser.add_argument("--every", type=int, default=10, help="inner steps per round")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)  # all sites begin with the same weights
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    local = tw.parallel.LocalSteps(model.named_parameters(), inner, options.preset, every=options.every)  # thinwire

    for step in range(1, options.steps + 1):
        x, y = batch(step, dist.get_rank())
        inner.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        inner.step()
        local.step()  # thinwire
        if step % 50 == 0:
            with local.at_anchor(), torch.no_grad():  # thinwire: what all sites share
                x, y = batch(0, 99)
                loss = nn.functional.mse_loss(model(x), y)
            if dist.get_rank() == 0:
                print(f"step {step}: held-out {loss:.4f}; {local.summary()}")
    local.finish()  # thinwire: all sites hold the same weights
    local.close()  # thinwire: before the process group goes
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
