"""What mkdocs is told beyond mkdocs.yml: the repository's own files as pages, and one rule that Markdown has here."""

from __future__ import annotations

import json
import logging
import re
from itertools import pairwise
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

log = logging.getLogger("mkdocs.plugins.thinwire")
ROOT = Path(__file__).parent.parent.parent
ABOUT = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
SHOWN = {".py": "python", ".toml": "toml", ".sh": "bash", ".yaml": "yaml", ".yml": "yaml", ".ipynb": "", "": "docker"}
LINK = re.compile(r"\[([^\]]+)\]\((?:\.\./)+([\w./-]+)(#[\w-]+)?\)")
ITEM = re.compile(r"(-|\d+\.) ")


def on_config(config: MkDocsConfig) -> None:
    """Examples and the repository's own pages get their place in the navigation."""
    assert config.nav is not None
    examples = [{path.name: _page(path.name)} for path in _examples()]
    config.nav.append({"Examples": examples})
    reference = next(part["Reference"] for part in config.nav if "Reference" in part)
    reference += [f"about/{name}" for name in ABOUT]
    config.watch += [str(ROOT / "examples"), str(ROOT / "thinwire")]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Every example is a page that shows it; CHANGELOG, CONTRIBUTING and SECURITY are pages as they are."""
    for path in _examples():
        text = _notebook(path) if path.suffix == ".ipynb" else _fenced(path.read_text(), SHOWN[path.suffix])
        page = f"# {path.name}\n\n`examples/{path.name}`\n\n{text}\n"
        files.append(File.generated(config, _page(path.name), content=page))
    for name in ABOUT:
        files.append(File.generated(config, f"about/{name}", content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to files of the repository become links to their pages; a list without an empty line before it is told."""
    _check_lists(markdown, page.file.src_uri)
    up = "../" * page.file.src_uri.count("/")
    if page.file.src_uri.startswith("about/"):
        markdown = re.sub(r"\]\(docs/", "](../", markdown)

    def moved(match: re.Match[str]) -> str:
        text, name, anchor = match[1], match[2], match[3] or ""
        if name.startswith("examples/") and (ROOT / name).is_file():
            return f"[{text}]({up}{_page(Path(name).name)})"
        if name.startswith("thinwire/") and (ROOT / name).is_file():
            return f"{text} (`{name}`)"
        return f"[{text}]({up}about/{name}{anchor})" if name in ABOUT else match[0]

    return LINK.sub(moved, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """A figure is a link to itself, alone and as large as it is: some are wider than a phone can show."""
    return re.sub(r'(?<!">)(<img [^>]*?src="([^"]+)"[^>]*>)', r'<a href="\2">\1</a>', html)


def _examples() -> list[Path]:
    return sorted(path for path in (ROOT / "examples").iterdir() if path.is_file() and path.suffix in SHOWN)


def _page(name: str) -> str:
    return f"examples/{name.replace('.', '-')}.md"


def _fenced(text: str, language: str) -> str:
    fence = "`" * 4
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _notebook(path: Path) -> str:
    """Its cells: text as it is, its title as a heading, and code."""
    cells = json.loads(path.read_text())["cells"]
    parts = [("".join(cell["source"]), cell["cell_type"]) for cell in cells]
    texts = [_fenced(text, "python") if kind == "code" else re.sub("^# ", "## ", text) for text, kind in parts]
    return "\n\n".join(texts)


def _check_lists(markdown: str, where: str) -> None:
    """Repositories show such a list as one, this site as a line of text."""
    lines = re.sub(r"^```.*?^```", "", markdown, flags=re.MULTILINE | re.DOTALL).split("\n")
    in_list = False
    for before, line in pairwise(lines):
        goes_on = in_list and before.strip() != ""  # a line of an item that is not set in
        in_list = bool(ITEM.match(before)) or before.startswith("  ") or goes_on
        if ITEM.match(line) and before.strip() and not in_list and not before.startswith("#"):
            log.warning("%s: no empty line before the list that begins with %r", where, line[:60])
