"""A user's mistake is told before anything heavy is imported, and what is not installed is named with its extra."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from thinwire import installed
from thinwire.cli import main
from thinwire.config.presets import KEYS
from thinwire.theory import options as theory_options

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "transformers", "matplotlib", "numba", "sklearn", "scipy")
MISTAKES = """
train missing.toml
train missing.toml --local 4 --rate 100mbit
train model.toml
train preset.toml
train section.toml
train ranks.toml
train good.toml --wire nope
train good.toml --rate 100mbit
train --nope
plan
plan missing.toml
plan model.toml
plan folder
plan model.toml --sweep nope
report
report missing
report folder
report folder --out page.pdf
report folder --rate fast
lab run
lab run --hosts x -- true
lab run --rate fast -- true
lab run --topology missing.toml -- true
demo --rate fast
demo --steps 3
demo --latency fast
demo --loss 2
convex --seeds 99
convex --problem nope
doctor --peers somewhere --listen 29400
doctor --nope
bench nope
bench codecs --mib 0
bench codecs --nope
bench link --rate fast
bench link --rates fast
bench link --streams 0
bench link --loss 200%
bench link --size 10
bench link --rates 10mbit --streams 2
bench allreduce --rate fast
bench allreduce --hosts 1
bench allreduce --numel x
bench allreduce --steps 0
bench pipeline --rates fast
bench pipeline --shares 2
bench pipeline --hosts 1
bench pipeline --resume
bench train --wires nope
bench train --shares 2
bench train --seeds 0
bench train --resume
bench optimus --rate fast
bench optimus --rungs nope
"""
FILES = {
    "model.toml": '[model]\nhidden = "x"\n',
    "preset.toml": '[wire]\npreset = "nope"\n',
    "section.toml": "[wire]\nnope = 1\n",
    "ranks.toml": "[mesh]\ndp = 2\n",
    "good.toml": "",
}
RUN = f"""
import sys
from thinwire.cli import main
for line in sys.stdin.read().split("\\n"):
    try:
        status = main(line.split())
    except SystemExit as refused:
        status = refused.code
    loaded = [name for name in {HEAVY!r} if name in sys.modules]
    if status != 2 or loaded:
        sys.exit(f"thinwire {{line}}: status {{status}}, imported {{', '.join(loaded)}}")
"""


def python(program: str, given: str = "", folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK")}
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.run(
        [sys.executable, "-c", program], input=given, cwd=folder, env=environment, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip


def test_mistakes_are_told_without_torch(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "folder").mkdir()
    done = python(RUN, MISTAKES.strip(), tmp_path)
    assert done.returncode == 0, done.stderr[-1000:]


def test_import_is_lazy():
    """`import thinwire` takes next to nothing; what data parallel and pipelines need is in the core of the package."""
    heavy = (*HEAVY, "rich")
    done = python(f"import sys, thinwire; print([name for name in {heavy!r} if name in sys.modules])")
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
    names = "Channel", "Wire", "all_reduce", "codecs", "collectives", "memory", "optim"
    program = (
        f"import sys, thinwire as tw; [getattr(tw, name) for name in {names!r}]\n"
        "[getattr(tw.parallel, name) for name in tw.parallel.__all__]\n"
        "print([n for n in ('matplotlib', 'sklearn', 'transformers', 'numba') if n in sys.modules])"
    )
    done = python(program)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_extras():
    """The core has four dependencies; every module that a command looks for is in the extra that it names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert _names(project["dependencies"]) == {"torch", "numpy", "numba", "rich"}
    extras = {extra: _names(needed) for extra, needed in project["optional-dependencies"].items()}
    wanted = {
        "train": installed.MODELS + installed.ADAPTERS + installed.FIGURES,
        "theory": installed.THEORY,
        "figures": installed.FIGURES,
        "bench": installed.FIGURES,
    }
    for extra, modules in wanted.items():
        assert {installed.PACKAGES.get(name, name) for name in modules} <= extras[extra], extra
    assert "[train,theory,bench,test]" in (ROOT / "Makefile").read_text()


def _names(requirements: list[str]) -> set[str]:
    return {re.match(r"[\w-]+", text)[0] for text in requirements}


def test_what_is_not_installed_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(installed, "FIGURES", ("no_such_package",))
    monkeypatch.setattr(theory_options, "THEORY", ("no_such_package", "sklearn"))
    monkeypatch.setitem(installed.PACKAGES, "no_such_package", "its-name")
    plan = str(tmp_path / "plan.toml")
    assert main(["plan", "--init", plan]) == 0
    for words, extra in (
        (["plan", plan, "--timeline", str(tmp_path / "step.png")], "figures"),
        (["plan", plan, "--sweep", "rate=1mbit..1gbit"], "figures"),
        (["bench", "pipeline", "--figure", str(tmp_path / "x.png")], "figures"),
        (["demo", "--out", str(tmp_path / "demo")], "figures"),
        (["convex", "--out", str(tmp_path / "convex")], "theory"),
    ):
        capsys.readouterr()
        assert main(words) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and f"needs its-name: pip install 'thinwire[{extra}]'" in lines[0], lines
    assert [path.name for path in tmp_path.iterdir()] == ["plan.toml"]


def test_wire_keys_are_the_wires():
    """presets.py names them without importing the Wire."""
    from dataclasses import fields

    from thinwire.config.wire import Wire

    assert ["preset", *(field.name for field in fields(Wire))] == list(KEYS)


@pytest.mark.parametrize("name", ["py.typed"])
def test_types_are_published(name):
    assert (ROOT / "thinwire" / name).exists()
