"""Pieces of HTML that the report and the live page share: tables, figures, notes, numbers in words.

All text that is given to them is escaped here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

ABSENT = "–"
FITS = 3  # columns that a phone shows without scrolling


def document(title: str, head: str, body: str) -> str:
    """A whole page. `title`: as text. `head`: more of its head, and `body`: as HTML."""
    common = '<meta charset="utf-8"/><meta name="viewport" content="width=device-width, initial-scale=1"/>'
    start = f"<head>{common}<title>{text(title)}</title>\n{head}</head>"
    return f'<!DOCTYPE html>\n<html lang="en">\n{start}\n<body>\n{body}\n</body>\n</html>\n'


def plain(words: str) -> str:
    """Without control characters, which neither a page nor a figure may hold."""
    return "".join(c for c in words if c in "\t\n" or c.isprintable())


def text(words: str) -> str:
    """Words as HTML."""
    return escape(plain(words))


def notes(lines: Sequence[str]) -> str:
    """A list that stands out; nothing where there are no lines."""
    items = "".join(f"<li>{text(line)}</li>" for line in lines)
    return f'<ul class="notes">{items}</ul>' if items else ""


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """A table that scrolls in a box of its own. `kind`: its class, "words" for one of text."""
    head = "".join(f"<th>{text(c)}</th>" for c in columns)
    body = "\n".join("<tr>" + "".join(f"<td>{text(c)}</td>" for c in row) + "</tr>" for row in rows)
    mark = f' class="{kind}"' if kind else ""
    above = hint("more columns to the right") if len(columns) > FITS else ""
    inside = f"<table{mark}><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"
    return f'{above}<div class="wide" tabindex="0">{inside}</div>'


def figure(source: str, title: str, caption: str, kind: str = "column") -> str:
    """A picture and the words under it. `source`: its address. `kind`: "broad" for one that scrolls when narrow."""
    image = f'<div class="{kind}"><img alt="{text(title)}" src="{text(source)}"/></div>'
    above = hint("the figure goes on to the right") if kind == "broad" else ""
    return f"<figure>{above}{image}<figcaption>{text(caption)}</figcaption></figure>"


def quiet(words: str) -> str:
    """A paragraph in a lighter colour."""
    return f'<p class="quiet">{text(words)}</p>'


def hint(words: str) -> str:
    """Seen on narrow screens only, above a box that scrolls there."""
    return f'<div class="hint">{text(words)} →</div>'


def join(parts: Iterable[str]) -> str:
    """The parts that are there, one per line."""
    return "\n".join(part for part in parts if part)


def number(value: float | None) -> str:
    """Four digits."""
    return ABSENT if value is None else f"{value:.4g}"


def times(value: float | None) -> str:
    """A ratio."""
    return ABSENT if value is None else f"{value:.3g}×"


def time(seconds: float | None) -> str:
    """In seconds, minutes or hours."""
    if seconds is None:
        return ABSENT
    if seconds < 600:
        return f"{seconds:.3g} s"
    minutes = seconds / 60
    return f"{minutes:.3g} min" if minutes < 120 else f"{minutes / 60:.3g} h"
