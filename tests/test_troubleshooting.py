"""Every error that a user can cause stands on docs/troubleshooting.md, found by its text; and nothing stands there that
no code says any more."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "troubleshooting.md"
ERRORS = ("UsageError", "RunFailed", "Unavailable")
ENTRY = re.compile(r"^- (`+) ?(.+?) ?\1$", re.MULTILINE)


def texts(node: ast.expr) -> Iterator[str]:
    """What a message may say, `…` in the place of values; of `a if b else c` and `a or b` both."""
    if isinstance(node, ast.IfExp):
        yield from (*texts(node.body), *texts(node.orelse))
    elif isinstance(node, ast.BoolOp):
        yield from (text for value in node.values for text in texts(value))
    elif isinstance(node, ast.JoinedStr):
        yield _joined("".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values))
    elif isinstance(node, ast.Constant):
        yield _joined(str(node.value))


def _joined(text: str) -> str:
    return re.sub("…+", "…", re.sub(r"\s+", " ", text)).strip()


def messages() -> dict[str, str]:
    """Text → where it is raised. Messages without words of their own pass on another's, and are left out."""
    found = {}
    for path in sorted((ROOT / "thinwire").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS and node.args:
                where = f"{path.relative_to(ROOT)}:{node.lineno}"
                found |= {text: where for text in texts(node.args[0]) if re.search("[a-z]{2}", text)}
    return found


def test_every_message_has_its_entry():
    said, entries = messages(), {entry[2] for entry in ENTRY.finditer(PAGE.read_text())}
    assert len(said) > 300
    missing = [f"- `{text}`    ({where})" for text, where in said.items() if text not in entries]
    assert not missing, "add to docs/troubleshooting.md, under its theme:\n" + "\n".join(missing)


def test_no_entry_is_of_a_message_that_is_gone():
    page = PAGE.read_text()
    entries = {entry[2] for entry in ENTRY.finditer(page[page.index("## Messages") :])}
    gone = sorted(entries - messages().keys())
    assert not gone, "remove from docs/troubleshooting.md:\n" + "\n".join(gone)
