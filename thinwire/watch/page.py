"""The live page: its frame, which a browser loads once, and its parts, which it asks for again and again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from threading import Lock

from thinwire.quantities import show_bytes
from thinwire.report import markup
from thinwire.report.links import link_rates
from thinwire.report.page import about, headline
from thinwire.report.runs import Event, Run, number
from thinwire.report.sections import SECTIONS
from thinwire.report.summary import Line, Summary, summarise
from thinwire.watch.follow import State, begin, look_at, told_by
from thinwire.watch.pictures import Picture, Pictures, timeline_name

ABOVE, BELOW = ("now", "warnings"), ("steps", "told", "members")
FIGURES = tuple(section.name for section in SECTIONS)
RECENT = 20  # steps over which the table's rates are medians
LAST = 60  # events that are listed
LONGEST = 400  # characters of one of them
MEMBER = "member"  # kind of the events, with a `text`, that say who came or went


class LivePage:
    """The page about the runs in `folders`, read anew whenever its parts are asked for."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.followers = begin(folders)
        self.pictures = Pictures()
        self.asked = 0  # how often the parts were asked for
        self._lock = Lock()

    def frame(self) -> str:
        """The page without its parts: headings and places for them."""
        names = ", ".join(str(follower.folder) for follower in self.followers)
        head = '<link rel="stylesheet" href="page.css"/>\n<script src="watch.js" defer="defer"></script>'
        body = (
            f"<header><h1>{markup.text(names)}</h1>\n"
            '<p class="quiet" id="connection" role="status">Loading: the figures are being drawn …</p>\n'
            "<noscript><p>This page follows the runs by a script of its own, which this browser does not run.</p>"
            f"</noscript></header>\n<main>\n{_places(ABOVE)}\n"
            f'<div class="grid">\n{_places(FIGURES)}\n</div>\n{_places(BELOW)}\n</main>'
        )
        return markup.document(f"thinwire watch: {names}", head, body)

    def parts(self) -> dict[str, str]:
        """The parts as HTML, by name."""
        with self._lock:
            states = look_at(self.followers)
            runs = [state.run for state in states]
            summary = summarise(runs)
            self.pictures.update(runs, summary, tuple(state.version for state in states))
            self.asked += 1
            return {
                "now": _now(states, summary),
                "warnings": markup.notes(_warnings(states, summary)),
                **{name: _figure(name, self.pictures) for name in FIGURES},
                "steps": _steps(len(runs), self.pictures),
                "told": _told(told_by(states)),
                "members": _members(states),
            }

    def picture(self, name: str) -> bytes | None:
        """The figure of that name as SVG; None where there is none."""
        found = self.pictures.drawn.get(name)
        return None if found is None else found.svg


def _places(names: Sequence[str]) -> str:
    """Where the script puts the parts of these names."""
    return "\n".join(f'<section id="{name}"></section>' for name in names)


def _now(states: Sequence[State], summary: Summary) -> str:
    columns = (
        "run", "state", "step", "loss", "held-out loss", "tokens/s", "per step", "waits for gradients", "busiest link",
        "sent", "fewer than fp32", "time",
    )  # fmt: skip
    rows = [_row(state, line) for state, line in zip(states, summary.lines)]
    known = [state.run for state in states if state.run.about]
    words = [f'<p class="lead">{markup.text(line)}</p>' for line in _headlines(states, summary)]
    return markup.join([markup.table(columns, rows), markup.quiet(about(known)) if known else "", *words])


def _headlines(states: Sequence[State], summary: Summary) -> list[str]:
    """Runs beside each other, once each has two evaluations."""
    ready = len(states) > 1 and all(len(state.run.evals) > 1 for state in states)
    return headline(summary) if ready else []


def _row(state: State, line: Line) -> tuple[str, ...]:
    run = state.run
    last: Event = run.steps[-1] if run.steps else {}
    total = number(run.about, "steps")
    seconds = _recent(run, "step_seconds")
    waits = _recent(run, "wait_seconds")
    speed = [value for _, value in run.tokens[-RECENT:]]
    return (
        run.name,
        state.word,
        f"{run.last_step}" + (f" of {total:.0f}" if total else ""),
        markup.number(number(last, "loss")),
        markup.number(line.held_out),
        f"{median(speed):.0f}" if speed else markup.ABSENT,
        markup.time(seconds),
        f"{100 * waits / seconds:.0f} %" if waits is not None and seconds else markup.ABSENT,
        _busiest(run),
        show_bytes(line.bytes),
        markup.times(line.saving),
        markup.time(line.seconds),
    )


