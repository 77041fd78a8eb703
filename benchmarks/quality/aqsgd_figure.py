"""Held-out loss against simulated time, at several rates: docs/figures/papers-aqsgd.png, from the rows of aqsgd.py.

python benchmarks/quality/aqsgd_figure.py docs/results/aqsgd.jsonl docs/figures/papers-aqsgd.png
python benchmarks/quality/aqsgd_figure.py docs/results/aqsgd.jsonl docs/figures/papers-ends.png wikitext-dp2
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from aqsgd import read
from aqsgd_table import RATES, best_rate, until

Rows = list[dict[str, Any]]
SHOWN = {  # wire: colour, line
    "fp32": ("black", "-"), "bf16": ("grey", "-"), "direct 4/8": ("#d95f02", ":"),
    "AQ-SGD 4/8": ("#1b9e77", "-"), "AQ-SGD 2/4": ("#66c2a5", "--"), "ours 3/3": ("#1f4fb4", "-"),
    "rotated 4/4": ("#7570b3", "--"),
    "end to end, published": ("#1b9e77", "-"), "end to end, ours": ("#1f4fb4", "-"), "Optimus-CC": ("#d95f02", ":"),
}  # fmt: skip


def curve(runs: Rows, rate: float) -> tuple[list[float], list[float]]:
    """(simulated minutes, mean held-out loss over the seeds), wherever it was taken."""
    found = [row.get("curve") or [(n * row["epoch"], loss) for n, loss in enumerate(row["held_out"])] for row in runs]
    times = [until(runs[0], step, rate) / 60 for step, _ in found[0]]
    return times, [statistics.fmean(loss for _, loss in at) for at in zip(*found)]


def draw(rows: Rows, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    best = best_rate(rows)
    runs: dict[str, Rows] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row["seed"]):
        if row["rate"] == best:
            runs[row["wire"]].append(row)
    figure, axes = pyplot.subplots(1, len(RATES), figsize=(3.5 * len(RATES), 3.6), sharey=True, layout="constrained")
    for axis, (name, rate) in zip(axes, RATES.items()):
        for wire, (colour, line) in SHOWN.items():
            if wire in runs:
                times, losses = curve(runs[wire], rate)
                axis.plot(times[1:], losses[1:], line, color=colour, marker="o", markersize=3, label=wire)
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axis.xaxis.set_minor_locator(ticker.NullLocator())
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("simulated minutes")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("held-out loss")
    lines, labels = axes[0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside right center", frameon=False, fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    chosen = sys.argv[3] if len(sys.argv) > 3 else "wikitext"
    draw([row for row in read(Path(sys.argv[1])) if row["task"] == chosen], Path(sys.argv[2]))
