"""Equal bytes: every method tuned with as many trials, then all byte budgets with three paired seeds, on one card.

    python benchmarks/quality/local_budgets.py --corpus code/python.xz --out out --budget 280
    python benchmarks/quality/local_budgets.py --corpus code/python.xz --out out --device cpu --quick

Stages follow one another, the most telling first, and take the rates that the stages before found best on seed 0. What
is in OUT/frontier.jsonl is not made again; local_frontier_report.py reads it.
"""

from __future__ import annotations

import argparse
import math
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from frontier_jobs import LOCAL, LOW, SITES, dense, low
from local_frontier import Row, Runner, done, is_done, parsed
from stacked_model import Size
from stacked_run import Job

SIZE, STEPS, BATCH, MOST = Size(256, 4, 256), 1500, 64, 9
BUDGETS: dict[int, tuple[int, dict[str, Any]]] = {  # times fewer bytes, about: (H, what of low rank is sent)
    120: (1, {"rank": 25}), 430: (1, {"rank": 7}), 1000: (1, {"rank": 3, "shrink": 43.0}),
    3000: (2, {"rank": 2, "shrink": 65.0}),
}  # fmt: skip
SPARSE = {120: 1, 430: 3, 1000: 10, 3000: 30}  # SparseLoCo's H at no fewer bytes than ours


class Grid:
    """Jobs, and what was found of them."""

    def __init__(self, runner: Runner, steps: int, size: Size, batch: int) -> None:
        self.runner = runner
        self.how: dict[str, Any] = {"steps": steps, "batch": batch, "size": size}

    def job(self, method: str, every: int, table: Row, lr: float = 2e-3, seed: int = 0, **rest: Any) -> Job:
        return Job(method, rest.pop("sites", SITES), every, seed, lr=lr, table=table, **rest, **self.how)

    def run(self, jobs: list[Job]) -> None:
        """Those that are not there yet, in fleets of equal numbers; a stage that fails leaves the next one alone."""
        self.runner.options.together = math.ceil(len(jobs) / math.ceil(len(jobs) / MOST))
        try:
            self.runner.run(jobs, "jobs")
        except Exception:
            self.runner.failed += 1
            traceback.print_exc()

    def best(self, jobs: list[Job]) -> Job:
        """Of these the one with the least loss; the first where none was run."""
        rows = done(self.runner.path)
        found = [(row["held"], i) for i, job in enumerate(jobs) for row in rows if is_done(job, "jobs", [row])]
        return jobs[min(found)[1]] if found else jobs[0]

    def tuned(self, groups: list[list[Job]]) -> list[Job]:
        """The best of each group, after all have been run side by side."""
        self.run([job for group in groups for job in group])
        return [self.best(group) for group in groups]

    def seeds(self, jobs: list[Job], seeds: tuple[int, ...] = (1, 2)) -> None:
        self.run([replace(job, seed=seed) for seed in seeds for job in jobs])


def ours_at(grid: Grid, budget: int, like: Job | None = None, **changed: Any) -> Job:
    """Ours at a budget; like: whose rates it takes. changed: of `low`, or `site_adam`, `inner`, `sites`, `apart`."""
    every, sent = BUDGETS[budget]
    every, method = changed.pop("every", every), changed.pop("method", LOW)
    rest = {name: changed.pop(name) for name in ("site_adam", "sites", "apart") if name in changed}
    inner = changed.pop("inner", 2e-3)
    if like is not None:
        inner = like.lr
        rest = {"site_adam": like.site_adam, **rest}
        changed = {"momentum": like.table["momentum"], "lr": like.table["outer_lr"], **changed}
    return grid.job(method, every, low(**{**sent, **changed}), inner, **rest)


def other(grid: Grid, method: str, every: int, outer: float, inner: float = 2e-3, **rest: Any) -> Job:
    return grid.job(method, every, {**LOCAL[method], "outer_lr": outer}, inner, **rest)


def tune(grid: Grid) -> tuple[Job, Job, Job]:
    """Four trials each: ours and SparseLoCo at 1,000 times fewer bytes, Streaming DiLoCo at H = 30."""
    ours = [ours_at(grid, 1000, momentum=mu, inner=lr, site_adam=site)
            for mu, lr, site in ((0.5, 2e-3, False), (0.3, 3e-3, False), (0.0, 2e-3, True),
                                 (0.3, 2e-3, True))]  # fmt: skip
    loco = [other(grid, "SparseLoCo", SPARSE[1000], outer, lr, site_adam=site)
            for outer, lr, site in ((2.0, 2e-3, False), (2.0, 3e-3, False), (1.0, 2e-3, True),
                                    (1.5, 2e-3, True))]  # fmt: skip
    streaming = [other(grid, "Streaming DiLoCo", 30, outer, lr, site_adam=site)
                 for outer, lr, site in ((0.7, 2e-3, False), (0.7, 3e-3, False), (0.4, 2e-3, True),
                                         (0.7, 2e-3, True))]  # fmt: skip
    found = grid.tuned([ours, loco, streaming])
    return found[0], found[1], found[2]


