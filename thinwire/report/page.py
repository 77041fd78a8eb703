"""The report as one HTML page that needs nothing else: figures are inside it, and it loads no other file."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from thinwire.quantities import show_bytes
from thinwire.report import markup
from thinwire.report.runs import CHANNELS, Run, number
from thinwire.report.sections import SECTIONS, Section
from thinwire.report.summary import Line, Summary, differences

DPI = 150


def page(
    runs: Sequence[Run], summary: Summary, pictures: Mapping[str, bytes], words: Mapping[str, str],
    timelines: Sequence[tuple[str, str, str]],
) -> str:  # fmt: skip
    """The whole page as text.

    `runs`: what it is about, the first being what the others are compared with. `summary`: their numbers. `pictures`:
    PNGs by name. `words`: captions by the same names. `timelines`: per run its picture's name or "", a heading, and the
    words under it."""
    names = ", ".join(run.name for run in runs)
    body = [
        f"<h1>{markup.text('Training run ' if len(runs) == 1 else 'Training runs ')}{markup.text(names)}</h1>",
        markup.quiet(about(runs)),
        *(f'<p class="lead">{markup.text(line)}</p>' for line in headline(summary)),
        markup.notes(summary.notes),
        "<h2>Results</h2>", _results(summary),
        "<h2>Bytes sent</h2>", _sent(summary), *_members(runs),
        *(_section(section, pictures, words) for section in SECTIONS),
        "<h2>A step in the simulator</h2>", *(_timeline(*entry, pictures) for entry in timelines),
        "<h2>Configuration</h2>", _differences(runs), *_configurations(runs),
    ]  # fmt: skip
    style = Path(__file__).with_name("page.css").read_text()
    return markup.document(f"thinwire: {names}", f"<style>\n{style}</style>", markup.join(body))


def headline(summary: Summary) -> list[str]:
    """`summary` in words: each further run beside the first, a sentence per run."""
    first, *others = summary.lines
    if not others:
        return [_alone(first)]
    return [_beside(line, first, summary.target) for line in others]


def _alone(line: Line) -> str:
    loss = "no held-out loss measured" if line.held_out is None else f"held-out loss {line.held_out:.4g}"
    saved = "" if line.saving is None else f", {line.saving:.3g}× fewer than fp32 without compression"
    return f"{line.steps} steps in {markup.time(line.seconds)}: {loss}, {show_bytes(line.bytes)} sent{saved}."


def _beside(line: Line, first: Line, target: float | None) -> str:
    if line.speedup is None:
        return f"{line.name} and {first.name} cannot be compared by time to the same held-out loss."
    when, gain = [markup.time(line.to_loss), markup.time(first.to_loss)], [_ratio(line.speedup, "faster", "slower")]
    if line.bytes_to_loss and first.bytes_to_loss:
        when = [f"{w} and {show_bytes(x.bytes_to_loss or 0)}" for w, x in zip(when, (line, first))]
        gain.append(_ratio(first.bytes_to_loss / line.bytes_to_loss, "fewer bytes", "more bytes"))
    return (
        f"{line.name} reached held-out loss {target:.4g} after {when[0]}, {first.name} after {when[1]}: "
        f"{' and '.join(gain)}."
    )


def _ratio(value: float, more: str, less: str) -> str:
    return f"{value:.3g}× {more}" if value >= 1 else f"{1 / value:.3g}× {less}"


def about(runs: Sequence[Run]) -> str:
    """What the runs have in common, as the first one records it."""
    first, words = runs[0].about, []
    mesh = first.get("mesh")
    if isinstance(mesh, Mapping):
        cut = f" × tp {mesh['tp']}" if (number(mesh, "tp") or 1) > 1 else ""
        words.append(f"dp {mesh.get('dp')} × pp {mesh.get('pp')}{cut}, {mesh.get('schedule')}")
    if isinstance(first.get("parameters"), int):
        words.append(f"{first['parameters']:,} parameters".replace(",", " "))
    if isinstance(first.get("samples"), int):
        words.append(f"{first['samples']} training samples")
    words += [network(runs[0])] if network(runs[0]) else []
    commits = dict.fromkeys(str(run.about["commit"]) for run in runs if run.about.get("commit"))
    words += [f"commit {commit}" for commit in commits]
    return " · ".join(words)


def network(run: Run) -> str:
    """The run's links in words, as far as it records them: rate, latency one way, loss."""
    known = {key: value for key in ("rate", "latency", "loss") if (value := number(run.about, key))}
    words = [f"links of {known['rate'] / 1e6:.4g} Mbit/s"] if "rate" in known else []
    words += [f"{1e3 * known['latency']:.4g} ms one way"] if "latency" in known else []
    words += [f"{100 * known['loss']:.4g} % of packets lost"] if "loss" in known else []
    return ", ".join(words)


