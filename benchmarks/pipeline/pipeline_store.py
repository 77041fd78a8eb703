"""What remembering costs: a step of the delta, its store in memory or in a file, against direct quantisation.

    python benchmarks/pipeline/pipeline_store.py [width] [length] [rows] [layers]

Four stages under 1F1B on an unshaped network, 3 bits each way, warm samples, the next batch prefetched; the kinds take
turns, and a step's time is that of its slowest rank. Medians, and their ratio to direct quantisation.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time

import torch.distributed as dist

from thinwire.bench.pipeline_modes import Mode
from thinwire.bench.pipeline_ranks import Rank, Setup, text
from thinwire.codecs import Quantize
from thinwire.config.wire import Link, Wire
from thinwire.lab.network import Network
from thinwire.memory import Delta

BATCHES, STEPS, COLD, TURNS = 4, 28, 8, 4
PRELOAD = ("torch", "torch.distributed.pipelining", "thinwire.bench.pipeline_ranks")


def forward(kind: str, folder: str) -> Link:
    if kind == "direct":
        return Link(Quantize(3))
    return Link(Quantize(3), Delta(cold=Quantize(8), path=folder if kind == "file" else None))


def steps(kind: str, folder: str, setup: Setup) -> list[float]:
    wire = Wire(forward=forward(kind, f"{folder}/{time.time_ns()}"), backward=Link(Quantize(3)))
    rank, (_, samples, _) = Rank(Mode(wire, (3, 3)), setup, ""), text(setup)
    batches = [list(range(i * setup.batch, (i + 1) * setup.batch)) for i in range(BATCHES)]
    times = []
    for step in range(STEPS):
        dist.barrier()
        start = time.perf_counter()
        rank.optimiser.zero_grad()
        assert rank.pipe is not None
        with rank.pipe.step(ids=batches[step % BATCHES], next_ids=batches[(step + 1) % BATCHES]):
            rank._torch(samples[: setup.batch])
        rank.optimiser.step()
        times.append(time.perf_counter() - start)
    dist.barrier()
    dist.destroy_process_group()
    return times[COLD:]


if __name__ == "__main__":
    width, length, rows, layers = [int(word) for word in sys.argv[1:]] or (128, 64, 4, 1)
    setup = Setup(stages=4, width=width, layers=layers, length=length, rows=rows, samples=512)
    taken: dict[str, list[float]] = {}
    with Network(hosts=4, preload=PRELOAD) as net, tempfile.TemporaryDirectory() as folder:
        for kind in ("direct", "ram", "file") * TURNS:
            ranks = net.run(steps, kind, folder, setup, timeout=300, echo=False)
            taken.setdefault(kind, []).extend(map(max, zip(*ranks, strict=True)))
    direct = statistics.median(taken["direct"])
    for kind, times in taken.items():
        print(f"{kind}: {statistics.median(times):.4f} s a step, {statistics.median(times) / direct:.3f}× direct")
