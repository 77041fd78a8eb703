"""The figure of `thinwire bench scratch`: T beside dense's, and loss against bytes per token."""

from __future__ import annotations

import re
import statistics
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from thinwire.bench.scratch.rows import DENSE, ROWS
from thinwire.bench.scratch.seconds import PUBLISHED_RATIO, Yardstick, seconds_per_step
from thinwire.errors import UsageError
from thinwire.quantities import half_interval

COLOURS = {
    "dense": "#000000", "fp32": "#000000", "direct": "#BBBBBB", "rotated": "#999999", "fixed": "#CC79A7",
    "learned": "#D55E00", "tokens": "#D55E00", "basis": "#E69F00", "ideal": "#56B4E9", "bf16": "#009E73",
    "half": "#0072B2", "a": "#CC79A7",
}  # fmt: skip

NEAR = (3.0, 0.4)  # how far apart two points are whose names do not meet: times in bytes, in % of loss
TICKS = (256, 512, 1024, 2048, 4096)  # bytes per token
MANY_TICKS = (128, *TICKS, 8192)
SHARES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2)  # of dense's T
FAMILIES = {  # of rows with --formulas
    "bf16, fp32": r"dense bf16|fp32", "direct": r"direct [\d.]+ bits", "rotated": r"rotated (8 bits|\d bits mse)",
    "tokens + basis, every 10": r"tokens \+ basis ([\d.]+) back \1 every 10",
    "tokens both ways, through": r"tokens both ways \+ normal ([\d.]+) back \1 through",
    "half of it, tables": r"(tokens both ways \+ normal ([\d.]+) back \2 through|bf16) of 0.5",
    "a third of it, tables": r"(tokens both ways \+ normal ([\d.]+) back \2 through|bf16) of 0.3333",
}  # fmt: skip


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
    _scatter(right, rows)
    right.set(xscale="log", xlabel="bytes per token, both ways, width 1024", ylabel="held-out loss over dense's, %")
    right.set_xticks(TICKS, [str(tick) for tick in TICKS])
    right.minorticks_off()
    right.set_title("loss after dense's steps")
    _save(figure, path)


def draw_lengths(document: dict[str, Any], path: str | Path) -> None:
    """Draw `document`, what the command writes with --formulas, to `path`: T beside dense's at the same loss, and the
    last loss of runs as long as dense's against bytes per token, with 95 % intervals."""
    figure = Figure(figsize=(13.0, 6.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    rows = document["rows"]
    bars = sorted((row for row in rows if row["time_ratio"] is not None), key=lambda row: row["time_ratio"])
    for at, row in enumerate(bars):
        left.barh(at, row["time_ratio"], color=_colour(row["row"]))
        left.text(row["time_ratio"] * 1.02, at, f"{row['time_ratio']:.2f}", va="center", fontsize=8)
    left.axvline(PUBLISHED_RATIO, color="#CC79A7", linestyle=":", label="published: fixed subspace")
    left.axvline(0.2, color="#009E73", linestyle="--", label="goal")
    left.set_yticks(range(len(bars)), [row["row"] for row in bars], fontsize=8)
    left.invert_yaxis()
    left.set(xscale="log", xlabel="T / T of dense (steps × seconds of the yardstick's step)", title="at the same loss")
    left.set_xlim(left=SHARES[0])
    left.set_xticks(SHARES, [str(share) for share in SHARES])
    left.minorticks_off()
    left.legend(loc="upper right")
    _lines(right, rows)
    right.axhline(2, color="#009E73", linestyle="--", label="2 %")
    right.axvline(4096 / 16, color="#009E73", linestyle=":", label="16 times below bf16")
    right.legend(fontsize=8)
    right.set(xscale="log", xlabel="bytes per token, both ways, width 1024", ylabel="held-out loss over dense's, %")
    right.set_xticks(MANY_TICKS, [str(tick) for tick in MANY_TICKS])
    right.minorticks_off()
    right.set_title("loss after dense's steps")
    _save(figure, path)


def _lines(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Loss against bytes per token: a line per family of codes whose bits are the same both ways, and other rows."""
    families: dict[str, list[tuple[float, float, float | None]]] = {}
    for row in rows:
        percent = list(row["percent"].get("1.0", {}).values())
        if percent:
            family = next((name for name, kind in FAMILIES.items() if re.fullmatch(kind, row["row"])), row["row"])
            point = row["bytes_per_token"], statistics.fmean(percent), half_interval(percent)
            families.setdefault(family, []).append(point)
    for family, points in families.items():
        x, y, intervals = zip(*sorted(points))
        about = [one or 0.0 for one in intervals]  # none of fewer than two seeds
        known = family in FAMILIES
        look = {"fmt": "o-"} if known else {"fmt": "x"}
        axes.errorbar(x, y, about, color=_colour(family), capsize=3, label=family if known else None, **look)
        if not known:
            axes.annotate(family, (x[0], y[0]), fontsize=7, xytext=(5, 3), textcoords="offset points")


def _save(figure: Figure, path: str | Path) -> None:
    for axes in figure.axes:
        axes.grid(alpha=0.3)
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write {path}: {error}") from None


def _scatter(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Loss against bytes per token; of two names on one line that would meet the right one stands below its point."""
    points = [(row, [one for one in row["loss_percent"] if one is not None]) for row in rows]
    before: tuple[float, float] | None = None
    for row, losses in sorted(points, key=lambda point: point[0]["bytes_per_token"]):
        if not losses:
            continue
        x, y = row["bytes_per_token"], statistics.fmean(losses)
        meets = before is not None and x < NEAR[0] * before[0] and abs(y - before[1]) < NEAR[1]
        last = x > TICKS[-1] / 2
        axes.plot(x, y, "o", color=_colour(row["row"]))
        axes.annotate(
            row["row"], (x, y), fontsize=7, xytext=(-4 if last else 4, -10 if meets else 3),
            textcoords="offset points", ha="right" if last else "left",
        )  # fmt: skip
        before = x, y


def _colour(name: str) -> str:
    return COLOURS[name.split()[0].rstrip(",")]
