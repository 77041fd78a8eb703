"""The figure of section `quality`: python benchmarks/card/gpu_figure.py docs/gpu.json docs/figures/gpu-quality.png"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

RATE = 1e8  # bit/s, for the second panel
LINEAR = 0.1  # % around fp32 that the axis shows evenly; beyond it is logarithmic
SAME = 0.03  # % from fp32 within which lines lie on its own
LOOK = {
    "fp32": ("black", "-", "s"), "bf16": ("grey", "--", "D"), "direct 2/4": ("tab:red", ":", "o"),
    "direct 3/6": ("tab:orange", ":", "o"), "direct 4/8": ("tab:olive", ":", "o"), "AQ 2/4": ("tab:red", "-", "^"),
    "AQ 3/6": ("tab:orange", "-", "^"), "AQ 4/8": ("tab:olive", "-", "^"), "ours 3/3": ("tab:blue", "-", "*"),
}  # fmt: skip


def draw(section: Mapping[str, Any], path: str | Path) -> None:
    """Draw `section`, the rows of gpu_quality.py, to `path`: held-out loss above that of fp32 by step, and at the end
    by the time that one boundary's frames take on a slow link."""
    rows = {name: [row for row in section["rows"] if row["method"] == name] for name in LOOK}
    exact = _mean(rows["fp32"])
    above = {
        name: [100 * (mine / base - 1) for mine, base in zip(_mean(mine_rows), exact)]
        for name, mine_rows in rows.items()
    }
    figure = Figure(figsize=(12, 5.0), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    last = rows["fp32"][0]["steps"]
    for name, (colour, line, mark) in LOOK.items():
        steps = [last * i / (len(exact) - 1) for i in range(len(exact))]
        minutes = rows[name][0]["bytes"][-1] * 8 / RATE / 60
        left.plot(steps[1:], above[name][1:], line, color=colour, zorder=3 if name == "fp32" else 2)
        right.plot(minutes, above[name][-1], mark, color=colour, markersize=12 if mark == "*" else 8)
        away, side = _beside(name)
        words = f"{name}, {minutes:.1f} min"
        right.annotate(words, (minutes, above[name][-1]), away, textcoords="offset points", ha=side, fontsize=9)
    _axes(left, "step", "held-out loss above that of fp32, mean of three seeds")
    _axes(right, "minutes that one boundary's bytes take at 100 Mbit/s", "")
    right.set_xscale("log")
    right.set_xticks([2, 3, 5, 10, 20], ["2", "3", "5", "10", "20"])
    right.minorticks_off()
    right.set_xlim(1.4, 24)
    left.set_xlim(0, 1.27 * last)
    _name_lines(left, last, {name: values[-1] for name, values in above.items()})
    figure.savefig(path, dpi=130)


def _mean(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Over seeds, at each evaluation."""
    return [sum(losses) / len(losses) for losses in zip(*(row["held_out"] for row in rows))]


def _beside(name: str) -> tuple[tuple[float, float], str]:
    """Where a point's name stands, in points from it, and which side of the name is there."""
    places = {"fp32": ((8, 10), "right"), "AQ 3/6": ((0, -18), "center"), "bf16": ((0, 10), "center")}
    return places.get(name, ((10, -3), "left"))


def _axes(axes: Axes, across: str, up: str) -> None:
    axes.set_yscale("symlog", linthresh=LINEAR, linscale=0.5)
    ticks = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
    axes.set_yticks(ticks, ["fp32", *(f"+{tick:g} %" for tick in ticks[1:])])
    axes.set_ylim(-0.15, 300)
    axes.set(xlabel=across, ylabel=up)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _name_lines(axes: Axes, last: int, ends: Mapping[str, float]) -> None:
    """Names at the ends of the lines; those that cannot be told from fp32 have one name together."""
    same = [name for name in ends if name != "fp32" and abs(ends[name]) < SAME]
    axes.text(1.02 * last, 0, "fp32, and on it\n" + "\n".join(same), va="center", fontsize=9)
    for name, end in ends.items():
        if name != "fp32" and name not in same:
            axes.text(1.02 * last, end, name, va="center", color=LOOK[name][0], fontsize=9)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text())["quality"], sys.argv[2])
