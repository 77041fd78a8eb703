"""A pipeline of two stages whose samples are remembered in a file: how much resident memory it takes.

    python benchmarks/pipeline/pipeline_memory.py 2        # GB of the store at either end; as much disk twice

First every sample is met once (the file grows to its size), then 500 more steps visit them in random order with the
next batch prefetched. Resident memory of every rank is read before, after the first steps, and after each part: as it
is, and after the C library gave back the pages that it keeps for later (more and more, among buffers of many sizes).
What grew after that would be a leak.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleGPipe

import thinwire as tw
from thinwire.codecs import Quantize
from thinwire.config.wire import Link, Wire
from thinwire.lab.network import Network
from thinwire.memory import Delta

ROWS, LENGTH, WIDTH, STEPS = 16, 128, 1024, 500


def resident(trimmed: bool = False) -> float:
    """MB that this process holds in RAM."""
    if trimmed:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def both() -> tuple[float, float]:
    return resident(), resident(trimmed=True)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def train(folder: str, samples: int) -> tuple[dict[str, tuple[float, float]], float]:
    dist.init_process_group("gloo")
    rank, device = dist.get_rank(), torch.device("cpu")
    wire = Wire(forward=Link(Quantize(4), Delta(cold=Quantize(8), path=f"{folder}/{rank}")), backward=Link(Quantize(8)))
    stage = tw.parallel.CompressedStage(nn.LayerNorm(WIDTH), rank, 2, device, wire=wire)
    schedule = ScheduleGPipe(stage, 4, loss_fn=loss_of)
    x = torch.randn(ROWS, LENGTH, WIDTH)

    def step(ids: Tensor, following: Tensor) -> None:
        with stage.step(ids=ids, next_ids=following):
            schedule.step(*((x,) if rank == 0 else ()), target=x if rank else None)

    out = {"start": both()}
    for number, ids in enumerate(torch.arange(samples).split(ROWS)):
        step(ids, ids)
        if number == 3:
            step(ids, ids)  # whatever is compiled is compiled here
            out["warmed up"] = both()
    out["all samples met"] = both()
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randperm(samples, generator=generator)[:ROWS] for _ in range(STEPS + 1)]
    for number, (ids, following) in enumerate(itertools.pairwise(batches)):
        step(ids, following)
        if number == 49:
            out["50 steps more"] = both()
    out[f"{STEPS} steps more"] = both()
    dist.destroy_process_group()
    return out, sum(os.path.getsize(f"{folder}/{rank}/{name}") for name in os.listdir(f"{folder}/{rank}")) / 1e6


if __name__ == "__main__":
    gigabytes = float(sys.argv[1]) if len(sys.argv) > 1 else 2.0
    samples = int(gigabytes * 1e9 / (LENGTH * WIDTH * 2)) // ROWS * ROWS
    preload = ("torch", "torch.distributed.pipelining", "thinwire.pipeline.pipeline")
    with tempfile.TemporaryDirectory() as folder, Network(hosts=2, preload=preload) as net:
        for rank, (found, store) in enumerate(net.run(train, folder, samples, timeout=3000, echo=False)):
            parts = [f"{name} {plain:.0f} ({trimmed:.0f})" for name, (plain, trimmed) in found.items()]
            print(f"rank {rank}, MB resident (trimmed): {', '.join(parts)}; store {store:.0f} MB")
