"""Figure and tables of lazy_error.py."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from thinwire.quantities import half_interval

COLOURS = {"3 bits": "C0", "rank 16": "C1"}
MARKS = {30: "o", 300: "s", 3000: "^"}


def ratio(row: dict[str, Any], kind: str = "lazy") -> float:
    """Error energy of the gradients below, over that of messages compressed alone."""
    return (row[kind]["error"] / row["alone"]["error"]) ** 2


def draw(rows: list[dict[str, Any]], path: str) -> None:
    points = [row for row in rows if row["part"] == "gradient"]
    show(rows, points)
    figure, axes = plt.subplots(1, 3, figsize=(14, 4.4))
    for axis, name in zip(axes[:2], ("share", "trial")):
        for row in points:
            mark = MARKS.get(row["trained"], "x")
            axis.plot(row[name], ratio(row), mark, color=COLOURS[row["codec"]], alpha=0.75, ms=6, mec="none")
        axis.axhline(1, color="0.4", lw=0.8)
        axis.set_yscale("log")
        axis.grid(alpha=0.2)
        axis.set_ylabel("error energy of gradients, lazy / alone")
    axes[0].axvline(0.5, color="0.4", lw=0.8, ls="--")
    axes[0].set_xlabel("share of the mean activation")
    axes[0].set_title("activations alone do not tell (rule: on above ½)")
    axes[1].set_xscale("log")
    axes[1].axvline(1, color="0.4", lw=0.8, ls="--")
    axes[1].set_xlabel("the same ratio for aᵀg at the boundary")
    axes[1].set_title("a trial at the boundary does (on below 1)")
    for codec, colour in COLOURS.items():
        axes[1].plot([], [], "s", color=colour, label=codec)
    for trained, mark in MARKS.items():
        axes[1].plot([], [], mark, color="0.4", label=f"{trained} steps trained")
    axes[1].legend(frameon=False, fontsize=8, loc="lower right")
    _bars(axes[2], rows)
    figure.tight_layout()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def excess(rows: list[dict[str, Any]], when: str, codec: str, kind: str) -> list[float]:
    """Held-out loss over the exact run's of the same seed, in per cent."""
    runs = [r for r in rows if r["part"] == "loss" and r["when"] == when]
    found = {(r["codec"], r["kind"], r["seed"]): r["held_out"] for r in runs}
    seeds = [s for c, k, s in found if (c, k) == (codec, kind)]
    return [100 * (found[codec, kind, s] / found["", "exact", s] - 1) for s in sorted(seeds)]


def _bars(axis: Any, rows: list[dict[str, Any]]) -> None:
    kinds = [kind for kind in ("alone", "lazy", "auto", "centered") if excess(rows, "early", "3 bits", kind)]
    groups = [(when, codec) for when in ("early", "fine-tuned") for codec in COLOURS]
    for i, kind in enumerate(kinds):
        for j, (when, codec) in enumerate(groups):
            each = excess(rows, when, codec, kind)
            if each:
                axis.bar(j + 0.2 * (i - 1.5), statistics.fmean(each), 0.19, color=f"C{i + 2}",
                         label=kind if j == 0 else None)  # fmt: skip
                axis.plot([j + 0.2 * (i - 1.5)] * len(each), each, ".", color="k", ms=4)
    axis.set_yscale("symlog", linthresh=1)
    axis.set_yticks([-1, 0, 0.5, 1, 2, 5, 10, 20], ["−1", "0", "0.5", "1", "2", "5", "10", "20"])
    axis.axhline(0, color="0.4", lw=0.8)
    axis.set_xticks(range(len(groups)), [f"{codec}\n{when}" for when, codec in groups])
    axis.set_ylabel("held-out loss over exact, %")
    axis.set_title("25 M parameters, 128 steps, seeds as dots")
    axis.legend(frameon=False, fontsize=8)
    axis.grid(alpha=0.2, axis="y")


def show(rows: list[dict[str, Any]], points: list[dict[str, Any]]) -> None:
    print("model, trained, tokens, micro-batches, codec | alone | lazy | centered: error, bias, cosine | energy ratios")
    for r in points:
        cells = " | ".join("{error:.3f} {bias:.2f} {cosine:.3f}".format(**r[k]) for k in ("alone", "lazy", "centered"))
        more = "ν {nu:.1f} κ {kappa:.1f}".format(**r) if "nu" in r else ""
        print("{model} {trained} {tokens} {microbatches} {codec}".format(**r), "|", cells, "| lazy", f"{ratio(r):.2f}",
              f"centered {ratio(r, 'centered'):.2f} trial {r['trial']:.2f} share {r['share']:.2f}", more)  # fmt: skip
    for name, says in (("share > ½", lambda r: r["share"] > 0.5), ("trial < 1", lambda r: r["trial"] < 1)):
        right = [says(r) == (ratio(r) < 1) for r in points]
        lost = [(max(ratio(r), 1 / ratio(r)), r) for r, ok in zip(points, right) if not ok]
        print(f"{name}: right in {sum(right)} of {len(right)}; worst miss", max((x for x, _ in lost), default=1.0))
    for when in ("early", "fine-tuned"):
        for codec in COLOURS:
            for kind in ("alone", "lazy", "auto", "centered"):
                each = excess(rows, when, codec, kind)
                if each:
                    half = half_interval(each) or 0.0
                    print(f"{when} {codec} {kind}: {statistics.fmean(each):+.2f} ± {half:.2f}", each)
