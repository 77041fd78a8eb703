"""What compression between sites costs in held-out loss: FSDP2 on two sites of two ranks, plain HSDP beside presets.

    python benchmarks/quality/fsdp_loss.py [--wires safe,max] [--seeds 3] [--steps 300] [--json PATH]

The task is quality.py's Llama-class decoder on bytes of the standard library's source, at its best rate for exact
gradients. A seed fixes initialisation and the order of the data, so differences are paired. The links are not shaped:
loss does not depend on how fast they are.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from quality_tasks import RANKS, TASKS, Data, digest, load, loss_of
from quality_train import rate_at
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from thinwire.data_parallel.fsdp import compress_fsdp
from thinwire.lab import Network
from thinwire.quantities import half_interval
from thinwire.terminal import table, write_json

PLAIN, RATE, TASK = "plain HSDP", 4e-3, TASKS["llama"]


def ranks(path: str, ways: list[str], seeds: int, steps: int) -> list[dict[str, Any]]:
    """On every rank: a row for every seed and way."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    data = load(Path(path))
    return [train(mesh, data, way, seed, steps) for seed in range(seeds) for way in ways]


def train(mesh: DeviceMesh, data: Data, way: str, seed: int, steps: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = TASK.build()
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh if way == PLAIN else mesh["shard"])
    handle = None if way == PLAIN else compress_fsdp(model, way, replicas=mesh["replica"], seed=seed)
    optimizer = TASK.optimiser_of(model, RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, steps))
    generator = torch.Generator().manual_seed(1_000 * seed + dist.get_rank() + 1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, TASK.batch_of(data, generator)).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        held = loss_of(model, TASK.held_out(data, dist.get_rank())).double()
    dist.all_reduce(held)
    sent = None if handle is None else handle.sent / steps
    return {"way": way, "seed": seed, "held": float(held) / RANKS, "sent": sent}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wires", default="safe,max", help="presets, beside plain HSDP")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=TASK.steps)
    parser.add_argument("--data", type=Path, default=Path("out/quality/data.pt"), help="made where it is missing")
    parser.add_argument("--json", metavar="PATH")
    args = parser.parse_args()
    ways, data = [PLAIN, *args.wires.split(",")], load(args.data)
    with Network(hosts=2, preload=("torch", "thinwire.data_parallel.fsdp")) as net:
        found = net.run(ranks, str(args.data.resolve()), ways, args.seeds, args.steps, per_host=2, timeout=7200)[0]
    held = {way: [row["held"] for row in found if row["way"] == way] for way in ways}
    rows = []
    for way in ways:
        off = [100 * (a / b - 1) for a, b in zip(held[way], held[PLAIN])]
        spread = half_interval(off) or float("nan")
        sent = next(row["sent"] for row in found if row["way"] == way)
        shown = "" if way == PLAIN else f"{statistics.mean(off):+.2f} ± {spread:.2f}"
        rows.append((way, statistics.mean(held[way]), shown, "–" if sent is None else sent / 1e3))
    table(f"Two sites of two ranks, {args.steps} steps, {args.seeds} seeds",
          ("between sites", "held-out loss", "against plain HSDP, %", "kB a rank and step"), rows)  # fmt: skip
    write_json(args.json, {"rows": found, "data": digest(data), "torch": torch.__version__})


if __name__ == "__main__":
    main()
