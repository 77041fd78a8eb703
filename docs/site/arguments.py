"""Docstrings here list arguments as lines of `name: text`; the site shows them as a list."""

from __future__ import annotations

import re

import griffe

ARGUMENT = re.compile(r"^(\w+(?:, \w+)*): (.*)$")


class Arguments(griffe.Extension):
    """Rewrites what is shown, never the source."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_list(obj.docstring.value)


def as_list(text: str) -> str:
    """Paragraphs whose first line is `name: text` become lists, an item per such line."""
    return "\n\n".join(_paragraph(part) for part in text.split("\n\n"))


def _paragraph(text: str) -> str:
    lines = text.split("\n")
    if not ARGUMENT.match(lines[0]):
        return text
    shown = []
    for line in lines:
        match = ARGUMENT.match(line)
        names = ", ".join(f"`{name}`" for name in match[1].split(", ")) if match else ""
        shown.append(f"- {names}: {match[2]}" if match else f"  {line.strip()}")
    return "\n".join(shown)
