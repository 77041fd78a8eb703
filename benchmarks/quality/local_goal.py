"""Towards 1,000 times fewer bytes: every method with as many trials on seed 0, then what won, on one card or one core.

    python benchmarks/quality/local_goal.py --corpus python.xz --out out --grid size --parallel 3 --together 12
    python benchmarks/quality/local_goal.py --corpus python.xz --out out --grid large --parallel 2 --together 6
    python benchmarks/quality/local_goal.py --out out --grid size --quick --device cpu
    python benchmarks/quality/local_goal.py --corpus python.xz --out out --grid core --device cpu --together 1

Rows go to OUT/frontier.jsonl, what is there is not made again; local_frontier_report.py reads it.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from frontier_jobs import LOCAL, OURS, Row, ours
from local_frontier import Runner, done, is_done, parsed
from stacked_model import Size, pack
from stacked_run import Job

SIZE, STEPS, BATCH = Size(256, 4, 256), 3000, 32
LARGE: Row = {"size": Size(512, 8, 256), "steps": 2000, "batch": 32}
CORE: Row = {"size": Size(64, 2, 64), "steps": 1500, "batch": 16}  # a run takes half a minute of one core
Best = Callable[[list[Job]], Job]  # of these the one with the least loss
Stages = Iterator[list[Job]]


def job(method: str, every: int, table: Row, lr: float = 3e-3, **rest: Any) -> Job:
    given = {"sites": 4, "seed": 0, "steps": STEPS, "batch": BATCH, "size": SIZE, **rest}
    return Job(method, every=every, table=table, lr=lr, **given)


def other(method: str, every: int, lr: float, outer: float, **rest: Any) -> Job:
    return job(method, every, {**LOCAL[method], "outer_lr": outer}, lr, **rest)


def plain(every: int, lr: float, **rest: Any) -> Job:
    """LocalSGD."""
    return job("LocalSGD", every, {"wire": "off", "outer_lr": 1.0, "momentum": 0.0, "nesterov": False}, lr, **rest)


def exact(lr: float = 3e-3, **rest: Any) -> Job:
    return job("fp32 per step", 0, {}, lr, **rest)


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


def ablations(best: Best) -> Stages:
    """What is best of ours on one core at 1,000 times, with one thing changed at a time."""
    changed: list[Row] = [{}, {"delay": 1}, {"delay": 5}, *({"keep": keep} for keep in (0.0, 0.25, 0.75, 1.0))]
    changed += [{"decay": beta} for beta in (0.8, 0.9, 0.98, 1.0)] + [{"tile": 32, "k": 16}, {"tile": 128, "k": 256}]
    changed += [{"values": values} for values in ((), {"codec": "scaled_sign"}, {"codec": "quantize", "bits": 4})]
    yield [mine_loco(10, 9e-3, 3.0, {"keep": 0.5, **change}, **CORE) for change in changed]


def at(one: Job, every: int, share: float) -> Job:
    """With another H, and this share of its outer rate."""
    return replace(one, every=every, table={**one.table, "outer_lr": round(one.table["outer_lr"] * share, 2)})


def elsewhere(one: Job) -> list[Job]:
    """Two sites and eight, with the outer rate in proportion to the sites, and as it is; and a step late."""
    tried = [replace(at(one, one.every, share), sites=sites) for sites in (2, 8) for share in (sites / 4, 1.0)]
    return [*tried, replace(one, table={**one.table, "delay": 1})]


def pairs(theirs: list[Job], own: list[Job]) -> list[Job]:
    """In turn, so that a run which is cut short has as many trials of both."""
    return [one for pair in itertools.zip_longest(theirs, own) for one in pair if one is not None]


TRIED: dict[int, tuple[list[tuple[float, float]], list[tuple[float, float, float, float]]]] = {
    # H: (inner, outer rate) of SparseLoCo; (inner, outer rate, share kept, β) of ours
    10: (
        [(2e-3, 2.0), (2e-3, 3.0), (3e-3, 2.0), (2e-3, 4.0), (1.5e-3, 4.0), (3e-3, 3.0), (4.5e-3, 2.0), (2e-3, 5.6),
         (1.4e-3, 5.6), (2e-3, 8.0), (1.4e-3, 8.0), (1e-3, 8.0), (3e-3, 4.0), (3e-3, 5.6), (1e-3, 5.6)],
        [(2e-3, 2.0, 0.5, 0.95), (2e-3, 3.0, 0.5, 0.95), (3e-3, 2.0, 0.5, 0.95), (2e-3, 4.0, 0.5, 0.95),
         (1.5e-3, 4.0, 0.5, 0.95), (3e-3, 3.0, 0.5, 0.95), (2e-3, 5.6, 0.5, 0.95), (1.4e-3, 5.6, 0.5, 0.95),
         (2e-3, 8.0, 0.5, 0.95), (1.4e-3, 8.0, 0.5, 0.95), (1e-3, 8.0, 0.5, 0.95), (2e-3, 3.0, 0.0, 0.95),
         (2e-3, 3.0, 0.5, 0.98), (2e-3, 5.6, 0.25, 0.95), (2e-3, 5.6, 0.75, 0.95)],
    ),
    30: (
        [(2e-3, 4.0), (2e-3, 5.6), (1.4e-3, 5.6), (2.8e-3, 4.0), (2e-3, 8.0), (1.4e-3, 8.0)],
        [(2e-3, 4.0, 0.5, 0.95), (2e-3, 5.6, 0.5, 0.95), (1.4e-3, 4.0, 0.5, 0.95), (2e-3, 8.0, 0.5, 0.95),
         (1.4e-3, 8.0, 0.5, 0.95), (2e-3, 4.0, 0.25, 0.95)],
    ),
    3: (
        [(2e-3, 2.8), (2e-3, 2.0), (2e-3, 4.0), (2.8e-3, 2.0), (2e-3, 5.6), (1.4e-3, 4.0), (1.4e-3, 5.6)],
        [(2e-3, 2.8, 0.0, 0.95), (2e-3, 2.8, 0.5, 0.95), (2e-3, 2.0, 0.0, 0.95), (2e-3, 4.0, 0.0, 0.95),
         (2.8e-3, 2.0, 0.5, 0.95), (2e-3, 5.6, 0.0, 0.95), (1.4e-3, 4.0, 0.0, 0.95)],
    ),
    100: ([(2e-3, 4.0), (2e-3, 5.6)], [(2e-3, 4.0, 0.5, 0.95), (2e-3, 5.6, 0.25, 0.95)]),
}  # fmt: skip


def trials(every: int) -> tuple[list[Job], list[Job]]:
    """Of SparseLoCo and of ours, on seed 0, as many of both."""
    theirs, own = TRIED[every]
    return [loco(every, *one) for one in theirs], [
        mine_loco(every, lr, outer, {"keep": keep, "decay": beta}) for lr, outer, keep, beta in own
    ]


def size(best: Best) -> Stages:
    """The frontier on 3.3 million parameters: as many trials of SparseLoCo as of ours on seed 0; every method at every
    H; three seeds of what is on the frontier; two sites and eight, and texts apart."""
    exacts = [exact(lr) for lr in (2e-3, 3e-3, 4.5e-3, 1.4e-3, 1e-3)]
    tried = {every: trials(every) for every in (10, 30, 3, 100)}
    yield exacts + [one for some in tried.values() for one in pairs(*some)]
    found = [best(one) for some in tried.values() for one in some]
    flow = [other("Streaming DiLoCo", 30, *one) for one in ((2e-3, 0.7), (3e-3, 0.7), (2e-3, 1.0), (1.5e-3, 0.7))]
    yield flow
    yield seeds([best(exacts), *found[:-2], best(flow)])
    diloco = [other("DiLoCo", 30, *one) for one in ((2e-3, 0.7), (3e-3, 0.7))]
    yield [
        *diloco,
        *[replace(best(some), every=every) for some in (flow, diloco) for every in (10, 100)],
        *[plain(every, rate) for every in (10, 30, 100) for rate in (2e-3, 3e-3)],
        *[job("large batch", every, {}, 4e-3) for every in (10, 30, 100)],
        job("4 bits per step", 0, {}, 2e-3), loco(1, 2e-3, 2.0), mine_loco(1, 2e-3, 2.0),
    ]  # fmt: skip
    tuned = [loco(30, 2e-3, 5.6), mine_loco(30, 2e-3, 5.6, {"keep": 0.5}), best(flow), best(diloco)]
    yield [replace(one, sites=sites) for sites in (2, 8) for one in tuned]
    apart = [exact(2e-3), loco(10, 2e-3, 4.0), mine_loco(10, 2e-3, 4.0, {"keep": 0.5}), best(flow)]
    yield [replace(one, apart=True) for one in apart]


def large(best: Best) -> Stages:
    """1,000 times on 25 million parameters with three seeds, at 0.7 times the rates that are best for 3.3 million."""
    exacts = [exact(lr, **LARGE) for lr in (1e-3, 1.4e-3)]
    theirs, own = (replace(best(some), lr=round(0.7 * best(some).lr, 5), **LARGE) for some in trials(10))
    yield [theirs, own, *exacts]
    yield seeds([theirs, own, best(exacts)])


GRIDS: dict[str, Callable[[Best], Stages]] = {"size": size, "large": large, "core": core, "ablations": ablations}


def best_of(jobs: list[Job], path: Path) -> Job:
    """With the least loss in the file; the first where none is there."""
    rows = done(path)
    found = [(row["held"], i) for i, one in enumerate(jobs) for row in rows if is_done(one, "jobs", [row])]
    return jobs[min(found)[1]] if found else jobs[0]


def main() -> None:
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--grid", choices=GRIDS, default="size")
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

    most = options.together
    for jobs in GRIDS[given.grid](best):
        options.together = min(most, -(-len(jobs) // options.parallel))  # as many for each process
        runner.run([replace(one, **small) for one in jobs], "jobs")
    if runner.failed:
        sys.exit(f"{runner.failed} fleets failed")


if __name__ == "__main__":
    main()
