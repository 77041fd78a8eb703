"""`thinwire report RUN…`: one self-contained HTML page about one run, or several side by side."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from thinwire.errors import UsageError
from thinwire.installed import check_figures
from thinwire.quantities import parse_rate, show_bytes
from thinwire.report.runs import Run, read_runs
from thinwire.report.summary import Summary, summarise
from thinwire.report.timeline import explained, simulated
from thinwire.terminal import progress, table, write_json

EXAMPLES = """examples:
  thinwire report out/train
  thinwire report out/off out/max --out out/compare.html --json out/compare.json

RUN is the folder that `thinwire train` wrote ([run] out). The first run is what the others are compared with.
The page holds its figures and loads nothing else; each figure is also a PNG beside it."""
DEFAULT = "out/report/page.html"


def configure(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the options of `thinwire report`."""
    parser.epilog = EXAMPLES
    parser.add_argument("runs", nargs="*", metavar="RUN", help="folders that `thinwire train` wrote")
    parser.add_argument("--out", metavar="PAGE.html", default=DEFAULT, help="the page (%(default)s)")
    parser.add_argument("--rate", help="of the network, for the simulated step of runs that did not record it: 100mbit")
    parser.add_argument("--json", metavar="PATH", help="write the table's numbers, notes and simulated steps")


def run(args: argparse.Namespace) -> int:
    """Read the runs that `args` names and write the page; the exit status."""
    if not args.runs:
        raise UsageError("no run given: thinwire report RUN, the folder that `thinwire train` wrote")
    out = Path(args.out)
    if out.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--out {args.out}: the page's name must end in .html")
    parse_rate(args.rate, "--rate")
    runs = read_runs(args.runs)
    check_figures("the page")
    document = report(runs, out, args.rate)
    write_json(args.json, document)
    print(f"page: {out}")
    return 0


def report(runs: Sequence[Run], out: Path, rate: str | None = None) -> dict[str, Any]:
    """Write the page and its figures, print the table; the numbers as a document.

    `runs`: the first is what the others are compared with. `out`: the page's file; figures go beside it. `rate`: of the
    network, such as 100mbit, for runs that did not record it."""
    from thinwire.report import page, sections
    from thinwire.report.figures import DRAWING

    summary = summarise(runs)
    with DRAWING, progress("report", len(sections.SECTIONS) + len(runs)) as advance:
        drawn = sections.draw(runs, summary)
        advance("figures", len(sections.SECTIONS))
        timelines, steps = [], []
        for at, one in enumerate(runs):
            entry, step = _timeline(one, rate, f"timeline-{at + 1}", drawn)
            timelines.append(entry)
            steps.append(step)
            advance(f"simulated {one.name}", 1)
        pictures = {name: page.png(figure) for name, figure in drawn.items()}
    text = page.page(runs, summary, pictures, sections.captions(runs, drawn), timelines)
    _write({out: text.encode()} | {out.with_name(f"{out.stem}-{name}.png"): data for name, data in pictures.items()})
    links = {page.network(one) for one in runs}
    _show(summary, links.pop() if len(links) == 1 else "")
    return _document(summary, steps)


def _timeline(
    run: Run, rate: str | None, name: str, drawn: dict[str, Any]
) -> tuple[tuple[str, str, str], dict[str, Any]]:
    """The run's simulated step: drawn into `drawn`, or why there is none; its place on the page, its numbers."""
    try:
        result = simulated(run, measured_at=rate)
    except UsageError as error:
        return ("", run.name, f"No timeline: {error}."), {"why_not": str(error)}
    from thinwire.planner import figures

    drawn[name] = figures.timeline(result, f"{run.name}: {result.makespan:.3g} s per step")
    numbers = {"step_s": result.makespan, "critical_path_s": result.spent, "idle": result.bubble}
    return (name, run.name, explained(result)), numbers


def _write(files: dict[Path, bytes]) -> None:
    for path, data in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}") from None


def _show(summary: Summary, links: str) -> None:
    """Print the table; `links`: what the runs were on, "" where that is not known or differs."""
    from thinwire.report import page

    target = "–" if summary.target is None else f"{summary.target:.4g}"
    columns: tuple[str, ...] = (
        "run",
        "steps",
        "seconds",
        "held-out",
        f"s to {target}",
        "speed-up",
        "sent",
        "fewer than fp32",
    )
    rows: list[tuple[Any, ...]] = [
        (line.name, line.steps, line.seconds, line.held_out, line.to_loss, line.speedup, show_bytes(line.bytes),
         line.saving)
        for line in summary.lines
    ]  # fmt: skip
    if summary.classifies:
        columns = (*columns, "accuracy", "Matthews")
        rows = [(*row, line.accuracy, line.matthews) for row, line in zip(rows, summary.lines)]
    table(f"Runs on {links}" if links else "Runs", columns, rows, " ".join(page.headline(summary)))
    for note in summary.notes:
        print(f"note: {note}")


def _document(summary: Summary, steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    rows = [
        {**asdict(line), "fewer_than_fp32": line.saving, "simulated": step} for line, step in zip(summary.lines, steps)
    ]
    return {"target_loss": summary.target, "runs": rows, "notes": list(summary.notes)}
