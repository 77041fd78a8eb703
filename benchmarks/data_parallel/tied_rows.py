"""A tied embedding's exchange on a slow link: fused, and by rows; without the model around it.

    python benchmarks/data_parallel/tied_rows.py                # SmolLM2-135M's embedding, 4,096 tokens, 100 Mbit/s

Per step of two stages: seconds of the exchange (medians, the slower end) and bytes that both ends send. The weight's
optimiser step is left out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from thinwire.codecs import Quantize
from thinwire.data_parallel.tied_embedding import RowEmbedding, TiedEmbedding
from thinwire.data_parallel.tied_rows import TiedRows
from thinwire.lab import Network

FUSED = {"collective": "dense", "sync": "fused"}
WAYS: dict[str, dict[str, Any] | Quantize | None] = {
    "fused, fp32": FUSED,
    "fused, 4 bits": {"collective": "quantized", "bits": 4, "sync": "fused"},
    "rows, fp32": None,
    "rows, 8 bits": Quantize(8),
    "rows, 4 bits": Quantize(4),
}


def exchange(way: str, vocabulary: int, width: int, rows: int, steps: int) -> tuple[float, int]:
    """On one rank: (seconds per step, bytes per step that it sends)."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(vocabulary, width))
    kind, took, first = WAYS[way], [], dist.get_rank() == 0
    if isinstance(kind, dict):
        tied = TiedEmbedding(weight, {"embedding": kind}, dist.group.WORLD)
    else:
        embedding = RowEmbedding(nn.Embedding.from_pretrained(weight.detach(), freeze=False))
        tied = TiedRows(embedding if first else weight, dist.group.WORLD, codec=kind, tell=False)
    for _ in range(steps + 1):
        used = torch.randperm(vocabulary)[:rows]
        weight.grad = torch.randn(vocabulary, width)
        dist.barrier()
        before, began = tied.sent, time.perf_counter()
        if isinstance(tied, TiedEmbedding):
            tied.finish()
        else:
            tied.announce(used)
            tied.begin()
            tied.fetch()
            if first:
                embedding.weight.grad = torch.randn(rows, width)
            tied.send_gradients()
            tied.add_gradients()
            tied.commit()
        took.append(time.perf_counter() - began)
    sent = tied.sent - before
    (tied.reducer if isinstance(tied, TiedEmbedding) else tied).close()
    return statistics.median(took[1:]), sent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=49_152)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--rows", type=int, default=1_148)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    print(f"{args.rows} of {args.vocabulary} rows of {args.width}, {args.rate}\n{'':16}{'s':>8}{'MB':>10}")
    with Network(hosts=2, rate=args.rate, preload=("torch", "thinwire.data_parallel.tied_rows")) as net:
        for way in WAYS:
            sizes = args.vocabulary, args.width, args.rows, args.steps
            ends = net.run(exchange, way, *sizes, timeout=600, echo=False)
            print(f"{way:16}{max(s for s, _ in ends):8.3f}{sum(b for _, b in ends) / 1e6:10.3f}", flush=True)


if __name__ == "__main__":
    main()
