"""The figures of `thinwire convex`: the paper's (Rand-K, natural dithering, all methods) and our own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from thinwire.errors import UsageError
from thinwire.theory.bits import UNITS
from thinwire.theory.checks import by_condition
from thinwire.theory.experiments import NEAR, PLOTTED, Results
from thinwire.theory.simulate import STOP, Trace

# Okabe and Ito's colours, distinguishable without red-green vision; line styles repeat the difference.
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7")
STYLES = ("-", "--", ":")
CYCLE = [*((c, "-") for c in COLOURS), *((COLOURS[i], "--") for i in (0, 6, 2, 3, 4)), (COLOURS[5], ":")]
POINTS = 150  # of a curve: more cannot be seen
ERROR = "‖x − x*‖² / ‖x⁰ − x*‖²"
DPI = 92


def draw(results: Results) -> dict[str, Figure]:
    """One figure per experiment that was run, by name."""
    traces, drawn = results.traces, {}
    if "methods" in traces:
        drawn["methods"] = methods(traces["methods"])
    if "randk" in traces:
        drawn["randk"] = sweep(traces["randk"], "Rand-K with K = q·d on ridge regression")
    if "dither" in traces:
        drawn["dither"] = sweep(traces["dither"], "Natural dithering with s levels on ridge regression")
    if "kappa" in traces:
        drawn["kappa"] = conditions(traces["kappa"])
    if "logistic" in traces:
        drawn["logistic"] = logistic(traces["logistic"])
    if "interpolation" in traces:
        drawn["interpolation"] = interpolation(traces["interpolation"])
    if results.two_stage:
        drawn["two-stage"] = two_stage(results.two_stage)
    return drawn


def save(figure: Figure, path: Path) -> None:
    """Write a figure to `path`; UsageError where that is not possible."""
    try:
        figure.savefig(path, dpi=DPI)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None


def methods(traces: dict[str, Trace]) -> Figure:
    """All methods at K = 0.3·d: error against iterations, and against bits."""
    figure = Figure(figsize=(13, 5.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for i, (label, trace) in enumerate(traces.items()):
        look = dict(zip(("color", "linestyle"), CYCLE[i % len(CYCLE)]))
        _curve(left, trace, label, None, **look)
        _curve(right, trace, label, "paper", **look)
    _axes(left, "iterations", ERROR)
    _axes(right, UNITS["paper"], "")
    right.set_xlim(0, 60)
    left.set_xlim(0, None)
    figure.legend(*left.get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.suptitle("Ridge regression (m = 100, d = 80, n = 10), Rand-K and Top-K with K = 0.3·d, steps of the theory")
    return figure


def sweep(traces: dict[str, Trace], title: str) -> Figure:
    """DIANA (solid) and Rand-DIANA (dashed) at several settings; dotted: DIANA at the smaller step."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    settings = list(dict.fromkeys(label.rsplit(", ", 1)[1] for label in traces))
    for label, trace in traces.items():
        method, setting = label.rsplit(", ", 1)
        colour = COLOURS[(1, 4, 3, 5, 6)[settings.index(setting)]]
        style = {"DIANA": "-", "Rand-DIANA": "--", PLOTTED: ":"}[method]
        for ax in axes[1:] if method == PLOTTED else axes:
            _curve(ax, trace, label, "paper", color=colour, linestyle=style)
    axes[0].set_title("matched steps of the theory", fontsize=11)
    axes[1].set_title("dotted: DIANA at the smaller step γ = 1/(2L_max(1 + 4ω))", fontsize=11)
    _axes(axes[0], UNITS["paper"], ERROR)
    _axes(axes[1], UNITS["paper"], "")
    for ax in axes:
        ax.set_xlim(0, None)
    axes[1].legend(frameon=True, fontsize=9, loc="upper right")
    figure.suptitle(title)
    return figure


def logistic(traces: dict[str, Trace]) -> Figure:
    """One panel per split, error against real bits."""
    splits = list(dict.fromkeys(label.rsplit(", ", 1)[1] for label in traces))
    figure = Figure(figsize=(6 * len(splits), 4.8), layout="constrained")
    panels = figure.subplots(1, len(splits), sharey=True, squeeze=False)[0]
    for split, ax in zip(splits, panels):
        picked = [(la.rsplit(", ", 1)[0], t) for la, t in traces.items() if la.endswith(split)]
        for i, (label, trace) in enumerate(picked):
            _curve(ax, trace, label, "real", color=COLOURS[i], linestyle=STYLES[i % 2])
        ax.set_title(split)
        ax.set_xlim(0, None)
        _axes(ax, UNITS["real"], ERROR if ax is panels[0] else "")
        ax.legend(frameon=True, fontsize=9, loc="upper right")
    figure.suptitle("Logistic regression, breast-cancer data (560 × 30), n = 10, K = 0.3·d")
    return figure


