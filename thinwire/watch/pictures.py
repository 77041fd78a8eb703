"""The report's figures of runs that are going on, as SVG.

Drawing all of them takes about two seconds of a processor that the run may need. So a figure is drawn again only when
somebody looks and the runs have grown, the one that was not drawn for longest first, and for a tenth of a processor.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import NamedTuple

from matplotlib.figure import Figure

from thinwire.errors import UsageError
from thinwire.planner import figures as planner_figures
from thinwire.report.figures import DRAWING
from thinwire.report.runs import Run
from thinwire.report.sections import SECTIONS, Section
from thinwire.report.summary import Summary
from thinwire.report.timeline import explained, simulated

PAUSE = 9  # times as long as a figure took to draw, until the next one is drawn
LONGEST = 1.0  # seconds after which the rest is left for the next time: somebody waits for the numbers
Drawn = tuple[Figure | None, str, str]  # a figure, its title, and the words under it or why there is none
Job = Callable[[], Drawn]


class Picture(NamedTuple):
    """A figure on the page. `svg`: None where there is nothing to draw, and `words` say why. `number`: another one
    whenever it is drawn anew."""

    svg: bytes | None
    title: str
    words: str
    number: int


class Pictures:
    """Figures by name.

    clock: seconds, of any start. spent: seconds that a processor has worked for this thread, of any start."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, spent: Callable[[], float] = time.thread_time
    ) -> None:
        self.clock = clock
        self.spent = spent
        self.drawn: dict[str, Picture] = {}
        self._of: dict[str, Hashable] = {}  # the version that each shows
        self._count = 0
        self._next = 0.0

    def update(self, runs: Sequence[Run], summary: Summary, version: Hashable) -> None:
        """Draw what shows another `version` of `runs` than this one, as far as there is time: what was never drawn
        before, and then what was not drawn for longest."""
        jobs, began = _jobs(runs, summary), self.clock()
        due = [name for name in jobs if self._of.get(name) != version]
        for name in sorted(due, key=lambda name: self.drawn[name].number if name in self.drawn else 0):
            if self.clock() - began > LONGEST or (name in self.drawn and self.clock() < self._next):
                return
            self._draw(name, jobs[name])
            self._of[name] = version

    def _draw(self, name: str, job: Job) -> None:
        began = self.spent()
        with DRAWING:
            figure, title, words = job()
            data = None if figure is None else svg(figure)
        self._count += 1
        self.drawn[name] = Picture(data, title, words, self._count)
        self._next = self.clock() + PAUSE * (self.spent() - began)


def _jobs(runs: Sequence[Run], summary: Summary) -> dict[str, Job]:
    """How each figure is drawn, by name, in the order of the page."""
    begun = [(timeline_name(at), run) for at, run in enumerate(runs) if run.steps]
    jobs: dict[str, Job] = {section.name: partial(_section, section, runs, summary) for section in SECTIONS}
    return jobs | {name: partial(_timeline, run) for name, run in begun}


def timeline_name(at: int) -> str:
    """Of the simulated step of the run at that place."""
    return f"timeline-{at}"


def _section(section: Section, runs: Sequence[Run], summary: Summary) -> Drawn:
    figure = section.draw(runs, summary)
    if figure is None:
        return None, section.title, f"Nothing to draw yet: {section.without}."
    return figure, section.title, section.caption_of(figure, runs)


def _timeline(run: Run) -> Drawn:
    try:
        result = simulated(run)
    except UsageError as error:
        return None, run.name, f"No timeline: {error}."
    figure = planner_figures.timeline(result, f"{run.name}: {result.makespan:.3g} s per step")
    return figure, run.name, explained(result)


def svg(figure: Figure) -> bytes:
    """`figure` as the bytes of an SVG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
