"""Towards 1,000 times fewer bytes: every method with as many trials on seed 0, then what won, on one card.

    python benchmarks/quality/local_goal.py --corpus python.xz --out out --grid first --parallel 3 --budget 500
    python benchmarks/quality/local_goal.py --out out --grid first --quick --device cpu

Rows go to OUT/frontier.jsonl, what is there is not made again; local_frontier_report.py reads it.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from frontier_jobs import LOCAL, OURS, Row, ours
from local_frontier import Runner, parsed
from stacked_model import Size, pack
from stacked_run import Job

SIZE, STEPS, BATCH = Size(256, 4, 256), 1500, 64


def job(method: str, every: int, table: Row, lr: float = 3e-3, **rest: Any) -> Job:
    given = {"sites": 4, "seed": 0, "steps": STEPS, "batch": BATCH, "size": SIZE, **rest}
    return Job(method, every=every, table=table, lr=lr, **given)


def mine(every: int = 10, lr: float = 3e-3, late: Row | None = None, moments: str = "own", **changed: Any) -> Job:
    """Ours, one round at a time; changed: of `ours`."""
    return job(OURS, every, ours(**{"delay": 0, **changed}), lr, late=late or {}, moments=moments)


def other(method: str, every: int, lr: float, outer: float, **rest: Any) -> Job:
    return job(method, every, {**LOCAL[method], "outer_lr": outer}, lr, **rest)


def plain(every: int, lr: float = 3e-3, mu: float = 0.0, **rest: Any) -> Job:
    """LocalSGD; with an outer momentum it has another name."""
    name = "LocalSGD, Nesterov" if mu else "LocalSGD"
    return job(name, every, {"wire": "off", "outer_lr": 1.0, "momentum": mu, "nesterov": mu > 0}, lr, **rest)


def two_bits(every: int, mu: float = 0.5) -> Row:
    """All values in two bits, in two hops, the rest kept."""
    wire = {"collective": "two_hop", "codec": {"codec": "quantize", "bits": 2, "scale": "mse"}, "exact_dims": 0,
            "memory": {"memory": "error_feedback", "decay": 0.95}}  # fmt: skip
    return {"wire": {"gradient": wire}, "keep": 1.0, "outer_lr": 1.0, "momentum": mu, "nesterov": mu > 0}


def exact(lr: float = 3e-3, **rest: Any) -> Job:
    return job("fp32 per step", 0, {}, lr, **rest)


def first() -> list[Job]:
    """Seed 0: rates and ideas at 1,000 times, rates of the others, then other budgets; in order of importance."""
    sparse, flow = "SparseLoCo", "Streaming DiLoCo"
    dense_late = {"share": 0.07, "every": 9, "table": two_bits(9)}
    return [
        exact(), exact(2e-3), exact(4.5e-3),
        mine(), mine(lr=4.5e-3), mine_loco(10),
        mine(3, k=19, decay=0.98), mine(hops=True, k=128), mine(18, late={"share": 0.1, "every": 2}),
        other(sparse, 10, 3e-3, 2.0), other(sparse, 10, 4.5e-3, 2.0), other(sparse, 10, 4.5e-3, 1.4),
        mine(20, late=dense_late), mine(moments="m", momentum=0.0), mine(keep=0.5),
        other(flow, 30, 3e-3, 0.7), other(flow, 30, 2e-3, 0.7), plain(10, mu=0.5),
        other(sparse, 10, 3e-3, 1.4), other(sparse, 10, 2e-3, 2.8), other(sparse, 10, 6e-3, 1.4),
        other(flow, 30, 2e-3, 1.0), other(flow, 30, 1.5e-3, 0.7), mine(momentum=0.7),
        mine(30), mine(30, momentum=0.7), other(sparse, 30, 3e-3, 2.0), other(sparse, 30, 3e-3, 3.0),
        mine(3, decay=0.98), other(sparse, 3, 3e-3, 2.0), other(sparse, 3, 3e-3, 1.4),
        mine(1, decay=0.99, momentum=0.3), other(sparse, 1, 3e-3, 1.0), other(sparse, 1, 3e-3, 1.4),
        job(OURS + ", two bits", 60, two_bits(60)),
        plain(1), plain(1, moments="m"), plain(10, 4.5e-3), job("4 bits per step", 0, {}),
        other("DiLoCo", 30, 3e-3, 0.7),
    ]  # fmt: skip


def mine_loco(every: int, lr: float = 3e-3, outer: float = 2.0, **rest: Any) -> Job:
    """SparseLoCo with our two magnitudes: nothing kept, no momentum."""
    return job(OURS, every, ours(delay=0, keep=0.0, momentum=0.0, lr=outer), lr, **rest)


GRIDS: dict[str, Callable[[], list[Job]]] = {"first": first}


def main() -> None:
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--grid", choices=GRIDS, default="first")
    given, rest = own.parse_known_args()
    options = parsed(rest)
    options.out.mkdir(parents=True, exist_ok=True)
    jobs = GRIDS[given.grid]()
    if options.quick:
        small = {"size": Size(64, 1, 32), "steps": 40, "batch": 8}
        jobs = [replace(one, **small) for one in jobs]
        options.corpus = options.out / "quick.xz"
        pack([Path(sysconfig.get_paths()["stdlib"]) / "json"], options.corpus, 500_000)
    if options.device == "cuda":
        torch.set_float32_matmul_precision("high")
    runner = Runner(options, options.out / "frontier.jsonl")
    runner.run(jobs, "jobs")
    if runner.failed:
        sys.exit(f"{runner.failed} fleets failed")


if __name__ == "__main__":
    main()
