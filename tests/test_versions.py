"""Versions of torch: one list of them, private names in one room, and a refusal in one line where they are others."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

from thinwire.doctor import pipeline
from thinwire.errors import UsageError
from thinwire.torch_private.pipelining import OpenStage
from thinwire.torch_private.versions import NEWEST, OLDEST, REQUIREMENT, TRIED, is_tried, require

ROOT = Path(__file__).parent.parent
NOT_TORCHS = {  # private names of others, or of our own classes, that thinwire uses
    "_replace", "_exit", "_shutdown", "_run_exitfuncs", "_negative_number_matcher", "_attn_implementation", "_start",
    "_send", "_train_step",
}  # fmt: skip


def test_the_package_asks_for_the_versions_that_were_tried():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert REQUIREMENT in project["dependencies"]
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
    assert is_tried(pinned)
    assert list(TRIED) == [(2, minor) for minor in range(OLDEST[1], NEWEST[1] + 1)]


def test_the_page_names_every_version():
    rows = re.findall(r"^\| (\d+)\.(\d+)\S* \|", (ROOT / "docs" / "versions.md").read_text(), re.MULTILINE)
    assert [(int(a), int(b)) for a, b in rows] == list(TRIED)


@pytest.mark.parametrize(
    ("version", "tried"), [("2.11.0", True), ("2.15.3+cu132", True), ("2.10.1", False), ("2.16.0a0+git12", False)]
)
def test_is_tried(version, tried):
    assert is_tried(version) == tried


class Stage:
    def __init__(self) -> None:
        self._cache = {}

    def send(self) -> None: ...


class Later(Stage):
    def __init__(self) -> None:
        super().__init__()


def test_names_are_found_in_classes_modules_and_objects():
    require("x", Later, "send", "_cache")
    require("x", re, "compile")
    with pytest.raises(UsageError) as refusal:
        require("CompressedStage", Later, "send", "_states")
    assert re.fullmatch(
        r"CompressedStage: torch 2\.\S+ has no Later\._states: thinwire works with torch 2\.11 to 2\.\d+: "
        r"pip install 'torch>=2\.11,<2\.\d+'",
        str(refusal.value),
    )


def test_what_torch_2_11_refuses_outside_a_bracket_is_one_line(monkeypatch):
    """That version compares every batch with the first; others have no such check."""

    def compare(stage, args, kwargs):
        raise RuntimeError("expected (16, 8), actual (90, 8)")

    monkeypatch.setattr(OpenStage.__base__, "_validate_fwd_input", compare, raising=False)
    stage = OpenStage.__new__(OpenStage)
    with pytest.raises(UsageError, match=r"actual \(90, 8\): outside a bracket .* `with stage\.step\(train=False"):
        stage._validate_fwd_input((), {})
    monkeypatch.setattr(OpenStage, "knows_shapes", lambda stage: True)
    stage._validate_fwd_input((), {})


def private_names(tree: ast.AST) -> set[str]:
    """Private attributes of something else than `self` and `super()`, and private parts of torch that are imported."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match(r"_[^_]", node.attr):
            owner = node.value.func if isinstance(node.value, ast.Call) else node.value  # super() is a call
            if not (isinstance(owner, ast.Name) and owner.id in ("self", "cls", "super")):
                found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
            found |= {name for name in names if name.startswith("_")}
    return found


def own_names(tree: ast.AST) -> set[str]:
    """Private attributes that are made here, by `def` or by an assignment."""
    made = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    made |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    return made | {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


@pytest.mark.slow
def test_private_names_of_torch_stay_in_their_room():
    room = ROOT / "thinwire" / "torch_private"
    trees = {p: ast.parse(p.read_text()) for p in (ROOT / "thinwire").rglob("*.py") if room not in p.parents}
    made = set().union(*map(own_names, trees.values()))
    for path, tree in trees.items():
        foreign = private_names(tree) - NOT_TORCHS
        foreign |= {
            n.attr for n in ast.walk(tree)
            if isinstance(n, ast.Attribute) and re.match(r"_[^_]", n.attr) and n.attr not in made | NOT_TORCHS
        }  # fmt: skip
        assert not foreign, f"{path.relative_to(ROOT)}: {sorted(foreign)}: put it into thinwire/torch_private"


@pytest.mark.slow
def test_doctor_runs_a_compressed_pipeline(monkeypatch):
    monkeypatch.setattr(pipeline, "LIMIT", 250.0)
    (finding,) = pipeline.check_pipeline()
    assert finding.ok and "preset max: 2 steps" in finding.detail, finding


@pytest.mark.parametrize(
    ("script", "limit", "detail", "needed"),
    [("echo first >&2; echo 'no such name' >&2; exit 1", 60.0, "no such name", True),
     ("exec sleep 600", 0.1, "not done after 0 s", False)],
)  # fmt: skip
def test_doctor_says_why_a_pipeline_does_not_run(script, limit, detail, needed, tmp_path, monkeypatch):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(pipeline, "LIMIT", limit)
    (finding,) = pipeline.check_pipeline()
    assert not finding.ok and finding.detail == detail and finding.remedy and finding.needed == needed