def _recent(run: Run, key: str) -> float | None:
    values = [value for _, value in run.series(key)[-RECENT:]]
    return median(values) if values else None


def _busiest(run: Run) -> str:
    """The link that carries most, and how much of the step that takes it."""
    rates = [(median(y for _, y in line.points[-RECENT:]), line.name) for line in link_rates(run)]
    if not rates:
        return markup.ABSENT
    most, name = max(rates)
    limit = number(run.about, "rate")
    share = f", {100 * most / limit:.0f} % of the step" if limit else ""
    return f"{name}: {most / 1e6:.3g} Mbit/s{share}"


def _warnings(states: Sequence[State], summary: Summary) -> list[str]:
    return [*summary.notes, *(f"{state.run.name}: {warning}." for state in states for warning in state.warnings)]


def _figure(name: str, pictures: Pictures) -> str:
    """A figure of all runs."""
    found = pictures.drawn.get(name)
    return "" if found is None else f"<h2>{markup.text(found.title)}</h2>{_shown(name, found)}"


def _steps(runs: int, pictures: Pictures) -> str:
    """Each run's step in the simulator."""
    names = [name for at in range(runs) if (name := timeline_name(at)) in pictures.drawn]
    parts = [f"<h3>{markup.text(pictures.drawn[n].title)}</h3>{_shown(n, pictures.drawn[n], 'broad')}" for n in names]
    return markup.join(["<h2>The step, and what it waits for</h2>", *parts]) if parts else ""


def _shown(name: str, picture: Picture, kind: str = "column") -> str:
    if picture.svg is None:
        return markup.quiet(picture.words)
    return markup.figure(f"figure/{name}?{picture.number}", picture.title, picture.words, kind)


def _told(events: Sequence[tuple[str, Event]]) -> str:
    """What the runs said and decided, the newest first."""
    rows = [(name, str(e["step"]), str(e["kind"]), say(e)) for name, e in events if e["kind"] != MEMBER]
    rows = rows[::-1][:LAST]
    inside = markup.table(("run", "step", "what", ""), rows, "words") if rows else markup.quiet("Nothing so far.")
    return f"<h2>Notes and decisions</h2>{inside}"


def _members(states: Sequence[State]) -> str:
    """Who takes part, and who came and went, as far as the runs record it."""
    lines = []
    for state in states:
        sizes = [int(number(state.run.about, "mesh", key) or 1) for key in ("sites", "dp", "pp", "tp")]
        ranks = math.prod(sizes)
        if state.run.about:
            lines.append(f"{state.run.name}: started with {ranks} rank{'s' if ranks > 1 else ''}.")
    rows = [(name, str(e["step"]), say(e)) for name, e in told_by(states) if e["kind"] == MEMBER][::-1][:LAST]
    moves = markup.table(("run", "step", "who came or went"), rows, "words") if rows else ""
    nobody = "" if rows else markup.quiet("No run recorded members that came or went.")
    return markup.join(["<h2>Members</h2>", *(f"<p>{markup.text(line)}</p>" for line in lines), moves, nobody])


def say(event: Event) -> str:
    """A note, a decision, or an event of a kind that this version does not know, in words."""
    if isinstance(event.get("text"), str):
        words = event["text"]
    elif event["kind"] == "decision":
        words = _decided(event)
    else:
        words = ", ".join(f"{key} = {value}" for key, value in event.items() if key not in ("kind", "step"))
    return words if len(words) <= LONGEST else words[: LONGEST - 1] + "…"


def _decided(event: Event) -> str:
    """A plan: how long its step should take, and what it sends."""
    planned, exact = (markup.time(number(event, key)) for key in ("seconds", "exact"))
    wire = event.get("wire")
    parts = wire.items() if isinstance(wire, Mapping) else ()
    sent = "; ".join(f"{key}: {_short(value)}" for key, value in parts) or "nothing compressed"
    return f"a step should take {planned}, with nothing compressed {exact}. Wire: {sent}"


def _short(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {inner}" for key, inner in value.items())
    return str(value)