def exact(grid: Grid) -> None:
    """fp32 data parallel: four rates on seed 0, and the other seeds at the best of them."""
    trials = [grid.job("fp32 per step", 0, {}, lr) for lr in (2e-3, 3e-3, 1e-3, 4e-3)]
    grid.run(trials + [replace(trials[0], seed=seed) for seed in (1, 2)])
    grid.seeds([grid.best(trials)])


def budgets(grid: Grid, ours: Job, loco: Job, streaming: Job) -> list[list[Job]]:
    """Two trials each at every other budget: the tuned outer rate, and one that suits it."""
    out, mu, rate = [], ours.table["momentum"], loco.table["outer_lr"]
    for budget, step in ((3000, 0.2), (430, -0.2), (120, -0.2)):
        out.append([ours_at(grid, budget, ours), ours_at(grid, budget, ours, momentum=round(max(0.0, mu + step), 2))])
    for budget, factor in ((3000, 1.5), (430, 0.5), (120, 0.5)):
        rates = (rate, rate * factor)
        out.append([other(grid, "SparseLoCo", SPARSE[budget], r, loco.lr, site_adam=loco.site_adam) for r in rates])
    outer = streaming.table["outer_lr"]
    out.append([other(grid, "Streaming DiLoCo", 100, r, streaming.lr, site_adam=streaming.site_adam)
                for r in (outer, round(1.4 * outer, 2))])  # fmt: skip
    return out


def ablations(grid: Grid, ours: Job) -> list[Job]:
    """One thing of ours changed at a time, at about as many bytes."""
    changes: dict[str, dict[str, Any]] = {
        "H 3": {"every": 3, "rank": 8, "shrink": 0.0}, "H 10": {"every": 10, "rank": 28, "shrink": 0.0},
        "delay 1": {"every": 3, "rank": 8, "shrink": 0.0, "delay": 1}, "decay 0.95": {"decay": 0.95},
        "nothing kept": {"keep": 0.0}, "2 bits": {"bits": 2, "rank": 5}, "8 bits": {"bits": 8, "every": 2},
        "decay 0.99": {"decay": 0.99}, "site_adam": {"site_adam": not ours.site_adam},
    }  # fmt: skip
    return [ours_at(grid, 1000, ours, method=f"{LOW}, {name}", **changed) for name, changed in changes.items()]


def elsewhere(grid: Grid, ours: Job, loco: Job, streaming: Job) -> list[Job]:
    """Sites with text of their own; two and eight sites."""
    apart = [replace(job, apart=True) for job in (ours, loco, streaming)]
    apart.append(grid.job("fp32 per step", 0, {}, apart=True))
    return apart + [replace(job, sites=sites) for sites in (8, 2) for job in (ours, loco, streaming)]


def baselines(grid: Grid) -> list[Job]:
    """What has more bytes, or fewer steps."""
    plain = [grid.job("LocalSGD", every, {"wire": "off", "outer_lr": 1.0, "momentum": mu, "nesterov": mu > 0})
             for every, mu in ((1, 0.0), (10, 0.0), (10, 0.5))]  # fmt: skip
    plain.append(replace(plain[0], site_adam=True))
    return [
        *plain, other(grid, "DiLoCo", 10, 0.7), other(grid, "DiLoCo", 30, 0.7), grid.job("4 bits per step", 0, {}),
        grid.job("two bits, two hops", 30, dense(2)), grid.job("large batch", 10, {}, 4e-3),
    ]  # fmt: skip


def stages(grid: Grid) -> list[Callable[[], None]]:
    """The whole grid, in order of importance."""
    exact(grid)
    ours, loco, streaming = tune(grid)
    print("tuned:", ours, loco, streaming, sep="\n", flush=True)
    grid.seeds([ours, loco, streaming])
    others = grid.tuned(budgets(grid, ours, loco, streaming))
    grid.seeds(others)
    return [
        lambda: grid.run(ablations(grid, ours)), lambda: grid.run(elsewhere(grid, ours, loco, streaming)),
        lambda: grid.run(baselines(grid)),
    ]  # fmt: skip


def main() -> None:
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--quick", action="store_true")
    quick, rest = own.parse_known_args()
    options = parsed(rest)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.device == "cuda":
        torch.set_float32_matmul_precision("high")
    runner = Runner(options, Path(options.out) / "frontier.jsonl")
    grid = Grid(runner, 4, Size(64, 1, 32), 8) if quick.quick else Grid(runner, STEPS, SIZE, BATCH)
    for stage in stages(grid):
        stage()
    if runner.failed:
        sys.exit(f"{runner.failed} stages failed")


if __name__ == "__main__":
    main()
