"""The live page: its frame, which a browser loads once, and its parts, which it asks for again and again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from threading import Lock

from thinwire.quantities import show_bytes
from thinwire.report import markup
from thinwire.report.links import link_rates
from thinwire.report.page import about, headline
from thinwire.report.runs import Event, Run, number
from thinwire.report.sections import SECTIONS, Section
from thinwire.report.summary import Line, Summary, summarise
from thinwire.watch.follow import State, begin, look_at, told_by
from thinwire.watch.pictures import Pictures, Timeline

PARTS = ("now", "warnings", "figures", "steps", "told", "members")
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
        places = "\n".join(f'<section id="{part}"></section>' for part in PARTS)
        body = (
            f"<header><h1>{markup.text(names)}</h1>\n"
            '<p class="quiet" id="connection" role="status">loading …</p>\n'
            "<noscript><p>This page follows the runs by a script of its own, which this browser does not run.</p>"
            f"</noscript></header>\n<main>\n{places}\n</main>"
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
                "figures": _figures(self.pictures),
                "steps": _steps(self.pictures),
                "told": _told(told_by(states)),
                "members": _members(states),
            }

    def picture(self, name: str) -> bytes | None:
        """The figure of that name as SVG; None where there is none."""
        return self.pictures.drawn.get(name)


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


def _figures(pictures: Pictures) -> str:
    drawn_first = sorted(SECTIONS, key=lambda section: section.name not in pictures.drawn)
    cells = "\n".join(_cell(section, pictures) for section in drawn_first)
    return f'<div class="grid">\n{cells}\n</div>' if pictures.count else ""


def _cell(section: Section, pictures: Pictures) -> str:
    head = f"<h2>{markup.text(section.title)}</h2>"
    if section.name not in pictures.drawn:
        return f"<article>{head}{markup.quiet(f'Nothing to draw yet: {section.without}.')}</article>"
    source = _address(section.name, pictures)
    return f"<article>{head}{markup.figure(source, section.title, pictures.captions[section.name])}</article>"


def _address(name: str, pictures: Pictures) -> str:
    return f"figure/{name}?{pictures.count}"


def _steps(pictures: Pictures) -> str:
    """Each run's step in the simulator."""
    parts = [_step(timeline, pictures) for timeline in pictures.timelines]
    return markup.join(["<h2>The step, and what it waits for</h2>", *parts]) if parts else ""


def _step(timeline: Timeline, pictures: Pictures) -> str:
    head = f"<h3>{markup.text(timeline.run)}</h3>"
    if not timeline.picture:
        return head + markup.quiet(timeline.words)
    title = f"Simulated step of {timeline.run}"
    return head + markup.figure(_address(timeline.picture, pictures), title, timeline.words, "broad")


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
        sizes = [int(number(state.run.about, "mesh", key) or 1) for key in ("dp", "pp", "tp")]
        ranks = sizes[0] * sizes[1] * sizes[2]
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
