"""README and docs say nothing that is not there: paths, links and headings exist, commands take the options they are
given, Python parses; and every public name has a docstring and stands on a page."""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from thinwire.cli import _parser

ROOT = Path(__file__).parent.parent
PATH = re.compile(
    r"`((?:docs|tests|examples|benchmarks|thinwire)/[\w./-]+)`|\]\(([\w./-]+)\)|(?<!\S)((?:examples|benchmarks)/\w+\.py)"
)
LINK = re.compile(r"\]\(([\w./-]*)#([\w-]+)\)")
INDENTED = re.compile(r"(?:^ {4}.*\n)+", re.MULTILINE)
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^(?:\w*\$ |torchrun .*(?:-m|--no-python) )?(thinwire(?: .+|))$", re.MULTILINE)
INLINE = re.compile(r"`(thinwire [^`\n]+)`")
ROOMS = ("thinwire", "thinwire.parallel", "thinwire.codecs", "thinwire.memory", "thinwire.collectives")


def missing_paths(page: Path, text: str) -> Iterator[str]:
    for match in PATH.finditer(text):
        name = match[1] or match[2] or match[3]
        if not any((base / name).exists() for base in (ROOT, page.parent)):
            yield f"{name} does not exist"
    for name, heading in LINK.findall(text):
        target = page.parent / name if name else page
        if not target.exists() or heading not in anchors(target.read_text()):
            yield f"{name}#{heading}: no such heading"


def anchors(text: str) -> set[str]:
    """Headings as links spell them: lower case, hyphens for spaces, nothing but letters and digits beside."""
    titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def wrong_commands(text: str) -> Iterator[str]:
    """Parsed by the command line's own parser, not run."""
    blocks = [textwrap.dedent(block) for block in INDENTED.findall(text)] + [body for _, body in FENCED.findall(text)]
    lines = [line for block in blocks for line in COMMAND.findall(block.replace("\\\n", " "))]
    for line in lines + INLINE.findall(text):
        if line.startswith("thinwire was "):  # a message that docs/troubleshooting.md explains
            continue
        words = [word for word in shlex.split(line, comments=True)[1:] if word not in ("…", "...")]
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                _parser(words).parse_args(words)
        except SystemExit as end:
            if end.code:
                yield f"{line}: {said.getvalue().strip().splitlines()[-1]}"


def wrong_python(text: str) -> Iterator[str]:
    for language, body in FENCED.findall(text):
        if language == "diff":  # what it becomes
            body = "".join(line[1:] + "\n" for line in body.splitlines() if line[:1] in (" ", "+"))
        if language in ("python", "diff"):
            try:
                ast.parse(textwrap.dedent(body))
            except SyntaxError as error:
                yield f"a {language} block does not parse: {error}: {body.splitlines()[0]}"


def wrong_targets(text: str) -> Iterator[str]:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    yield from (f"no make target {t}" for t in re.findall(r"`?make ([a-z]+)\b`", text) if t not in targets)


def unexplained(pages: str) -> Iterator[str]:
    for room in ROOMS:
        module = importlib.import_module(room)
        names = module.__all__
        for name in names:
            if not re.search(rf"\b{name}\b", pages):
                yield f"{room}.{name}: on no page"
            value = getattr(module, name)
            if not isinstance(value, (str, ModuleType)) and not (value.__doc__ or "").strip():
                yield f"{room}.{name}: no docstring"


def main() -> int:
    pages = {page: page.read_text() for page in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))}
    found = []
    for page, text in pages.items():
        problems = (*missing_paths(page, text), *wrong_commands(text), *wrong_python(text), *wrong_targets(text))
        found += [f"{page.name}: {problem}" for problem in problems]
    found += unexplained("\n".join(pages.values()))
    print("\n".join(found) or f"{len(pages)} pages: paths, links, commands, code and public names are right")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