def _results(summary: Summary) -> str:
    target = "" if summary.target is None else f" {summary.target:.4g}"
    columns: tuple[str, ...] = (
        "run", "steps", "training time", "final held-out loss", f"time to loss{target}", "speed-up", "bytes sent",
        "fewer than fp32",
    )  # fmt: skip
    rows: list[tuple[str, ...]] = [
        (line.name, str(line.steps), markup.time(line.seconds), markup.number(line.held_out), markup.time(line.to_loss),
         markup.times(line.speedup), show_bytes(line.bytes), markup.times(line.saving))
        for line in summary.lines
    ]  # fmt: skip
    if summary.classifies:
        columns = (*columns, "accuracy", "Matthews' correlation")
        scores = [(markup.number(line.accuracy), markup.number(line.matthews)) for line in summary.lines]
        rows = [(*row, *more) for row, more in zip(rows, scores)]
    if any(line.memory is not None for line in summary.lines):
        columns = (*columns, "peak memory of a rank")
        peaks = [markup.ABSENT if line.memory is None else show_bytes(line.memory) for line in summary.lines]
        rows = [(*row, peak) for row, peak in zip(rows, peaks)]
    words = (
        f"Time to loss: the first time at the worst of the final losses. Speed-up: {summary.lines[0].name}'s time to "
        "that loss over the run's own. Times leave out evaluation and checkpoints."
    )
    return markup.table(columns, rows) + f"<p>{markup.text(words)}</p>"


def _members(runs: Sequence[Run]) -> list[str]:
    """Who was there when, in runs whose members come and go; nothing for others."""
    lists = [
        (run, {int(e["step"]): list(map(str, e["members"])) for e in run.steps if isinstance(e.get("members"), list)})
        for run in runs
    ]
    there = [
        (run.name, name, _spans([step for step, names in present.items() if name in names]), str(len(present)))
        for run, present in lists
        for name in sorted({name for names in present.values() for name in names})
    ]
    if not there:
        return []
    moves = [
        (run.name, str(e["step"]), str(e.get("text", ""))) for run in runs for e in run.told if e["kind"] == "member"
    ]
    return [
        "<h2>Members</h2>", markup.table(("run", "member", "took part in steps", "of"), there),
        markup.table(("run", "after step", "who came, left, or was slow"), moves, "words") if moves else "",
    ]  # fmt: skip


def _spans(steps: Sequence[int]) -> str:
    """Ascending steps in words: 1–8, 31–60 (38)."""
    first = [step for before, step in zip((None, *steps), steps) if before is None or step != before + 1]
    last = [step for step, after in zip(steps, (*steps[1:], None)) if after != step + 1]
    return ", ".join(f"{a}–{b}" if b > a else str(a) for a, b in zip(first, last)) + f" ({len(steps)})"


def _sent(summary: Summary) -> str:
    shown = [c for c in CHANNELS if c != "site" or any(line.channels[c] for line in summary.lines)]
    columns = ("run", *("between sites" if c == "site" else c for c in shown), "all", "fp32 would send")
    rows = [
        (line.name, *(show_bytes(line.channels[c]) for c in shown), show_bytes(line.bytes),
         markup.ABSENT if line.raw is None else show_bytes(line.raw))
        for line in summary.lines
    ]  # fmt: skip
    words = "By all ranks together, as the channels count them; headers of TCP and IP come on top."
    return markup.table(columns, rows) + f"<p>{markup.text(words)}</p>"


def _section(section: Section, pictures: Mapping[str, bytes], words: Mapping[str, str]) -> str:
    head = f"<h2>{markup.text(section.title)}</h2>"
    if section.name not in pictures:
        return head + markup.quiet(f"No figure: {section.without}.")
    return head + markup.figure(_picture(pictures[section.name]), section.title, words[section.name])


def _timeline(name: str, title: str, words: str, pictures: Mapping[str, bytes]) -> str:
    head = f"<h3>{markup.text(title)}</h3>"
    if not name:
        return head + markup.quiet(words)
    return head + markup.figure(_picture(pictures[name]), f"Simulated step of {title}", words, "broad")


def _picture(png: bytes) -> str:
    """An address that holds the picture itself."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _differences(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        return ""
    rows = [(key, *values) for key, values in differences(runs)]
    if not rows:
        return "<p>The runs have the same configuration.</p>"
    return "<h3>Where the runs differ</h3>" + markup.table(("key", *(run.name for run in runs)), rows, "words")


def _configurations(runs: Sequence[Run]) -> Iterable[str]:
    for run in runs:
        text = run.config or "(the run's folder has no run.toml)"
        yield f"<h3>{markup.text(run.name)}: run.toml as given</h3><pre>{markup.text(text)}</pre>"


def png(figure: Figure) -> bytes:
    """`figure` as the bytes of a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=DPI, format="png")
    return buffer.getvalue()
