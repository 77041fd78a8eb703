"""The figure of `thinwire bench allreduce`: seconds, and words per k, against the number of hosts.

Dots are measured; faint lines are the closed forms, a model without computing time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from thinwire.errors import UsageError

COLOURS = {
    "dense": "#000000", "fp16": "#999999", "Quantized": "#CC79A7", "LowRank": "#F0E442",
    "TopkAllgather": "#E69F00", "TopkDSA": "#56B4E9", "GTopk": "#009E73", "OkTopk": "#D55E00",
}  # fmt: skip
BOUND = "bound of Ok-Topk's paper: 6(P−1)/P"
DASHES = {"fp32+int32": "-", "fp32+coded": "--", "int8+coded": ":"}


def draw(rows: list[dict[str, Any]], model: dict[str, list[dict[str, float]]], path: str | Path, title: str) -> None:
    """Draw the measured `rows` and the closed forms in `model` (points by collective) to `path`, under `title`."""
    figure = Figure(figsize=(13.0, 6.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    sparse = [row for row in rows if row["sparse"]]
    modelled = [{"collective": name, **point} for name, points in model.items() for point in points]
    _lines(left, rows, "seconds")
    _lines(left, modelled, "seconds", model=True)
    left.set(xlabel="hosts", ylabel="seconds per exchange", yscale="log")
    _lines(right, sparse, "words_per_k")
    names = {row["collective"] for row in sparse}
    _lines(right, [row for row in modelled if row["collective"] in names], "words_per_k", model=True)
    hosts = sorted({row["hosts"] for row in [*rows, *modelled]})
    right.plot(hosts, [6 * (p - 1) / p for p in hosts], color="#888888", linewidth=4, alpha=0.4, label=BOUND)
    right.set(xlabel="hosts", ylabel="payload words per rank and k, mean over ranks", yscale="log")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(hosts, [str(p) for p in hosts])
        axes.grid(alpha=0.3)
    _plain_numbers(right)
    figure.suptitle(title)
    entries = {label: handle for axes in (left, right) for handle, label in zip(*axes.get_legend_handles_labels())}
    figure.legend(list(entries.values()), list(entries), loc="outside lower center", ncols=4, fontsize=8)
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write {path}: {error}") from None


def _plain_numbers(axes: Axes) -> None:
    """2, 3, 5 instead of powers of ten, which a short axis has at most one of."""
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _lines(axes: Axes, rows: list[dict[str, Any]], value: str, model: bool = False) -> None:
    for name in dict.fromkeys(row["collective"] for row in rows):
        mine = [row for row in rows if row["collective"] == name]
        colour = next(c for start, c in COLOURS.items() if name.startswith(start))
        dash = next((d for coding, d in DASHES.items() if name.endswith(coding)), "-")
        style: dict[str, Any] = {"alpha": 0.35, "lw": 0.9} if model else {"marker": "o", "label": name}
        axes.plot([r["hosts"] for r in mine], [r[value] for r in mine], dash, color=colour, **style)
    if model:
        axes.plot([], [], color="#888888", alpha=0.35, lw=0.9, label="closed form, in the collective's colour")
