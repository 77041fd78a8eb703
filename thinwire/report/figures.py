"""The report's figures: one function each, every run in the same colour throughout.

Each takes the `runs` to draw, and the `summary` of their numbers; None: they have nothing to draw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, median
from threading import Lock
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

from thinwire.planner.figures import COLOURS, LINES, MARKS
from thinwire.quantities import show_bytes
from thinwire.report.runs import CHANNELS, Point, Run, reached
from thinwire.report.summary import Summary

KINDS = ("forward", "backward", "gradient, embedding", "codec", "weight backward")
SHADES = dict(zip(CHANNELS, (COLOURS[kind] for kind in KINDS)))
RUNS = tuple(LINES[i] for i in (0, 6, 3, 2, 5, 4, 7, 1))  # the first run in black, the second in vermilion
SIZE = (6.6, 4.0)  # inches
STYLES = ("-", "--", "-.", ":")  # repeat the difference between runs for those who see no colours
DECADES = 50  # a logarithmic axis shorter than this ratio gets labels in between
SMOOTH = 40  # points that a noisy series keeps
THIN = 0.6  # width of a line through every step, where a smoothed one is drawn over it

DRAWING = Lock()  # matplotlib draws for one thread at a time, and a live page draws beside the report
Pick = Callable[[Run], list[Point]]
Draw = Callable[[Sequence[Run], Summary], Figure | None]


def loss_time(runs: Sequence[Run], summary: Summary) -> Figure | None:
    """Held-out loss against training time; rings where each run reaches the loss that all reach."""
    return _held_out(runs, summary, "seconds", "training time in seconds, without evaluation and checkpoints")


def loss_bytes(runs: Sequence[Run], summary: Summary) -> Figure | None:
    """The same against bytes sent, on a logarithmic axis."""
    figure = _held_out(runs, summary, "bytes", "bytes sent by all ranks together, logarithmic")
    if figure is not None:
        axes = figure.axes[0]
        axes.set_xscale("log")
        _label_bytes(axes)
    return figure


def _label_bytes(axes: Axes) -> None:
    """Of a logarithmic axis: powers of ten alone would leave one label, or none, where it is short."""
    low, high = axes.get_xlim()
    if high < DECADES * low:
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: show_bytes(value).replace(".00", "")))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _held_out(runs: Sequence[Run], summary: Summary, across: str, label: str) -> Figure | None:
    curves = [(at, run, [p for p in run.curve(across) if across != "bytes" or p[0] > 0]) for at, run in enumerate(runs)]
    curves = [entry for entry in curves if entry[2]]
    if not curves:
        return None
    figure, axes = _panel(label, "held-out loss in nats per token")
    for at, run, curve in curves:
        axes.plot(*zip(*curve), label=run.name, marker=MARKS[at % len(MARKS)], markersize=4, **_look(at))
        if len(runs) > 1 and summary.target is not None:
            _ring(axes, curve, summary.target, RUNS[at % len(RUNS)])
    _legend(axes, runs)
    return figure


def _ring(axes: Axes, curve: Sequence[Point], target: float, colour: str) -> None:
    """Where the curve is first at the target, and the target as a line across."""
    axes.axhline(target, color="#888888", linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    where = reached(curve, target)
    if where is not None:
        axes.plot(where, target, "o", markersize=12, fillstyle="none", color=colour)


def training(runs: Sequence[Run], summary: Summary) -> Figure | None:
    """Training loss per step; a long series thin as measured, thick its running mean."""
    return _steps(runs, _series("loss"), "training loss in nats per token", fmean)


def progress(runs: Sequence[Run], summary: Summary) -> Figure | None:
    """Training loss against training time and against bytes sent."""
    if not any(run.trained("seconds") for run in runs):
        return None
    figure = Figure(figsize=(SIZE[0], 3.4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    dress(left, "training time in seconds", "training loss in nats per token")
    dress(right, "bytes sent by all ranks", "")
    _lines(left, runs, lambda run: run.trained("seconds"), fmean)
    _lines(right, runs, lambda run: [point for point in run.trained("bytes") if point[0] > 0], fmean)
    if right.lines:
        right.set_xscale("log")
        _label_bytes(right)
    _legend(left, runs)
    return figure


def tokens(runs: Sequence[Run], summary: Summary) -> Figure | None:
    """Tokens trained on per second."""
    figure = _steps(runs, lambda run: run.tokens, "tokens per second", median)
    if figure is not None:
        figure.axes[0].set_ylim(bottom=0)
    return figure


def step_time(runs: Sequence[Run], summary: Summary) -> Figure | None:
    """Seconds per step and, below, how many of them the gradient exchange was waited for."""
    panels = [("step_seconds", "seconds per step"), ("wait_seconds", "of these waiting\nfor gradients, seconds")]
    panels = [panel for panel in panels if any(run.series(panel[0]) for run in runs)]
    if not panels:
        return None
    figure = Figure(figsize=(SIZE[0], 2.6 * len(panels) + 0.4), layout="constrained")
    rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (key, label) in zip(rows, panels):
        dress(axes, "step" if axes is rows[-1] else "", label)
        _lines(axes, runs, _series(key), median)
        axes.set_ylim(0, _top([y for run in runs for _, y in run.series(key)]))
    _legend(rows[0], runs)
    return figure


def _top(values: Sequence[float]) -> float | None:
    """None: as high as the values. Lower where a few (a first step that compiles) would flatten all others."""
    usual = sorted(values)[int(0.95 * (len(values) - 1))]
    return 1.3 * usual if 0 < 1.3 * usual < max(values) / 2 else None


def hit_rate(runs: Sequence[Run], summary: Summary) -> Figure | None:
    """Share of a step's samples whose last activation both ends remember."""
    figure = _steps(runs, _series("hit_rate"), "samples sent as a change, of the step's", fmean)
    if figure is not None:
        figure.axes[0].set_ylim(-0.03, 1.03)
        figure.axes[0].yaxis.set_major_formatter(PercentFormatter(1.0))
    return figure


