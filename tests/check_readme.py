"""README and docs say nothing that is not there: paths exist, commands and make targets are real."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

from thinwire.cli import BENCHES, COMMANDS

ROOT = Path(__file__).parent.parent
PATH = re.compile(r"`((?:docs|tests|examples|benchmarks|thinwire)/[\w./-]+)`|\]\(([\w./-]+)\)")


def problems(page: Path) -> list[str]:
    text = page.read_text()
    found = []
    for match in PATH.finditer(text):
        name = match[1] or match[2]
        bases = (ROOT, page.parent)
        if not any((base / name).exists() for base in bases):
            found.append(f"{page.name}: {name} does not exist")
    for line in re.findall(r"^\s*(thinwire .+)$", text, flags=re.MULTILINE):
        words = shlex.split(line, comments=True)
        if words[1].startswith("-"):
            continue
        if words[1] not in COMMANDS or (words[1] == "bench" and words[2] not in BENCHES):
            found.append(f"{page.name}: no such command: {line}")
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    found += [f"{page.name}: no make target {t}" for t in re.findall(r"`?make ([a-z]+)\b`", text) if t not in targets]
    return found


def main() -> int:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = [problem for page in pages for problem in problems(page)]
    print("\n".join(found) or f"{len(pages)} pages: every path, command and make target exists")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
