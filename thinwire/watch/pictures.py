"""The report's figures of runs that are going on, as SVG.

Drawing a dozen figures takes a second or two of a processor that the run may need. So they are drawn only when somebody
looks, when the runs have grown, and for at most a twentieth of the time.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from matplotlib.figure import Figure

from thinwire.errors import UsageError
from thinwire.planner import figures as planner_figures
from thinwire.report import sections
from thinwire.report.figures import DRAWING
from thinwire.report.runs import Run
from thinwire.report.summary import Summary
from thinwire.report.timeline import explained, simulated

PAUSE = 19  # times as long as it took to draw, until it is done again


class Timeline(NamedTuple):
    """A run's simulated step: the picture's name ("" where there is none), the run's, and the words under it."""

    picture: str
    run: str
    words: str


class Pictures:
    """Figures by name. `clock`: seconds, of any start."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.drawn: dict[str, bytes] = {}
        self.captions: dict[str, str] = {}
        self.timelines: list[Timeline] = []
        self.count = 0  # how often they were drawn
        self._of: Hashable = None
        self._next = 0.0

    def update(self, runs: Sequence[Run], summary: Summary, version: Hashable) -> None:
        """Draw `runs` anew where their `version` is another than the drawn one's, and enough time has passed."""
        began = self.clock()
        if version == self._of or (self.count and began < self._next):
            return
        with DRAWING:
            figures = sections.draw(runs, summary)
            self.captions = sections.captions(runs, figures)
            self.timelines = [_timeline(run, f"timeline-{at}", figures) for at, run in enumerate(runs) if run.steps]
            self.drawn = {name: svg(figure) for name, figure in figures.items()}
        self.count += 1
        self._of = version
        self._next = self.clock() + PAUSE * (self.clock() - began)


def _timeline(run: Run, name: str, figures: dict[str, Figure]) -> Timeline:
    """The run's simulated step, drawn into `figures`; or why there is none."""
    try:
        result = simulated(run)
    except UsageError as error:
        return Timeline("", run.name, f"No timeline: {error}.")
    figures[name] = planner_figures.timeline(result, f"{run.name}: {result.makespan:.3g} s per step")
    return Timeline(name, run.name, explained(result))


def svg(figure: Figure) -> bytes:
    """`figure` as the bytes of an SVG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
