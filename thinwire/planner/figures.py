"""The planner's two figures: the timeline of a step, and step time against the rate of the network."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import log
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from thinwire.errors import UsageError
from thinwire.planner.actions import Action, Kind
from thinwire.planner.build import WIRE
from thinwire.planner.predict import BreakEven, Curve
from thinwire.planner.simulate import Result, Span
from thinwire.planner.step import Traffic
from thinwire.quantities import show_rate

# Okabe and Ito's colours, distinguishable without red-green vision; the critical path is drawn in black.
COLOURS = {
    "forward": "#56B4E9",
    "backward": "#E69F00",
    "weight backward": "#F0E442",
    "codec": "#CC79A7",
    "message": "#999999",
    "gradient, embedding": "#0072B2",
}
LINES = ("#000000", "#999999", "#009E73", "#0072B2", "#E69F00", "#CC79A7", "#D55E00", "#56B4E9")
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
WIDTH = 14.0  # inches
LABELLED = 600  # boxes; beyond, micro-batch numbers would be unreadable


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure to `path`, making its folder; UsageError where that is not possible."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write {path}: {error}") from None


def timeline(result: Result, title: str) -> Figure:
    """One band per rank: computation and codecs above, what its port sends below; the critical path outlined."""
    spans = [s for s in result.spans() if s.finish > s.start]
    ranks = len(result.step.schedule.ranks)
    figure = Figure(figsize=(WIDTH, min(40.0, 1.6 + 0.75 * ranks)), layout="constrained")
    axes = figure.add_subplot()
    for rank in range(ranks):
        _band(axes, [s for s in spans if s.about.rank == rank], rank, result.makespan)
    if len(spans) <= LABELLED:
        _number(axes, spans, result.makespan)
    _connect(axes, [s for s in spans if s.on_path])
    axes.set_xlim(0, result.makespan)
    axes.set_ylim(ranks - 0.35, -0.6)
    axes.set_yticks(range(ranks), [f"rank {r}" for r in range(ranks)])
    axes.set_xlabel("seconds")
    axes.set_title(title, loc="left", parse_math=False)  # it holds the name of a run
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    _legend(figure, {_colour(s) for s in spans})
    return figure


def _colour(span: Span) -> str:
    subject = span.about.subject
    if isinstance(subject, Action):
        return {Kind.F: "forward", Kind.W: "weight backward"}.get(subject.kind, "backward")
    if span.about.what != WIRE:
        return "codec"
    return "message" if subject.traffic in (Traffic.FORWARD, Traffic.BACKWARD) else "gradient, embedding"


def _place(span: Span) -> tuple[float, float]:
    """Top and height of a box in its rank's band."""
    return (span.about.rank + 0.1, 0.24) if span.about.what == WIRE else (span.about.rank - 0.4, 0.48)


def _outline(span: Span, makespan: float) -> float:
    """Points; thin around boxes that a thick line would hide."""
    return 1.4 if span.finish - span.start > 0.004 * makespan else 0.4


def _band(axes: Axes, spans: list[Span], rank: int, makespan: float) -> None:
    for on_path in (False, True):  # the path last, so that its outline stays on top
        for wire in (False, True):
            some = [s for s in spans if s.on_path is on_path and (s.about.what == WIRE) is wire]
            if some:
                axes.broken_barh(
                    [(s.start, s.finish - s.start) for s in some],
                    _place(some[0]),
                    facecolors=[COLOURS[_colour(s)] for s in some],
                    edgecolors="black" if on_path else "white",
                    linewidth=[_outline(s, makespan) for s in some] if on_path else 0.3,
                    zorder=3 if on_path else 2,
                )
    axes.axhline(rank + 0.5, color="#DDDDDD", linewidth=0.8, zorder=1)


def _number(axes: Axes, spans: list[Span], makespan: float) -> None:
    """The micro-batch in each computation that has room for it."""
    for span in spans:
        subject = span.about.subject
        points = 72 * WIDTH * (span.finish - span.start) / makespan
        size = min(7.0, 1.4 * points / len(str(subject.microbatch))) if isinstance(subject, Action) else 0.0
        if isinstance(subject, Action) and size > 4:
            top, height = _place(span)
            middle = (span.start + span.finish) / 2
            axes.text(
                middle,
                top + height / 2,
                str(subject.microbatch),
                ha="center",
                va="center",
                fontsize=size,
                zorder=4,
            )


def _connect(axes: Axes, path: list[Span]) -> None:
    """Thin lines from task to task where the path changes row."""
    path = sorted(path, key=lambda s: (s.start, s.finish))
    for a, b in pairwise(path):
        (top_a, height_a), (top_b, height_b) = _place(a), _place(b)
        if top_a != top_b:
            ys = (top_a + height_a / 2, top_b + height_b / 2)
            axes.plot((a.finish, b.start), ys, color="black", linewidth=0.9, zorder=2.5)


def _legend(figure: Figure, used: set[str]) -> None:
    handles = [Patch(facecolor=c, label=name) for name, c in COLOURS.items() if name in used]
    handles.append(Patch(facecolor="white", edgecolor="black", linewidth=1.4, label="critical path"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)


def sweep(curves: Sequence[Curve], rates: Sequence[float], title: str) -> Figure:
    """Step seconds against rates in bit/s, both logarithmic; a circle where a wire is as fast as plain fp32 or bf16."""
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.add_subplot()
    for at, curve in enumerate(curves):
        colour, mark = LINES[at % len(LINES)], MARKS[at % len(MARKS)]
        axes.plot(rates, curve.seconds, color=colour, marker=mark, markersize=4, markevery=3, label=_pays(curve))
        rate = _worthy(curve)[1].rate
        if rate is not None:
            axes.plot(rate, _between(rates, curve.seconds, rate), "o", color=colour, markersize=11, fillstyle="none")
    axes.set_xscale("log")
    axes.set_yscale("log")
    ticks = [t for t in (10.0**e for e in range(4, 12)) if rates[0] <= t <= rates[-1]]
    axes.set_xticks(ticks, [show_rate(t) for t in ticks])
    axes.set_xlabel("rate of the slow network, per port")
    axes.set_ylabel("seconds per step")
    axes.set_title(title, loc="left")
    axes.grid(True, which="major", color="#DDDDDD", linewidth=0.8)
    axes.legend(frameon=False, title="wire (○ break-even)", alignment="left")
    return figure


def _worthy(curve: Curve) -> tuple[str, BreakEven]:
    """The plain wire to compare with: bf16 where this one ever beats it, else fp32."""
    never = BreakEven("never")
    for base in ("bf16", "off"):
        if (found := curve.faster_than.get(base, never)) != never:
            return base, found
    return "off", never


def _pays(curve: Curve) -> str:
    base, found = _worthy(curve)
    return curve.wire if found.side == "never" else f"{curve.wire}: beats {base} {found}"


def _between(rates: Sequence[float], seconds: Sequence[float], rate: float) -> float:
    """The curve's value at a rate between its points, on the straight line of the logarithmic plot."""
    at = max(i for i, r in enumerate(rates) if r <= rate)
    if at == len(rates) - 1:
        return seconds[at]
    share = log(rate / rates[at]) / log(rates[at + 1] / rates[at])
    return seconds[at] ** (1 - share) * seconds[at + 1] ** share
