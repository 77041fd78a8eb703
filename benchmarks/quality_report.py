"""What the runs of quality.py say: a row a method with paired differences to dense, as a table and as a figure."""

from __future__ import annotations

import math
import statistics
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from quality_methods import METHODS
from quality_tasks import TASKS

CLOSE = 0.005  # "as good as dense"
# Student's t for a two-sided 95 % interval, by degrees of freedom
T95 = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
# Okabe and Ito's colours, distinguishable without red-green vision; marks repeat the difference
LOOKS = {
    "exact": ("#000000", "s"), "cast": ("#000000", "D"), "Quantized": ("#0072B2", "o"), "OkTopk": ("#D55E00", "v"),
    "Quantized mse": ("#0072B2", "h"),
    "OkTopk warm": ("#E69F00", "^"), "OkTopk int8": ("#F0E442", "^"), "LowRank": ("#009E73", "P"),
    "LowRank warm": ("#009E73", "X"), "torch PowerSGD": ("#CC79A7", "p"), "FrozenAdam": ("#56B4E9", "*"),
    "EF21": ("#999999", "<"), "DIANA": ("#999999", ">"),
}  # fmt: skip
HEAD = "| method | rate | held-out loss | against dense, % | kB a step | × less | after warm-up | within 0.5 % |"
WORST = 0.4  # beyond this a point is drawn at the edge


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

    @property
    def mean(self) -> float:
        return statistics.fmean(self.differences)

    @property
    def interval(self) -> float:
        """Half the 95 % interval of the mean difference."""
        n = len(self.differences)
        if n < 2:
            return math.inf
        return T95[n - 1] * statistics.stdev(self.differences) / math.sqrt(n)

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
        size, steady, whole / size, whole / steady,
    )  # fmt: skip


def markdown(points: Sequence[Point]) -> str:
    out = []
    for task in dict.fromkeys(point.task for point in points):
        out += ["", f"### {TASKS[task].title}", "", HEAD, "|---|---|---|---|---|---|---|---|"]
        for p in (point for point in points if point.task == task):
            spread = "" if p.method == "dense" else f"{100 * p.mean:+.2f} ± {100 * p.interval:.2f}".replace("inf", "?")
            seeds, edge = "" if len(p.losses) > 2 else f" ({len(p.losses)} seeds)", "*" if p.at_edge else ""
            out.append(
                f"| {p.method}{seeds} | {p.rate:g}{edge} | {statistics.fmean(p.losses):.4f} | {spread} "
                f"| {p.bytes / 1e3:.1f} | {p.ratio:.1f} | {p.steady_ratio:.1f} | {p.verdict} |"
            )
    return "\n".join(out)


def figure(points: Sequence[Point], path: Path) -> None:
    """A panel a task: held-out loss relative to dense against bytes, the line of 0.5 %."""
    tasks = list(dict.fromkeys(point.task for point in points))
    drawn = Figure(figsize=(6.4 * len(tasks), 6.4), layout="constrained")
    for task, ax in zip(tasks, drawn.subplots(1, len(tasks), squeeze=False)[0]):
        _panel(ax, [point for point in points if point.task == task])
        ax.set_title(TASKS[task].title, fontsize=11)
    drawn.suptitle("Held-out loss against bytes: 4 ranks, each method at its best rate; bars: 95 %, paired with dense")
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(path, dpi=92)


def _panel(ax: Axes, points: Sequence[Point]) -> None:
    ax.axhspan(-CLOSE * 100, CLOSE * 100, color="#009E73", alpha=0.15, linewidth=0)
    ax.axhline(0, color="#000000", linewidth=0.6)
    for p in points:
        colour, mark = LOOKS[METHODS[p.method].family]
        up = 100 * min(p.mean, WORST)
        bar = 0.0 if p.method == "dense" or p.mean > WORST or math.isinf(p.interval) else 100 * p.interval
        ax.errorbar(
            p.bytes / 1e3, up, yerr=bar, color=colour, marker=mark, markersize=7, markeredgecolor="#333333",
            markeredgewidth=0.5, elinewidth=0.8, linestyle="",
        )  # fmt: skip
        note = f"{_short(p.method)} ({100 * p.mean:+.0f} %)" if p.mean > WORST else _short(p.method)
        ax.annotate(note, (p.bytes / 1e3, up), xytext=(5, 4), textcoords="offset points", fontsize=7.5)
    ax.set_xscale("log")
    ax.set_yscale("symlog", linthresh=1)
    ax.set_xlabel("kB per rank and step, mean over the run (warm-up included)")
    ax.set_ylabel("held-out loss against dense, %; green: within 0.5 %")
    ax.grid(True, color="#dddddd", linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)


def _short(method: str) -> str:
    return (
        method.replace("OkTopk ", "Ok ").replace(" warm", " w").replace("torch PowerSGD", "torch P").replace(" %", "%")
    )
