"""Towards 1,000 times fewer bytes: every method with as many trials on seed 0, then what won, on one card or one core.

    python benchmarks/quality/local_goal.py --corpus python.xz --out out --grid first --parallel 3 --budget 500
    python benchmarks/quality/local_goal.py --out out --grid first --quick --device cpu
    python benchmarks/quality/local_goal.py --corpus python.xz --out out --grid core --device cpu --together 1

Rows go to OUT/frontier.jsonl, what is there is not made again; local_frontier_report.py reads it.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from frontier_jobs import LOCAL, OURS, Row, before, ours
from local_frontier import Runner, done, is_done, parsed
from stacked_model import Size, pack
from stacked_run import Job

SIZE, STEPS, BATCH = Size(256, 4, 256), 1500, 64
CORE: Row = {"size": Size(64, 2, 64), "steps": 1500, "batch": 16}  # a run takes half a minute of one core
Best = Callable[[list[Job]], Job]  # of these the one with the least loss
Stages = Iterator[list[Job]]


def job(method: str, every: int, table: Row, lr: float = 3e-3, **rest: Any) -> Job:
    given = {"sites": 4, "seed": 0, "steps": STEPS, "batch": BATCH, "size": SIZE, **rest}
    return Job(method, every=every, table=table, lr=lr, **given)


def mine(every: int = 10, lr: float = 3e-3, late: Row | None = None, moments: str = "own", **changed: Any) -> Job:
    """Ours as it was, one round at a time; changed: of `before`."""
    return job(OURS, every, before(**{"delay": 0, **changed}), lr, late=late or {}, moments=moments)


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


def first(best: Best) -> Stages:
    """Seed 0: rates and ideas at 1,000 times, rates of the others, then other budgets; in order of importance."""
    sparse, flow = "SparseLoCo", "Streaming DiLoCo"
    dense_late = {"share": 0.07, "every": 9, "table": two_bits(9)}
    yield [
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


def mine_loco(every: int, lr: float = 3e-3, outer: float = 2.0, changed: Row | None = None, **rest: Any) -> Job:
    """SparseLoCo with our two magnitudes: nothing kept, no momentum. changed: of `ours`."""
    table = {"delay": 0, "keep": 0.0, "momentum": 0.0, "lr": outer, **(changed or {})}
    return job(OURS, every, ours(**table), lr, **rest)


def loco(every: int, lr: float, outer: float, **rest: Any) -> Job:
    return other("SparseLoCo", every, lr, outer, **rest)


def seeds(jobs: list[Job]) -> list[Job]:
    """The other two of three."""
    return [replace(one, seed=seed) for seed in (1, 2) for one in jobs]


def core(best: Best) -> Stages:
    """Equal bytes on one core: SparseLoCo, and its recipe with our value code and some of what was not sent kept, with
    as many trials on seed 0; then the best of each at every H with three seeds, and Streaming DiLoCo."""
    exacts = [exact(lr, **CORE) for lr in (6e-3, 3e-3, 1.2e-2, 9e-3)]
    rates = [(lr, outer) for lr in (3e-3, 6e-3) for outer in (2.0, 3.0)] + [(9e-3, 3.0), (6e-3, 4.5)]
    more = [(9e-3, 2.0), (6e-3, 2.5), (1.2e-2, 2.0), (1.2e-2, 3.0), (1.8e-2, 2.0), (2.4e-2, 1.4)]
    kept = [(6e-3, 3.0, 0.5), (9e-3, 3.0, 0.5), (6e-3, 3.0, 0.75), (1.2e-2, 3.0, 0.5), (1.2e-2, 2.0, 0.5)]
    kept += [(9e-3, 2.0, 0.5)]
    theirs = {10: [loco(10, *one, **CORE) for one in rates + more]}
    own = {10: [mine_loco(10, *one, **CORE) for one in rates]}
    own[10] += [mine_loco(10, lr, outer, {"keep": keep}, **CORE) for lr, outer, keep in kept]
    yield exacts + [one for pair in zip(theirs[10], own[10]) for one in pair]
    middle = best(theirs[10]), best(own[10])
    for every, shares in ((3, (1.0, 0.7, 1.4)), (30, (1.0, 0.7)), (1, (0.7, 1.0))):
        theirs[every], own[every] = ([at(one, every, share) for share in shares] for one in middle)
    theirs[3] += [loco(3, 1.8e-2, 1.0, **CORE), loco(3, 2.7e-2, 1.4, **CORE)]
    own[3] += [mine_loco(3, 1.8e-2, 1.4, {"keep": keep}, **CORE) for keep in (0.0, 0.5)]
    theirs[30] += [loco(30, lr, 3.0, **CORE) for lr in (9e-3, 6e-3)]
    own[30] += [mine_loco(30, lr, 3.0, {"keep": keep}, **CORE) for lr, keep in ((9e-3, 0.25), (6e-3, 0.5))]
    for every in (3, 30):
        yield [one for pair in zip(theirs[every], own[every]) for one in pair]
    yield elsewhere(middle[1])
    for every in (10, 30, 3):
        yield seeds([best(theirs[every]), best(own[every])])
    flow = [other("Streaming DiLoCo", 30, *one, **CORE) for one in ((6e-3, 0.7), (3e-3, 0.7))]
    yield flow
    yield seeds([best(flow), best(exacts)])
    yield [one for pair in zip(theirs[1], own[1]) for one in pair]
    yield seeds([best(theirs[1]), best(own[1])])


def at(one: Job, every: int, share: float) -> Job:
    """With another H, and this share of its outer rate."""
    return replace(one, every=every, table={**one.table, "outer_lr": round(one.table["outer_lr"] * share, 2)})


def elsewhere(one: Job) -> list[Job]:
    """Two sites and eight, with the outer rate in proportion to the sites, and as it is; and a step late."""
    tried = [replace(at(one, one.every, share), sites=sites) for sites in (2, 8) for share in (sites / 4, 1.0)]
    return [*tried, replace(one, table={**one.table, "delay": 1})]


GRIDS: dict[str, Callable[[Best], Stages]] = {"first": first, "core": core}


def best_of(jobs: list[Job], path: Path) -> Job:
    """With the least loss in the file; the first where none is there."""
    rows = done(path)
    found = [(row["held"], i) for i, one in enumerate(jobs) for row in rows if is_done(one, "jobs", [row])]
    return jobs[min(found)[1]] if found else jobs[0]


def main() -> None:
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--grid", choices=GRIDS, default="first")
    given, rest = own.parse_known_args()
    options = parsed(rest)
    options.out.mkdir(parents=True, exist_ok=True)
    small: Row = {"size": Size(64, 1, 32), "steps": 40, "batch": 8} if options.quick else {}
    if options.quick:
        options.corpus = options.out / "quick.xz"
        pack([Path(sysconfig.get_paths()["stdlib"]) / "json"], options.corpus, 500_000)
    if options.device == "cuda":
        torch.set_float32_matmul_precision("high")
    runner = Runner(options, options.out / "frontier.jsonl")

    def best(jobs: list[Job]) -> Job:
        return best_of([replace(one, **small) for one in jobs], runner.path)

    for jobs in GRIDS[given.grid](best):
        runner.run([replace(one, **small) for one in jobs], "jobs")
    if runner.failed:
        sys.exit(f"{runner.failed} fleets failed")


if __name__ == "__main__":
    main()