def conditions(traces: dict[str, Trace]) -> Figure:
    """Iterations against κ, with guides of slope 1 and 2."""
    figure = Figure(figsize=(7.5, 4.8), layout="constrained")
    ax = figure.subplots()
    found = by_condition(traces)
    for (method, points), colour, mark in zip(found.items(), COLOURS[4:], "os"):
        ax.plot(*zip(*points), color=colour, marker=mark, label=method)
    kappas = [kappa for kappa, _ in next(iter(found.values()))]
    start = min(points[0][1] for points in found.values())
    for power, style in ((1, "-"), (2, "--")):
        guide = [start * (kappa / kappas[0]) ** power for kappa in kappas]
        ax.plot(kappas, guide, color="#999999", linestyle=style, linewidth=1, label="κ" if power == 1 else "κ²")
    ax.set_xscale("log")
    _axes(ax, "κ = L_max/μ", f"iterations to {NEAR:g}")
    ax.legend(frameon=False)
    ax.set_title("Compressed points (Rand-K, q = 0.3): iterations grow as κ")
    return figure


def interpolation(traces: dict[str, Trace]) -> Figure:
    """DCGD is exact where ∇f_i(x*) = 0, and stalls on ridge regression, where it is not."""
    figure = Figure(figsize=(7.5, 4.8), layout="constrained")
    ax = figure.subplots()
    for i, (label, trace) in enumerate(traces.items()):
        _curve(ax, trace, label, "paper", color=COLOURS[i], linestyle="--" if "ridge" in label else "-")
    _axes(ax, UNITS["paper"], "squared distance to the solutions, relative")
    ax.set_xlim(0, None)
    ax.legend(frameon=True, fontsize=9)
    ax.set_title("More parameters (80) than samples (60): plain DCGD with Rand-K is exact")
    return figure


def two_stage(curves: dict[str, dict[int, list[float]]]) -> Figure:
    """Mean ‖∇f‖² against the horizon T, with a guide of slope −½."""
    figure = Figure(figsize=(7.5, 4.8), layout="constrained")
    ax = figure.subplots()
    looks = {
        "exact": ("#000000", "o", "-"), "direct": ("#D55E00", "s", "--"), "delta": ("#0072B2", "x", ":"),
        "delta, ω < ½": ("#009E73", "+", "-."),
    }  # fmt: skip
    for name, curve in curves.items():
        colour, mark, style = looks[name]
        horizons = sorted(curve)
        means = [sum(curve[t]) / len(curve[t]) for t in horizons]
        ax.plot(horizons, means, color=colour, marker=mark, linestyle=style, label=name)
    first = horizons[0]
    start = 0.6 * sum(curves["exact"][first]) / len(curves["exact"][first])
    guide = [start * (first / t) ** 0.5 for t in horizons]
    ax.plot(horizons, guide, color="#999999", linewidth=1, label="slope −½")
    ax.set_xscale("log")
    _axes(ax, "T (steps; γ ∝ 1/√T)", "mean of ‖∇f‖² over the T steps")
    ax.legend(frameon=False)
    ax.set_title("Two stages, ternary activations: delta keeps the slope, direct stalls")
    return figure


def _curve(ax: Axes, trace: Trace, label: str, unit: str | None, **look: Any) -> None:
    """The first seed's curve down to STOP, thinned."""
    across: Sequence[float] = trace.steps if unit is None else [row[0] / 1e6 for row in trace.bits(unit)]
    last = trace.reached(STOP)[0]
    shown = slice(0, None if last is None else last + 1, max(1, (last or len(trace.steps)) // POINTS))
    ax.plot(across[shown], [row[0] for row in trace.error[shown]], label=label, linewidth=1.6, **look)


def _axes(ax: Axes, across: str, up: str) -> None:
    ax.set_yscale("log")
    ax.set_xlabel(across)
    ax.set_ylabel(up)
    ax.grid(True, color="#dddddd", linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)
