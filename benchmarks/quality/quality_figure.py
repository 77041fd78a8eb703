"""The figure of quality.py: one panel per task, in it one line per method, sorted by how much it sends.

    python benchmarks/quality/quality_figure.py docs/quality.md docs/figures/quality-frontier.png

draws the tables of the page again.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from quality_methods import METHODS
from quality_report import CLOSE, Point
from quality_tasks import TASKS

# Okabe and Ito's colours, distinguishable without red-green vision; marks repeat the difference
LOOKS = {
    "exact": ("#000000", "s"), "cast": ("#000000", "D"), "Quantized": ("#0072B2", "o"), "OkTopk": ("#D55E00", "v"),
    "Quantized mse": ("#0072B2", "h"),
    "OkTopk warm": ("#E69F00", "^"), "OkTopk int8": ("#F0E442", "^"), "LowRank": ("#009E73", "P"),
    "LowRank warm": ("#009E73", "X"), "torch PowerSGD": ("#CC79A7", "p"), "FrozenAdam": ("#56B4E9", "*"),
    "EF21": ("#999999", "<"), "DIANA": ("#999999", ">"),
}  # fmt: skip
TICKS = (-10, -3, -1, 0, 1, 3, 10, 30)  # % of dense's loss
FEW_TICKS = (-10, -1, 0, 1, 10, 100)  # where the panel reaches further
ROW = re.compile(
    r"\| (?P<method>[^|†‡(]+?)[†‡]?(?: \(seeds: \d\))? \|[^|]*\|[^|]*\| (?P<mean>[-−+\d.]+) ± (?P<half>[\d.]+|\?) "
    r"\|[^|]*\| (?P<ratio>[\d.]+) \|"
)


@dataclass(frozen=True)
class Bar:
    """One method on one task: its mean loss above dense's and half the 95 % interval, in %, and dense's bytes over its
    own. `half` is None where too few seeds were run."""

    task: str  # its title
    method: str
    mean: float
    half: float | None
    ratio: float


def bars_of_points(points: Sequence[Point]) -> list[Bar]:
    """What the figure shows of `points`."""
    compressed = [p for p in points if p.method != "dense"]
    halves = [None if math.isinf(p.interval) else 100 * p.interval for p in compressed]
    return [
        Bar(TASKS[p.task].title, p.method, 100 * p.mean, half, p.ratio) for p, half in zip(compressed, halves)
    ]  # fmt: skip


def bars_of_page(text: str) -> list[Bar]:
    """What stands in the tables of `text`, a page with the output of `quality_report.markdown`."""
    bars = []
    for part in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        title = part.splitlines()[0]
        for row in ROW.finditer(part):
            half = None if row["half"] == "?" else float(row["half"])
            bars.append(Bar(title, row["method"], float(row["mean"].replace("−", "-")), half, float(row["ratio"])))
    return bars


def figure(bars: Sequence[Bar], path: Path) -> None:
    """Draw `bars` to `path`: held-out loss relative to dense, the methods that send least at the bottom."""
    tasks = list(dict.fromkeys(bar.task for bar in bars))
    lines = max(sum(bar.task == task for bar in bars) for task in tasks)
    drawn = Figure(figsize=(5.6 * len(tasks), 1.5 + 0.24 * lines), layout="constrained")
    for task, axes in zip(tasks, drawn.subplots(1, len(tasks), squeeze=False)[0]):
        _panel(axes, sorted((bar for bar in bars if bar.task == task), key=lambda bar: bar.ratio))
        axes.set_title(task, fontsize=11, loc="left")
    drawn.supxlabel(
        "held-out loss above that of dense; green: within 0.5 %; line: 95 % interval, cut at the edge; pale: too few "
        "seeds for one. ×: fewer bytes than dense",
        fontsize=10,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(path, dpi=110)


def _panel(axes: Axes, bars: Sequence[Bar]) -> None:
    axes.axvspan(-100 * CLOSE, 100 * CLOSE, color="#009E73", alpha=0.15, linewidth=0)
    axes.axvline(0, color="#000000", linewidth=0.8)
    for place, bar in enumerate(bars):
        colour, mark = LOOKS[METHODS[bar.method].family]
        pale = 0.45 if bar.half is None else 1.0
        axes.plot(bar.mean, place, mark, color=colour, markersize=7, markeredgecolor="#333333", alpha=pale)
        if bar.half is not None:
            axes.plot([bar.mean - bar.half, bar.mean + bar.half], [place, place], color=colour, linewidth=1.4, zorder=1)
    means = [bar.mean for bar in bars]
    low, high = 1.5 * min(-1.5, *means), 1.5 * max(1.5, *means)
    axes.set_xscale("symlog", linthresh=1, linscale=0.8)
    axes.set_xlim(low, high)
    ticks = [tick for tick in (TICKS if high < 50 else FEW_TICKS) if low < tick < high]
    axes.set_xticks(ticks, [f"{tick:+d} %" if tick else "dense" for tick in ticks])
    axes.set_yticks(range(len(bars)), [f"{bar.method}   {bar.ratio:.1f}×" for bar in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)


if __name__ == "__main__":
    figure(bars_of_page(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