def errors(runs: Sequence[Run], summary: Summary) -> Figure | None:
    """Relative error of what arrived, one panel per channel."""
    kinds = [k for k in CHANNELS if any(y > 0 for run in runs for _, y in run.series("errors", k))]
    if not kinds:
        return None
    figure = Figure(figsize=(SIZE[0], 3.6), layout="constrained")
    panels = figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
    for axes, kind in zip(panels, kinds):
        dress(axes, "step", "relative error" if axes is panels[0] else "")
        _lines(axes, runs, _series("errors", kind), fmean, positive=True)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_title(kind, loc="left", fontsize=10)
    if len(runs) > 1:
        handles, labels = _handles(panels)
        name_plainly(figure.legend(handles, labels, loc="outside upper left", ncols=min(4, len(runs)), frameon=False))
    return figure


def channels(runs: Sequence[Run], summary: Summary) -> Figure | None:
    """Bytes by channel: how many (left), and each channel's share (right)."""
    if not any(run.total for run in runs):
        return None
    figure = Figure(figsize=(SIZE[0], 1.5 + 0.62 * len(runs)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, share in ((left, False), (right, True)):
        _bars(axes, runs, share)
        axes.set_yticks(range(len(runs)), [run.name for run in runs], parse_math=False)
        axes.set_ylim(len(runs) - 0.45, -0.55)
        axes.grid(True, axis="x", color="#DDDDDD", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
    left.set_xlabel("bytes sent by all ranks")
    left.xaxis.set_major_formatter(FuncFormatter(lambda value, _: show_bytes(value).replace(".00", "")))
    left.locator_params(axis="x", nbins=4)
    left.set_xlim(0, 1.32 * max(run.total for run in runs))
    right.set_xlabel("share of each channel")
    right.xaxis.set_major_formatter(PercentFormatter(1.0))
    right.set_xlim(0, 1)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=len(labels), frameon=False)
    return figure


def _bars(axes: Axes, runs: Sequence[Run], share: bool) -> None:
    at = range(len(runs))
    whole = [run.total if share and run.total else 1.0 for run in runs]
    before = [0.0] * len(runs)
    for channel, shade in SHADES.items():
        width = [run.sent[channel] / total for run, total in zip(runs, whole)]
        if any(width):
            name = "between sites" if channel == "site" else channel
            axes.barh(at, width, left=before, height=0.6, color=shade, label=name)
        before = [a + b for a, b in zip(before, width)]
    if not share:
        for row, run in zip(at, runs):
            axes.annotate(show_bytes(run.total), (run.total, row), (4, 0), textcoords="offset points", va="center")


def _steps(runs: Sequence[Run], pick: Pick, label: str, middle: Callable[[list[float]], float]) -> Figure | None:
    if not any(pick(run) for run in runs):
        return None
    figure, axes = _panel("step", label)
    _lines(axes, runs, pick, middle)
    _legend(axes, runs)
    return figure


def _series(*keys: str) -> Pick:
    """A number of the step events, by a path of keys, against the step."""
    return lambda run: run.series(*keys)


def _lines(
    axes: Axes, runs: Sequence[Run], pick: Pick, middle: Callable[[list[float]], float],
    positive: bool = False,
) -> None:  # fmt: skip
    """One curve per run that has points; `positive`: of those that a logarithmic axis can show."""
    for at, run in enumerate(runs):
        points = [point for point in pick(run) if point[1] > 0 or not positive]
        if _reach(points):
            axes.plot(*zip(*points), color=RUNS[at % len(RUNS)], linewidth=THIN, alpha=0.35)
        if points:
            axes.plot(*zip(*smooth(points, middle)), label=run.name, **_look(at))


def has_thin_lines(figure: Figure) -> bool:
    """Whether a series of `figure` was long enough to be drawn twice: every step, and smoothed."""
    return any(line.get_linewidth() == THIN for axes in figure.axes for line in axes.lines)


def _reach(points: Sequence[Point]) -> int:
    """Neighbours on each side that a smoothed point is made of."""
    return len(points) // (2 * SMOOTH)


def smooth(points: Sequence[Point], middle: Callable[[list[float]], float] = fmean) -> list[Point]:
    """`points`, each the `middle` of so many neighbours that about SMOOTH independent ones remain; ends use fewer."""
    reach = _reach(points)
    values = [y for _, y in points]
    return [(x, middle(values[max(0, i - reach) : i + reach + 1])) for i, (x, _) in enumerate(points)]


def _look(at: int) -> dict[str, Any]:
    return {"color": RUNS[at % len(RUNS)], "linestyle": STYLES[at % len(STYLES)], "linewidth": 1.8}


def _panel(across: str, up: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.add_subplot()
    dress(axes, across, up)
    return figure, axes


def dress(axes: Axes, across: str, up: str) -> None:
    """Labels, a grid, no box; `across` and `up` name the axes."""
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(True, color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(axes: Axes, runs: Sequence[Run]) -> None:
    if len(runs) > 1 and axes.get_legend_handles_labels()[0]:
        name_plainly(axes.legend(frameon=False))


def name_plainly(legend: Legend) -> None:
    """Names of runs are no formulas, whatever dollar signs they hold."""
    for text in legend.get_texts():
        text.set_parse_math(False)


def _handles(panels: Sequence[Axes]) -> tuple[list[Any], list[str]]:
    """Every run once, from whichever panel has it."""
    found: dict[str, Any] = {}
    for axes in panels:
        found |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels())}
    return list(found.values()), list(found)
