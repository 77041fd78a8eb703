"""Does `wire="auto"` cost anything where compression does not pay? Plain DDP twice and auto, in turns, unshaped.

    python benchmarks/data_parallel/auto.py [--hosts 2] [--rounds 12] [--steps 10] [--json PATH]

Three copies of one model in every rank: two plain (their difference is the spread of the measurement) and one with
compress_ddp(model, "auto"), which has decided before the timing begins. A round times some steps of each.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.data_parallel.ddp import compress_ddp
from thinwire.lab import Network
from thinwire.terminal import table, write_json

NAMES = ("plain DDP", "plain DDP again", "auto")
WARM_UP = 24  # steps: auto's trial is over by then


def ranks(rounds: int, steps: int) -> dict[str, Any]:
    """On every rank: seconds a step, by model and round."""
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    models = [DistributedDataParallel(_model()) for _ in NAMES]
    handle = compress_ddp(models[-1], "auto")
    batch = torch.randn(32, 512)
    taken: list[list[float]] = [[] for _ in NAMES]
    for model in models:
        _run(model, batch, WARM_UP)
    for turn in range(rounds):
        for i in range(len(NAMES)):
            at = (i + turn) % len(NAMES)
            dist.barrier()
            began = time.perf_counter()
            _run(models[at], batch, steps)
            taken[at].append((time.perf_counter() - began) / steps)
    return {"taken": taken, "compressing": handle.compressing}


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 512))


def _run(model: nn.Module, batch: torch.Tensor, steps: int) -> None:
    for _ in range(steps):
        model.zero_grad()
        model(batch).square().mean().backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", metavar="PATH")
    args = parser.parse_args()
    with Network(hosts=args.hosts, preload=("torch", "thinwire.data_parallel.ddp")) as net:
        found = net.run(ranks, args.rounds, args.steps, timeout=300, echo=False)[0]
    medians = [statistics.median(one) for one in found["taken"]]
    rows = [(name, 1e3 * m, m / medians[0], 1e3 * min(one), 1e3 * max(one))
            for name, m, one in zip(NAMES, medians, found["taken"])]  # fmt: skip
    decided = "on" if found["compressing"] else "off"
    table(f"Steps on {args.hosts} unshaped hosts; auto has turned compression {decided}",
          ("model", "median ms", "× plain", "least ms", "most ms"), rows)  # fmt: skip
    write_json(args.json, found | {"names": NAMES})


if __name__ == "__main__":
    main()
