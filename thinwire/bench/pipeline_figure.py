"""The figure of `thinwire bench pipeline`: loss against time, step time against rate, speed-up against epochs."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from thinwire.bench.pipeline_modes import MODES
from thinwire.errors import UsageError
from thinwire.quantities import show_rate

EPOCHS = (1, 2, 3, 5, 10)
STATELESS = "rotated 4/4"  # what a break-even is counted against
COLOURS = ("#000000", "#999999", "#CC79A7", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#7B3294")
DASHES = {"GPipe": "--", "our stage": ":"}  # a variant has its family's colour


def draw(result: dict[str, Any], path: str | Path) -> None:
    """Draw `result`, the document of `thinwire bench pipeline`, to `path`."""
    figure = Figure(figsize=(17.0, 6.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    names = [n for n in dict.fromkeys(row["mode"] for row in result["time"]) if not MODES[n].ablation]
    families = list(dict.fromkeys(name.partition(", ")[0] for name in names))
    style = {name: _style(name, families) for name in names}
    rates = sorted({row["rate"] for row in result["time"] if row["rate"] is not None})
    if rates and result["loss"]:
        _loss_against_time(left, result, names, style, rates[0])
    _time_against_rate(middle, result, names, style)
    if rates:
        _speed_up(right, result, names, style, rates[0])
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3)
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write {path}: {error}") from None


def _style(name: str, families: list[str]) -> dict[str, Any]:
    family, _, variant = name.partition(", ")
    return {"color": COLOURS[families.index(family) % len(COLOURS)], "linestyle": DASHES.get(variant, "-")}


def seconds(result: dict[str, Any], name: str, rate: float, epochs: int) -> float | None:
    """Of a run of `epochs` in mode `name` at `rate`: the first epoch's steps are cold, the others' warm. None: `result`
    has no such row."""
    row = next((r for r in result["time"] if r["mode"] == name and r["rate"] == rate), None)
    if row is None:
        return None
    setup = result["setup"]
    steps = setup["samples"] // (setup["rows"] * setup["microbatches"])
    return steps * (row["cold"] + (epochs - 1) * row["warm"])


def overtakes(result: dict[str, Any], name: str, rate: float) -> str:
    """After how many epochs at `rate` the mode `name`, if it has a memory, has made up for its cold epoch, against
    STATELESS; "" where `result` does not say."""
    rows = {row["mode"]: row for row in result["time"] if row["rate"] == rate}
    rival = rows.get(STATELESS)
    if name not in rows or not MODES[name].per_sample or rival is None:
        return ""
    mine = rows[name]
    if mine["cold"] <= rival["warm"]:
        return " (ahead at once)"
    if mine["warm"] >= rival["warm"]:
        return " (never ahead)"
    epochs = (mine["cold"] - mine["warm"]) / (rival["warm"] - mine["warm"])
    return f" (ahead after {epochs:.1f})"


def _loss_against_time(axes: Axes, result: dict[str, Any], names: list[str], style: Any, rate: float) -> None:
    timed = [name for name in names if seconds(result, name, rate, 1) is not None]
    seeds = [{row["seed"] for row in result["loss"] if row["mode"] == name} for name in timed]
    common = set.intersection(*(s for s in seeds if s))  # other seeds start from other weights
    for name in timed:
        runs = [row["losses"] for row in result["loss"] if row["mode"] == name and row["seed"] in common]
        if runs:
            losses = [statistics.fmean(at) for at in zip(*runs)][1:]
            times = [seconds(result, name, rate, e + 1) or 0.0 for e in range(len(losses))]
            axes.plot(times, losses, marker="o", markersize=3, **style[name], label=name)
    axes.set(
        xlabel=f"seconds at {show_rate(rate)}", ylabel="held-out loss", xscale="log",
        title=f"loss after each epoch ({len(common)} seed{'s' * (len(common) > 1)})",
    )  # fmt: skip


def _time_against_rate(axes: Axes, result: dict[str, Any], names: list[str], style: Any) -> None:
    for name in names:
        rows = sorted((r["rate"], r["warm"]) for r in result["time"] if r["mode"] == name and r["rate"])
        if rows:
            axes.plot(*zip(*[(rate / 1e6, s) for rate, s in rows]), marker="o", **style[name], label=name)
    axes.set(xlabel="Mbit/s", ylabel="seconds per warm step", xscale="log", yscale="log", title="steady state")


def _speed_up(axes: Axes, result: dict[str, Any], names: list[str], style: Any, rate: float) -> None:
    for name in names:
        points = []
        for epochs in EPOCHS:
            mine, base = seconds(result, name, rate, epochs), seconds(result, "fp32", rate, epochs)
            if mine and base:
                points.append((epochs, base / mine))
        if points:
            axes.plot(*zip(*points), marker="o", **style[name], label=name + overtakes(result, name, rate))
    axes.axhline(1.0, color="#888888", linewidth=1)
    axes.set(
        xlabel=f"epochs, the first one cold (in brackets: when ahead of {STATELESS})", ylabel="speed-up over fp32",
        title=f"whole run at {show_rate(rate)}", xscale="log", yscale="log",
    )  # fmt: skip
    axes.set_xticks(EPOCHS, [str(e) for e in EPOCHS])
