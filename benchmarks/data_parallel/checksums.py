"""What do the checksums of gradient messages cost, and does `wire="off"` cost anything beside plain DDP?

    python benchmarks/data_parallel/checksums.py [--device cpu|cuda] [--values 8e6] [--rounds 12] [--json PATH]

Two ranks without a slow link, where the cost shows most. Each round times in turn: one exchange of `--values` values in
four bits with and without checksums, and five steps of plain DDP (twice: their difference is the spread) and of DDP
under compress_ddp(model, "off"). On a card both ranks share it (NCCL).
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.config.wire import Wire
from thinwire.data_parallel.ddp import compress_ddp
from thinwire.data_parallel.exchange import Exchange
from thinwire.terminal import table, write_json

NAMES = ("4 bits, checked", "4 bits, unchecked", "plain DDP", "plain DDP again", "DDP, off")
WARM_UP = 3


def rank_main(rank: int, device_name: str, values: int, rounds: int, results: Any) -> None:
    """One of two ranks."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "NCCL_HOSTID": str(rank), "NCCL_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo" if device_name == "cpu" else "nccl", rank=rank, world_size=2)
    device = torch.device(device_name, 0) if device_name == "cuda" else torch.device("cpu")
    torch.manual_seed(rank)
    works = _works(device, values)
    finish = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    taken: dict[str, list[float]] = {name: [] for name in NAMES}
    for turn in range(-WARM_UP, rounds):
        for i in range(len(NAMES)):
            name = NAMES[(i + turn) % len(NAMES)]
            finish()
            dist.barrier()
            began = time.perf_counter()
            works[name]()
            finish()
            if turn >= 0:
                taken[name].append(time.perf_counter() - began)
    if rank == 0:
        results.put(taken)
    dist.barrier()
    dist.destroy_process_group()


def _works(device: torch.device, values: int) -> dict[str, Callable[[], None]]:
    reduction = Wire.of("max").gradient
    assert reduction is not None
    exchanges = [Exchange({"w": (values // 1024, 1024)}, reduction) for _ in range(2)]
    exchanges[1].group.transit = None
    x = torch.randn(values // 1024 * 1024, device=device)

    def average(exchange: Exchange) -> None:
        exchange.reduce(exchange.units[0], x.clone())
        if exchange.group.transit is not None:
            exchange.agree(torch.zeros(1, dtype=torch.uint8, device=device))
        exchange.commit()

    ids = [0] if device.type == "cuda" else None
    models = [DistributedDataParallel(_model().to(device), device_ids=ids) for _ in range(3)]
    compress_ddp(models[2], "off")
    batch = torch.randn(32, 512, device=device)

    def train(model: nn.Module) -> None:
        for _ in range(5):
            model.zero_grad()
            model(batch).square().mean().backward()

    return {
        NAMES[0]: lambda: average(exchanges[0]), NAMES[1]: lambda: average(exchanges[1]),
        NAMES[2]: lambda: train(models[0]), NAMES[3]: lambda: train(models[1]), NAMES[4]: lambda: train(models[2]),
    }  # fmt: skip


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 512))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--values", type=float, default=8e6)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json")
    options = parser.parse_args()
    os.environ.setdefault("MASTER_PORT", "29533")
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    started = mp.spawn(
        rank_main, (options.device, int(options.values), options.rounds, results), nprocs=2, join=False
    )  # fmt: skip
    taken = results.get()
    while not started.join():
        pass
    rows = []
    for name, base in zip(NAMES, (NAMES[1], NAMES[1], NAMES[2], NAMES[2], NAMES[2])):
        ratios = [a / b for a, b in zip(taken[name], taken[base])]
        rows.append([name, f"{1e3 * statistics.median(taken[name]):.2f}", f"{statistics.median(ratios):.3f}", base])
    table("two ranks, no slow link", ["what", "ms (median)", "ratio (median of rounds)", "to"], rows)
    if options.json:
        write_json(options.json, {"device": options.device, "values": options.values, "seconds": taken})


if __name__ == "__main__":
    main()
