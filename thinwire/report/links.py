"""What each rank's link carries, and how far what crosses each boundary is off: from the step events' `ranks`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from thinwire.planner.figures import LINES
from thinwire.report.figures import SIZE, STYLES, dress, smooth
from thinwire.report.runs import CHANNELS, Event, Point, Run, number
from thinwire.report.summary import Summary

ERRORS = CHANNELS[:3]
PANELS = 4  # runs of which these figures show each link; of more, the first
NAMED = 8  # lines that a legend can name


class Line(NamedTuple):
    """A curve of one link or boundary."""

    name: str
    points: list[Point]


def link_rates(run: Run) -> list[Line]:
    """What leaves each host per second of training, in bit/s; ranks of a tensor-parallel group are one host."""
    wide = _size(run, "tp")
    counted = [(e, _sent(e)) for e in run.steps if _sent(e) and number(e, "seconds") is not None]
    hosts = min((len(sent) for _, sent in counted), default=0) // wide
    found = []
    for host in range(hosts):
        ranks = range(host * wide, (host + 1) * wide)
        totals = [(e, sum(sent[rank] for rank in ranks)) for e, sent in counted]
        points = [_rate(before, after) for before, after in pairwise(totals)]
        found.append(Line(_ranks(ranks), [point for point in points if point is not None]))
    return [line for line in found if line.points]


def _sent(event: Event) -> list[float]:
    """By rank; empty where that was not recorded."""
    ranks = event.get("ranks")
    values = ranks.get("sent") if isinstance(ranks, dict) else None
    numbers = [number({"": value}, "") for value in values] if isinstance(values, list) else []
    known = [value for value in numbers if value is not None]
    return known if len(known) == len(numbers) else []


def _rate(before: tuple[Event, float], after: tuple[Event, float]) -> Point | None:
    seconds = float(after[0]["seconds"]) - float(before[0]["seconds"])
    return (float(after[0]["step"]), 8 * (after[1] - before[1]) / seconds) if seconds > 0 else None


def _ranks(ranks: range) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}–{ranks[-1]}"


def boundary_errors(run: Run, kind: str) -> list[Line]:
    """The relative error of what crosses each boundary of the pipeline (`kind` "forward" or "backward"), or of each
    stage's gradients ("gradient"): the mean over replicas and slices."""
    wide = _size(run, "tp")
    rows = [(float(e["step"]), _errors(e, kind)) for e in run.steps]
    stages = min(_size(run, "pp"), max((len(values) for _, values in rows), default=0)) or 1
    found = []
    for stage in range(stages):
        points = [(step, _at(values, stage, stages, wide)) for step, values in rows]
        found.append([(step, value) for step, value in points if value])
    chained = not (found[-1] if kind == "forward" else found[0])  # one stage per rank, as in 1F1B
    ahead = {"forward": 1, "backward": -1}.get(kind, 0) if chained else 0
    return [
        Line(f"{stage}→{stage + ahead}" if ahead else f"stage {stage}", points)
        for stage, points in enumerate(found)
        if points
    ]


def _size(run: Run, dimension: str) -> int:
    """Of the mesh; at least 1, whatever was recorded."""
    return max(1, int(number(run.about, "mesh", dimension) or 1))


def _errors(event: Event, kind: str) -> list[Any]:
    ranks = event.get("ranks")
    errors = ranks.get("errors") if isinstance(ranks, dict) else None
    values = errors.get(kind) if isinstance(errors, dict) else None
    return values if isinstance(values, list) else []


def _at(values: Sequence[Any], stage: int, stages: int, wide: int) -> float | None:
    mine = [value for rank, value in enumerate(values) if rank // wide % stages == stage]
    known = [found for value in mine if (found := number({"": value}, "")) is not None and found > 0]
    return fmean(known) if known else None


def links(runs: Sequence[Run], summary: Summary) -> Figure | None:
    """What each link carries, one panel per run; at the right as a share of what it can, where its rate is known."""
    known = [(run, lines) for run in runs if (lines := link_rates(run))][:PANELS]
    if not known:
        return None
    figure, panels = _panels(len(known), 1, 2.5)
    for (run, lines), axes in zip(known, panels[:, 0]):
        dress(axes, "step" if axes is panels[-1, 0] else "", "Mbit/s sent")
        rate = number(run.about, "rate")
        curves = [Line(name, [(x, y / 1e6) for x, y in smooth(points, median)]) for name, points in lines]
        _draw(axes, curves, {"loc": "lower right", "bbox_to_anchor": (1, 1), "ncols": 4, "borderaxespad": 0.1})
        top = max(y for line in lines for _, y in smooth(line.points, median)) / 1e6
        if rate:
            axes.axhline(rate / 1e6, color="#888888", linewidth=0.8, linestyle=(0, (4, 3)))
            share = axes.secondary_yaxis("right", functions=_percent(rate))
            share.set_ylabel("% of the step\nthat the link is busy")
            top = max(top, rate / 1e6)
        axes.set_ylim(0, 1.08 * top or 1)
        axes.set_title(run.name, loc="left", fontsize=10, parse_math=False)
    return figure


def _percent(rate: float) -> tuple[Any, Any]:
    return (lambda y: 1e8 * y / rate, lambda share: share * rate / 1e8)


def boundaries(runs: Sequence[Run], summary: Summary) -> Figure | None:
    """The error of each boundary and of each stage's gradients, one row of panels per run."""
    known = [(run, {kind: boundary_errors(run, kind) for kind in ERRORS}) for run in runs]
    known = [(run, lines) for run, lines in known if any(lines.values())][:PANELS]
    kinds = [kind for kind in ERRORS if any(lines[kind] for _, lines in known)]
    if not kinds:
        return None
    figure, panels = _panels(len(known), len(kinds), 2.7)
    for (run, lines), row in zip(known, panels):
        for axes, kind in zip(row, kinds):
            dress(axes, "step" if axes in panels[-1] else "", "relative error" if axes is row[0] else "")
            _draw(axes, lines[kind], {"loc": "best"})  # a narrow panel: beside its title there is no room
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.yaxis.set_minor_formatter(NullFormatter())
            title = f"{run.name}: {kind}" if len(known) > 1 else kind
            axes.set_title(title, loc="left", fontsize=10, parse_math=False)
    return figure


def _panels(rows: int, columns: int, height: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(SIZE[0], 0.3 + height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, sharex="col", sharey="row", squeeze=False)


def _draw(axes: Axes, lines: Sequence[Line], names_at: dict[str, Any]) -> None:
    """Curves of one panel, named where they are few."""
    for at, (name, points) in enumerate(lines):
        colour, style = LINES[(at + 3) % len(LINES)], STYLES[at % len(STYLES)]
        axes.plot(*zip(*points), label=name, color=colour, linestyle=style, linewidth=1.4)
    if 1 <= len(lines) <= NAMED:
        axes.legend(frameon=False, fontsize=8, **names_at)
