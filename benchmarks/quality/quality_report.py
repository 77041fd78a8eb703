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
DPI = 92


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
        size, steady, whole / size, whole / steady, any(a.get("torch") != b.get("torch") for a, b in zip(mine, dense)),
    )  # fmt: skip


def markdown(points: Sequence[Point]) -> str:
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


def figure(points: Sequence[Point], path: Path) -> None:
    """A panel a task: held-out loss relative to dense against bytes, the line of 0.5 %."""
    tasks = list(dict.fromkeys(point.task for point in points))
    drawn = Figure(figsize=(6.4 * len(tasks), 6.8), layout="constrained", dpi=DPI)
    panels = dict(zip(tasks, drawn.subplots(1, len(tasks), squeeze=False)[0]))
    for task, ax in panels.items():
        _panel(ax, [point for point in points if point.task == task])
        ax.set_title(TASKS[task].title, fontsize=11)
    drawn.suptitle(
        "Held-out loss against bytes: 4 ranks, each method at its best rate; bars: 95 %, paired with dense; "
        "w: exact for the first tenth of the steps; pale: one or two seeds"
    )
    drawn.draw_without_rendering()  # places are known now
    for task, ax in panels.items():
        _label(ax, [point for point in points if point.task == task])
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(path, dpi=DPI)


def _panel(ax: Axes, points: Sequence[Point]) -> None:
    ax.axhspan(-CLOSE * 100, CLOSE * 100, color="#009E73", alpha=0.15, linewidth=0)
    ax.axhline(0, color="#000000", linewidth=0.6)
    for p in points:
        colour, mark = LOOKS[METHODS[p.method].family]
        bar = 0.0 if p.method == "dense" or math.isinf(p.interval) else 100 * p.interval
        ax.errorbar(
            p.bytes / 1e3, 100 * p.mean, yerr=bar, color=colour, marker=mark, markersize=7, markeredgecolor="#333333",
            markeredgewidth=0.5, elinewidth=0.8, linestyle="", alpha=1 if len(p.losses) > 2 else 0.5,
        )  # fmt: skip
    ax.set_xscale("log")
    ax.set_yscale("symlog", linthresh=1, linscale=0.6)
    worst = max(1.2, *(100 * abs(p.mean) for p in points))
    ticks = [t for t in (-30, -10, -3, -1, 0, 1, 3, 10, 30, 100, 300) if -worst < t < 2 * worst]
    ax.set_yticks(ticks, [f"{t:+d} %" if t else "dense" for t in ticks])
    ax.set_ylim(1.5 * min(-1.0, *(100 * p.mean for p in points)), 1.5 * worst)
    ax.set_xlim(0.8 * min(p.bytes for p in points) / 1e3, 2.2 * max(p.bytes for p in points) / 1e3)
    ax.set_xlabel("kB per rank and step, mean over the run (warm-up included)")
    ax.set_ylabel("held-out loss against dense; green: within 0.5 %")
    ax.grid(True, color="#dddddd", linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)


def _label(ax: Axes, points: Sequence[Point]) -> None:
    """Names beside the points, each in the first of a few places where nothing else stands."""
    at = {p.method: ax.transData.transform((p.bytes / 1e3, 100 * p.mean)) for p in points}
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in at.values()]
    scale = 100 / 72 * DPI / 100  # pixels a point
    for method, (x, y) in sorted(at.items(), key=lambda item: -item[1][1]):
        name = _short(method)
        width, height = 4.1 * len(name) * scale, 8 * scale
        places = [(dx, dy) for dy in (3, -9, 11, -17, 19, -25, 27, -33) for dx in (6, -6 - width / scale)]
        boxes = [(x + dx * scale, y + dy * scale) for dx, dy in places]
        free = [
            i for i, (a, b) in enumerate(boxes)
            if not any(a < r and a + width > left and b < top and b + height > low for left, low, r, top in taken)
            and ax.bbox.x0 < a and a + width < ax.bbox.x1 + 40
        ]  # fmt: skip
        chosen = free[0] if free else 0
        a, b = boxes[chosen]
        taken.append((a, b, a + width, b + height))
        pixels = {"xycoords": "figure pixels", "textcoords": "figure pixels"}
        ax.annotate(name, (x, y), (a, b), fontsize=7.5, **pixels).set_in_layout(False)


def _short(method: str) -> str:
    return (
        method.replace("OkTopk ", "Ok ").replace(" warm", " w").replace("torch PowerSGD", "torch P").replace(" %", "%")
    )
