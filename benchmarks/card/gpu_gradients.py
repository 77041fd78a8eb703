"""Section `gradients` of gpu.py: the mean of BERT-base-size gradients (110 M values) over NCCL, links of 1 Gbit/s.

Ranks share the card, each on a host of the lab with a link of its own. Gradients of a step are the sum of a part
common to all ranks and one of their own; 1 % of the values is selected. Times are of an exchange after those that find
thresholds; "selection" is the local selection alone, as a share of that.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from typing import Any

import gpu_pipeline as links
import gpu_ranks
import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import collectives as k
from thinwire.collectives import thresholds
from thinwire.collectives.base import Collective
from thinwire.collectives.groups import Metered

RATE, DENSITY = "1gbit", 0.01
STEPS = 5  # exchanges that are timed; their median counts
FIRST = (("fp32", "int32"), ("int8", "coded"))  # codings of entries: the papers', ours


def shapes_of(scale: int) -> list[tuple[int, ...]]:
    """BERT-base: 12 layers of width 768; `scale` divides the width, for a trial."""
    w, vocabulary = 768 // scale, 30522 // scale
    layer = [(w, w), (w,)] * 4 + [(4 * w, w), (4 * w,), (w, 4 * w), (w,)] + [(w,)] * 4
    return [(vocabulary, w), (512, w), (2, w), (w,), (w,)] + layer * 12 + [(w, w), (w,)]


def methods() -> dict[str, Collective]:
    out: dict[str, Collective] = {
        "dense, NCCL": k.Dense(),
        "PowerSGD rank 4": k.LowRank(4),
        "4 bits, two hops": k.Quantized(4),
    }
    for values, indices in FIRST:
        code = f"{values} {indices}"
        out |= {
            f"TopkAllgather {code}": k.TopkAllgather(DENSITY, values, indices),
            f"TopkDSA {code}": k.TopkDSA(DENSITY, values, indices), f"GTopk {code}": k.GTopk(DENSITY, values, indices),
            f"OkTopk {code}": k.OkTopk(DENSITY, values=values, indices=indices),
        }  # fmt: skip
    return out


def gradient(n: int, step: int, rank: int, device: torch.device) -> Tensor:
    """Magnitudes spread as a gradient's are: normal times log-normal, one part common to all ranks."""
    g = torch.Generator(device)
    g.manual_seed(step)
    common = torch.randn(n, device=device, generator=g) * torch.randn(n, device=device, generator=g).exp()
    g.manual_seed(1000 * step + rank + 1)
    own = torch.randn(n, device=device, generator=g) * torch.randn(n, device=device, generator=g).exp()
    return common.add_(own)


def rank_main(device_name: str, folder: str, scale: int, steps: int, only: str, seconds: float) -> list[dict[str, Any]]:
    began = time.monotonic()
    device = gpu_ranks.join(device_name, seconds=120.0)
    rank, size, asker, finish = dist.get_rank(), dist.get_world_size(), links.Asker(folder), _finish(device)
    shapes = shapes_of(scale)
    n, table = sum(math.prod(shape) for shape in shapes), []
    small = torch.ones(1000, device=device)
    dist.all_reduce(small)
    finish()
    for name, collective in ((name, each) for name, each in methods().items() if only in name):
        if links.meet(time.monotonic() - began) > seconds:
            break
        collective, group = collective.for_shapes(shapes), Metered(None)
        state: dict[str, Tensor] = {}
        asker.rate("unlimited" if "dense" in name else RATE)
        warm_up = 1 if "Ok" not in name else 3
        for step in range(warm_up):  # compiles, connects, and finds thresholds
            collective.exchange(gradient(n, step, rank, device), group, state=state, step=step, seed=step)
        finish()
        asker.rate(RATE)
        before, took, picking = group.sent, [], []
        timed = 1 if "dense" in name else steps
        for step in range(warm_up, warm_up + timed):
            u = gradient(n, step, rank, device)
            if name.startswith("OkTopk"):
                finish()
                links.meet()  # or some would select while others still make their gradients, on the same card
                start = time.perf_counter()
                thresholds.pick(u, max(1, round(DENSITY * n)), dict(state))
                finish()
                picking.append(links.meet(time.perf_counter() - start))
            finish()
            links.meet()
            start = time.perf_counter()
            collective.exchange(u, group, state=state, step=step, seed=step)
            finish()
            took.append(links.meet(time.perf_counter() - start))
        sent = links.meet(float((group.sent - before) / timed))
        typical = statistics.median(took)
        row = {"ranks": size, "method": name, "s": typical, "each_s": took, "MB": sent / 1e6,
               "selection": statistics.median(picking) / typical if picking else None, "values": n}  # fmt: skip
        table.append(row)
        if rank == 0:
            print("row " + json.dumps(row), flush=True)
        del collective, state
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return table


def _finish(device: torch.device) -> Any:
    return torch.cuda.synchronize if device.type == "cuda" else (lambda: None)


def measure(
    device: str = "cuda", seconds: float = 150.0, sizes: Any = (8, 2, 4), scale: int = 1, only: str = ""
) -> dict[str, Any]:
    """`seconds` for all sizes together. only: methods whose name holds this."""
    rows, end = [], time.monotonic() + seconds
    with links.shared_card(device) as shared:
        for size in sizes:
            left = end - time.monotonic()
            if left > 15:
                rows += links.on_links(rank_main, size, device, left, scale, STEPS, only)[0]
    print(f"{'ranks':>5}  {'method':28}{'s':>8}{'MB sent':>9}{'selection':>11}")
    for row in sorted(rows, key=lambda row: row["ranks"]):
        share = f"{row['selection']:.1%}" if row["selection"] else ""
        print(f"{row['ranks']:5}  {row['method']:28}{row['s']:8.3f}{row['MB']:9.2f}{share:>11}")
    return {"multi-process service": shared, "rate": RATE, "rows": rows}


if __name__ == "__main__":  # a trial on the CPU
    measure("cpu", 60.0, (2, 4), 16)
