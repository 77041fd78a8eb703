"""What every command shows: a progress bar on a terminal (plain lines elsewhere), a table, and JSON on request."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from thinwire.errors import UsageError
from thinwire.quantities import show_duration

BAR = 14  # characters of the bar itself
QUIET_SECONDS = 5.0  # how often a plain line appears where there is no terminal


@contextmanager
def progress(what: str, total: int, done: int = 0) -> Iterator[Callable[[str, int], None]]:
    """Show progress while the block runs; yields `advance(note, steps=1)`.

    On a terminal it is a bar, then the note, which is shortened where the terminal is narrow; elsewhere it is a line
    every few seconds.

    what: printed before it. total: how many steps there are. done: how many of them were done before, by a run that is
    resumed.
    """
    if sys.stderr.isatty():
        note_column = TextColumn("{task.fields[note]}", markup=False)
        columns = (TextColumn("{task.description}"), BarColumn(BAR), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, note_column, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=total, completed=done, note="")
            room = bar.console.width - len(what) - BAR - 2 * len(str(total)) - len(" / 0:00:00    ")

            def move(note: str, steps: int = 1) -> None:
                bar.update(task, advance=steps, note=note if len(note) <= room else note[: max(0, room - 1)] + "…")

            yield move
        return
    first = done
    began = time.monotonic()
    shown = began

    def advance(note: str, steps: int = 1) -> None:
        nonlocal done, shown
        done += steps
        if time.monotonic() - shown >= QUIET_SECONDS or done >= total:
            shown = time.monotonic()
            left = (total - done) * (shown - began) / max(1, done - first)
            rest = f", {show_duration(left)} left" if first < done < total else ""
            print(f"{what}: {note} ({done}/{total}{rest})", file=sys.stderr, flush=True)

    yield advance


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], caption: str = "") -> None:
    """Print a table with one sequence of values per row; `caption` is printed below it.

    Text is left-aligned, numbers (also as text) are right-aligned; floats get four significant digits; None is a dash.
    """
    console = Console(markup=False)  # thinwire[train] is a name, not a style
    if not console.is_terminal:
        console = Console(width=160, markup=False)
    out = Table(title=title, title_justify="left", caption=caption or None, caption_justify="left")
    for i, name in enumerate(columns):
        out.add_column(name, justify="right" if all(_is_number(row[i]) for row in rows) else "left")
    for row in rows:
        out.add_row(*(_cell(value) for value in row))
    console.print(out)


def _is_number(value: Any) -> bool:
    return not isinstance(value, str) or value[:1].isdigit() or value[:1] in ("-", "−", "–", "±")


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def write_json(path: str | Path | None, result: Any) -> None:
    """Write `result` as JSON to `path` (None: do nothing), making its folder; UsageError where that is not possible."""
    if path is None:
        return
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror}") from None


def read_json(path: str | Path) -> Any:
    """Read what `write_json` wrote; UsageError where the file is missing or is not JSON."""
    try:
        return json.loads(Path(path).read_text())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path}: not JSON: {error}") from None
