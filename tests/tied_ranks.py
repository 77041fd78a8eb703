"""What the ranks of the tied embedding's tests run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from thinwire.parallel import TiedEmbedding

VALUES, STEPS, RATE = (2000, 100), 3, 0.1


def gradient(step: int, rank: int) -> torch.Tensor:
    return torch.randn(VALUES, generator=torch.Generator().manual_seed(100 * step + rank))


def sent() -> int:
    """Bytes that have left this host, headers included."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    counts = {line.split(":")[0].strip(): int(line.split(":")[1].split()[8]) for line in lines}
    return sum(count for name, count in counts.items() if name != "lo")


def train(sync: str, column: Any, pair: Any) -> dict[str, Any]:
    """SGD on random gradients."""
    weight = nn.Parameter(torch.ones(VALUES))
    tied = TiedEmbedding(weight, {"embedding": {"sync": sync}}, dist.group.WORLD, column, pair)
    dist.barrier()
    before = sent()
    for step in range(STEPS):
        weight.grad = gradient(step, dist.get_rank())
        assert tied.finish()
        with torch.no_grad():
            weight -= RATE * weight.grad
    crossed = sent() - before
    assert tied.check()
    tied.reducer.close()
    return {"weight": weight.detach(), "sent": tied.sent, "crossed": crossed}


def heal() -> list[tuple[bool, int, float, float]]:
    """One copy and its moment are spoilt: (equal, healed, weight, moment) before, and after each of two checks."""
    weight, moment = nn.Parameter(torch.ones(VALUES)), torch.full(VALUES, 2.0)
    tied = TiedEmbedding(weight, {"embedding": {"sync": "fused"}}, dist.group.WORLD)
    seen = [(tied.check([moment]), tied.healed, float(weight.detach()[5, 7]), float(moment[5, 7]))]
    with torch.no_grad():
        if dist.get_rank() == 1:
            weight[5, 7], moment[5, 7] = 9.0, 9.0
    for _ in range(2):
        seen.append((tied.check([moment]), tied.healed, float(weight.detach()[5, 7]), float(moment[5, 7])))
    tied.reducer.close()
    return seen


def everything() -> dict[str, Any]:
    """Rank = 2 · replica + (is the last stage)."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    column = [dist.new_group(list(range(end, size, 2))) for end in range(2)][rank % 2]
    pair = [dist.new_group([first, first + 1]) for first in range(0, size, 2)][rank // 2]
    return {sync: train(sync, column, pair) for sync in ("fused", "separate")} | {"healed": heal()}
