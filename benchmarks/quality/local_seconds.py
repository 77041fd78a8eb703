"""Seconds of a round between four sites over slow links, measured in the lab: the model of --times is checked by it.

    python benchmarks/quality/local_seconds.py [--rates 10mbit 100mbit 300mbit] [--latency 50ms] [--json PATH]

Four sites of one process each. Nothing is computed between rounds: weights move by noise, and `local.step()` is timed,
every method with a round after each step. What a step takes in training is its computing and 1/H of that.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist
from frontier_jobs import SITES, low
from stacked_model import Size
from torch import nn

from thinwire.lab import Network
from thinwire.lab.topology import in_sites, make_link
from thinwire.parallel import LocalSteps
from thinwire.terminal import table, write_json

SIZE = Size(256, 4, 256)
PLAIN = {"outer_lr": 1.0, "momentum": 0.0, "nesterov": False}
METHODS: dict[str, dict[str, Any]] = {
    "ours, rank 3": low(rank=3, shrink=43.0), "ours, rank 8": low(rank=8), "SparseLoCo": {"preset": "sparseloco"},
    "Streaming DiLoCo": {"preset": "streaming-diloco", "fragments": 1, "delay": 0},
    "four bits": {"wire": "max", **PLAIN}, "bf16": {"wire": "bf16", **PLAIN}, "fp32": {"wire": "off", **PLAIN},
}  # fmt: skip


def rounds(settings: dict[str, Any], count: int) -> float:
    """One site: seconds of a round, the mean over all but the first."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    first = SIZE.views(SIZE.initial(0)[None])
    parameters = {name: nn.Parameter(w[0].clone()) for name, w in first.items()}
    inner = torch.optim.SGD(parameters.values(), lr=1.0)
    local = LocalSteps(parameters.items(), inner, {**settings, "every": 1})
    generator = torch.Generator().manual_seed(dist.get_rank())
    seconds = []
    for _ in range(count + 1):
        for p in parameters.values():
            p.data += 1e-3 * torch.randn(p.shape, generator=generator)
        dist.barrier()
        began = time.perf_counter()
        local.step()
        seconds.append(time.perf_counter() - began)
    local.close()
    return sum(seconds[1:]) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=["10mbit", "100mbit", "300mbit"])
    parser.add_argument("--latency", default="50ms", help="one way, between two sites (default 50ms)")
    parser.add_argument("--only", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", metavar="PATH")
    args = parser.parse_args()
    found: dict[str, dict[str, float]] = {name: {} for name in args.only}
    for rate in args.rates:
        for name in args.only:
            link = make_link({"rate": rate, "latency": args.latency}, "")
            with Network(topology=in_sites(SITES, 1, link), preload=("torch",)) as net:
                found[name][rate] = max(net.run(rounds, METHODS[name], args.rounds, timeout=600.0, echo=False))
            print(f"{rate}, {name}: {found[name][rate]:.3f} s per round", flush=True)
    cells = [(name, *(f"{row[rate]:.3f} s" for rate in args.rates)) for name, row in found.items()]
    table(f"A round between {SITES} sites, {args.latency} one way", ("method", *args.rates), cells)
    write_json(args.json, {"latency": args.latency, "seconds": found})


if __name__ == "__main__":
    main()
