"""The figure of `thinwire bench scratch`: T beside dense's, and loss against bytes per token."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from thinwire.bench.scratch.rows import DENSE, ROWS
from thinwire.bench.scratch.seconds import PUBLISHED_RATIO, Yardstick, seconds_per_step
from thinwire.errors import UsageError

COLOURS = {"dense": "#000000", "direct": "#999999", "rotated": "#0072B2", "fixed": "#CC79A7", "learned": "#D55E00"}

TICKS = (256, 512, 1024, 2048, 4096)  # bytes per token


def draw(document: dict[str, Any], path: str | Path) -> None:
    """Draw `document`, what the command writes as JSON, to `path`."""
    figure = Figure(figsize=(13.0, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    rows = document["rows"]
    base = seconds_per_step(ROWS[DENSE], Yardstick())
    for at, row in enumerate(rows):
        reached = row["time_ratio"] is not None
        least = row["most"] / document["setup"]["steps"] * row["seconds"] / base
        left.barh(
            at, row["time_ratio"] if reached else least, color=_colour(row["row"]), alpha=1.0 if reached else 0.25
        )
        left.text((row["time_ratio"] if reached else least) + 0.01, at, "" if reached else "not reached", va="center")
    left.axvline(PUBLISHED_RATIO, color="#CC79A7", linestyle=":", label="published: fixed subspace")
    left.axvline(0.2, color="#009E73", linestyle="--", label="goal")
    left.set_yticks(range(len(rows)), [row["row"] for row in rows])
    left.invert_yaxis()
    left.set(xlabel="T / T of dense (steps × seconds of the yardstick's step)", title="time to dense's loss")
    left.legend(loc="lower right")
    for row in rows:
        losses = [one for one in row["loss_percent"] if one is not None]
        if losses:
            right.plot(row["bytes_per_token"], statistics.fmean(losses), "o", color=_colour(row["row"]))
            right.annotate(
                row["row"], (row["bytes_per_token"], statistics.fmean(losses)), fontsize=7, xytext=(4, 3),
                textcoords="offset points",
            )  # fmt: skip
    right.set(xscale="log", xlabel="bytes per token, both ways, width 1024", ylabel="held-out loss over dense's, %")
    right.set_xticks(TICKS, [str(tick) for tick in TICKS])
    right.minorticks_off()
    right.set_title("loss after dense's steps")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write {path}: {error}") from None


def _colour(name: str) -> str:
    return COLOURS[name.split()[0]]
