"""Section `hot` of gpu.py: how often does a step wait for the card, or ask it for memory, once it is warm?

    python3 benchmarks/card/gpu_hot.py

Four ranks in 1F1B, whose frames travel beside the computation. Torch reports every call that makes the host wait
(`torch.cuda.set_sync_debug_mode`) and counts calls of cudaMalloc. Inside the schedule there may be none of either; the
bracket around it looks once at its start (do the two ends remember the same?) and at its end (was everything finite and
as expected?). Exchanges of gradients are counted beside them: those whose sizes depend on values have to look.
"""

from __future__ import annotations

import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gpu_nccl
import gpu_ranks
import torch

from thinwire import collectives as k

WARM, STEPS = 6, 5
QUANTIZED = {"codec": "quantize", "bits": 3}
TOP = {"codec": "topk", "density": 0.05, "memory": "error_feedback"}
HOST = {**gpu_nccl.WARM_3, "memory": {**gpu_nccl.WARM_3["memory"], "host": True}}
WIRES: dict[str, Any] = {
    "fp32": "off", "quantise 3/3": {"forward": QUANTIZED, "backward": QUANTIZED}, "ours 3/3": gpu_nccl.AQ_3,
    "ours 3/3, host store": {**gpu_nccl.AQ_3, "forward": HOST},
    "top-k, fed back": {"forward": QUANTIZED, "backward": TOP},
}  # fmt: skip
EXCHANGES: dict[str, Any] = {
    "dense": k.Dense(), "4 bits, two hops": k.Quantized(4), "low rank 4": k.LowRank(4),
    "topk allgather int8 coded": k.TopkAllgather(0.01, "int8", "coded"),
    "oktopk int8 coded": k.OkTopk(0.01, values="int8", indices="coded"),
}  # fmt: skip


@contextmanager
def waits(found: Counter[str]) -> Iterator[None]:
    """Count, by line of code, the calls that make the host wait for the card."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found.update(f"{Path(w.filename).name}:{w.lineno}" for w in seen if "synchroniz" in str(w.message))


def allocations() -> int:
    """Calls of cudaMalloc so far."""
    return int(torch.cuda.memory_stats()["num_device_alloc"])


def pipelines(at: gpu_nccl.Context) -> Iterator[dict[str, Any]]:
    for name, wire in WIRES.items():
        run = gpu_nccl.Piped(at, "1F1B", 8, wire, overlap=True)
        ids, inside, around, made = list(range(8)), Counter[str](), Counter[str](), 0
        x = gpu_nccl.batch(ids).to(at.device)
        target = {"target": (x * 0.5).tanh()} if run.last else {}
        for step in range(WARM + STEPS):
            run.optimiser.zero_grad()
            if step == WARM:
                inside.clear()
                around.clear()
                made = allocations()
            with waits(around):
                bracket = run.pipe.step(ids=ids if run.first else None)
                bracket.__enter__()
            with waits(inside):
                run.schedule.step(*(x,) if run.first else (), **target)
            with waits(around):
                bracket.__exit__(None, None, None)
            run.optimiser.step()
        yield {"what": name, "inside": dict(inside), "around": dict(around), "allocations": allocations() - made}


def exchanges(at: gpu_nccl.Context) -> Iterator[dict[str, Any]]:
    for name, collective in EXCHANGES.items():
        shape = (1000, 1000)
        collective, state, found, made = collective.for_shapes([shape]), {}, Counter[str](), 0
        for step in range(WARM + STEPS):
            u = gpu_nccl.values(shape, 100 * step + at.rank).to(at.device)
            if step == WARM:
                found.clear()
                made = allocations()
            with waits(found):
                collective.exchange(u, None, state=state, step=step, seed=step)
        yield {"what": name, "inside": dict(found), "around": {}, "allocations": allocations() - made}


def rank_main(tell: Callable[[Any], None], device: str) -> None:
    at = gpu_nccl.Context(gpu_ranks.join(device), twin=False)
    for part in (pipelines, exchanges):
        try:
            for row in part(at):
                tell(row)
        except Exception:
            tell({"what": part.__name__, "problem": traceback.format_exc()})


def measure(seconds: float = 90.0) -> dict[str, Any]:
    rows, problems, began = [], [], time.time()
    for rank, told in gpu_ranks.launch(rank_main, gpu_nccl.RANKS, "cuda", seconds=seconds):
        if isinstance(told, gpu_ranks.Failure) or "problem" in told:
            problems.append(str(told) if isinstance(told, gpu_ranks.Failure) else told["problem"])
            print(problems[-1][-1500:], flush=True)
        else:
            rows.append({"rank": rank} | told)
    print(f"{'a step (' + format(time.time() - began, '.0f') + ' s)':28}{'rank':>5}{'waits inside':>14}{'around':>8}"
          f"{'cudaMalloc':>12}")  # fmt: skip
    for row in sorted(rows, key=lambda row: row["rank"]):
        if row["rank"] in (0, 1):
            inside, around = (sum(row[part].values()) / STEPS for part in ("inside", "around"))
            print(f"{row['what']:28}{row['rank']:5}{inside:14.1f}{around:8.1f}{row['allocations'] / STEPS:12.1f}   "
                  f"{ {line: count / STEPS for line, count in (row['inside'] | row['around']).items()} }")  # fmt: skip
    bad = [f"{row['what']}, rank {row['rank']}: {row['inside']} {row['allocations']}" for row in rows
           if row["what"] in WIRES and (row["inside"] or row["allocations"])]  # fmt: skip
    return {"rows": rows, "differ": problems + bad}


if __name__ == "__main__":
    measure()
