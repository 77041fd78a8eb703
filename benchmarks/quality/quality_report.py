"""What the runs of quality.py say: one row per method with paired differences to dense, as a table."""

from __future__ import annotations

import math
import statistics
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quality_methods import METHODS
from quality_tasks import TASKS

from thinwire.quantities import half_interval

CLOSE = 0.005  # "as good as dense"
HEAD = "| method | rate | held-out loss | against dense, % | kB per step | × less | after warm-up | within 0.5 % |"


@dataclass(frozen=True)
class Point:
    """One method on one task, at its best rate."""

    task: str
    method: str
    rate: float
    at_edge: bool  # the best rate is the largest or the smallest of the sweep
    losses: tuple[float, ...]  # by seed
    differences: tuple[float, ...]  # (loss − dense's) ÷ dense's, by seed
    bytes: float  # per rank and step, warm-up included
    steady: float  # after the warm-up
    ratio: float  # dense's bytes ÷ these
    steady_ratio: float
    elsewhere: bool  # some seed's run of dense was with another version of torch, so on another machine

    @property
    def mean(self) -> float:
        return statistics.fmean(self.differences)

    @property
    def interval(self) -> float:
        """Half the 95 % interval of the mean difference."""
        half = half_interval(self.differences)
        return math.inf if half is None else half

    @property
    def verdict(self) -> str:
        """Is it within CLOSE of dense: surely, on average, surely not, or not on average?"""
        if self.method == "dense":
            return ""
        if len(self.losses) < 2:
            return "?"
        if self.mean <= CLOSE:
            return "yes" if self.mean + self.interval <= CLOSE else "on average"
        return "no" if self.mean - self.interval > CLOSE else "not on average"


def summarise(rows: Sequence[dict[str, Any]], plan: Namespace) -> list[Point]:
    """Points of every method whose rates are all run, in the order of METHODS."""
    points = []
    for task in plan.tasks:
        steps = plan.steps or TASKS[task].steps
        mine = [row for row in rows if row["task"] == task and row["steps"] == steps]
        dense = _best(mine, "dense", 1)
        for method in METHODS:
            best = _best(mine, method, len(TASKS[task].rates[-plan.rates :]))
            seeds = sorted(best.keys() & dense.keys())
            if seeds:
                points.append(_point(mine, [best[s] for s in seeds], [dense[s] for s in seeds]))
    return points


def _best(rows: Sequence[dict[str, Any]], method: str, rates: int) -> dict[int, dict[str, Any]]:
    """seed → row, at the rate that was best with seed 0; none before all rates are run."""
    mine = [row for row in rows if row["method"] == method]
    first = [row for row in mine if row["seed"] == 0]
    finite = [row for row in first if row["held"] is not None]
    if len(first) < rates or not finite:
        return {}
    rate = min(finite, key=lambda row: row["held"])["rate"]
    return {row["seed"]: row for row in mine if row["rate"] == rate and row["held"] is not None}


def _point(rows: Sequence[dict[str, Any]], mine: list[dict[str, Any]], dense: list[dict[str, Any]]) -> Point:
    rates = sorted({row["rate"] for row in rows if row["method"] == mine[0]["method"]})
    size, steady = (statistics.fmean(row[name] for row in mine) for name in ("bytes", "steady_bytes"))
    whole = statistics.fmean(row["bytes"] for row in dense)
    return Point(
        mine[0]["task"], mine[0]["method"], mine[0]["rate"], mine[0]["rate"] in (rates[0], rates[-1]),
        tuple(row["held"] for row in mine), tuple(a["held"] / b["held"] - 1 for a, b in zip(mine, dense)),
        size, steady, whole / size, whole / steady, any(a.get("torch") != b.get("torch") for a, b in zip(mine, dense)),
    )  # fmt: skip


def markdown(points: Sequence[Point]) -> str:
    """One table per task of `points`, as docs/quality.md holds them."""
    out = []
    for task in dict.fromkeys(point.task for point in points):
        out += ["", f"### {TASKS[task].title}", "", HEAD, "|---|---|---|---|---|---|---|---|"]
        for p in (point for point in points if point.task == task):
            spread = "" if p.method == "dense" else f"{100 * p.mean:+.2f} ± {100 * p.interval:.2f}".replace("inf", "?")
            seeds = ("†" if p.elsewhere else "") + ("" if len(p.losses) > 2 else f" (seeds: {len(p.losses)})")
            edge = "*" if p.at_edge else ""
            out.append(
                f"| {p.method}{seeds} | {p.rate:g}{edge} | {statistics.fmean(p.losses):.4f} | {spread} "
                f"| {p.bytes / 1e3:.1f} | {p.ratio:.1f} | {p.steady_ratio:.1f} | {p.verdict} |"
            )
    return "\n".join(out)
