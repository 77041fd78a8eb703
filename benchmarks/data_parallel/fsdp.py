"""Two sites of two ranks, FSDP2 inside, a slow link between: plain HSDP beside compress_fsdp, in turns.

    python benchmarks/data_parallel/fsdp.py [--rate 20mbit] [--width 512] [--rounds 5] [--json PATH]

Every site is one host of the lab, so traffic inside it is not shaped; HSDP's all-reduce takes the same link as ours.
One copy of the model for each way, in the same processes; a round times one step of each, in changing order.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from thinwire.data_parallel.fsdp import compress_fsdp
from thinwire.lab import Network
from thinwire.terminal import table, write_json

WAYS = ("plain HSDP", "off", "bf16", "safe", "max")
WARM_UP = 2  # steps


def ranks(width: int, rounds: int) -> dict[str, Any]:
    """On every rank: seconds a step by way and round, payload bytes a step, and parameters."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    models, handles = [], {}
    for way in WAYS:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(4)))
        for layer in (*model, model):
            fully_shard(layer, mesh=mesh if way == "plain HSDP" else mesh["shard"])
        if way != "plain HSDP":
            handles[way] = compress_fsdp(model, way, replicas=mesh["replica"])
        models.append(model)
    batch = torch.randn(32, width, generator=torch.Generator().manual_seed(dist.get_rank()))
    taken: list[list[float]] = [[] for _ in WAYS]
    for turn in range(-WARM_UP, rounds):
        for i in range(len(WAYS)):
            at = (i + turn) % len(WAYS)
            dist.barrier()
            began = time.perf_counter()
            models[at].zero_grad()
            models[at](batch).square().mean().backward()
            dist.barrier()
            if turn >= 0:
                taken[at].append(time.perf_counter() - began)
    sent = {way: handle.sent / (rounds + WARM_UP) for way, handle in handles.items()}
    return {"taken": taken, "sent": sent, "parameters": sum(p.numel() for p in models[0].parameters())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="20mbit")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="PATH")
    args = parser.parse_args()
    with Network(hosts=2, rate=args.rate, preload=("torch", "thinwire.data_parallel.fsdp")) as net:
        found = net.run(ranks, args.width, args.rounds, per_host=2, timeout=500, echo=False)[0]
    medians = [statistics.median(one) for one in found["taken"]]
    rows = [(way, m, medians[0] / m, min(one), max(one), found["sent"][way] / 1e6 if way in found["sent"] else "–")
            for way, m, one in zip(WAYS, medians, found["taken"])]  # fmt: skip
    table(f"Two sites of two ranks at {args.rate}, {found['parameters']} parameters",
          ("gradients between sites", "median s", "speed-up", "least s", "most s", "MB a rank"), rows)  # fmt: skip
    write_json(args.json, found | {"ways": WAYS})


if __name__ == "__main__":
    main()
