"""The command line as a person meets it: help that works, mistakes in one line with status 2."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import thinwire
from thinwire.cli import BENCHES, COMMANDS, main
from thinwire.config.presets import PRESETS
from thinwire.doctor import command as doctor


@pytest.mark.parametrize("words", [[], *([name] for name in COMMANDS), *(["bench", name] for name in BENCHES)], ids=str)
def test_help_teaches(words, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*words, "--help"])
    assert stop.value.code == 0 and "usage: thinwire" in capsys.readouterr().out


def test_bare_commands_show_what_there_is(capsys):
    for words, names in (([], COMMANDS), (["bench"], BENCHES)):
        assert main(words) == 0
        said = capsys.readouterr().out
        assert all(name in said for name in names)
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"thinwire {thinwire.__version__}\n"


def test_every_public_name_is_there():
    assert set(dir(thinwire)) == set(thinwire.__all__)
    for name in thinwire.__all__:
        assert getattr(thinwire, name), name


@pytest.mark.parametrize(
    "words",
    [["fly"], ["bench", "wings"], ["convex", "--problem", "travelling-salesman"], ["bench", "codecs", "--mib", "0"]],
    ids=str,
)
def test_mistakes_are_one_line_and_status_two(words):
    done = subprocess.run(
        [sys.executable, "-m", "thinwire.cli", *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr and done.stderr.strip().splitlines()[-1].startswith("thinwire")


@pytest.mark.slow
def test_doctor_finds_what_the_library_needs(tmp_path, capsys):
    assert main(["doctor", "--json", str(tmp_path / "d.json")]) == 0
    findings = {f["name"]: f for f in json.loads((tmp_path / "d.json").read_text())}
    assert findings["torch"]["ok"] and findings["numba"]["ok"] and findings["gloo"]["ok"]
    assert all(f["ok"] or f["remedy"] for f in findings.values())
    assert "What this machine can do" in capsys.readouterr().out


@pytest.mark.slow
def test_bench_codecs_measures_and_writes(tmp_path, capsys):
    assert main(["bench", "codecs", "--mib", "1", "--repeats", "1", "--json", str(tmp_path / "out" / "b.json")]) == 0
    result = json.loads((tmp_path / "out" / "b.json").read_text())
    tasks = {row["task"] for row in result["rows"]}
    assert {"4-bit encode", "4-bit decode", "select 1 %"} <= tasks
    sent = [PRESETS["max"][way]["bits"] for way in ("forward", "backward")]
    for bits in sent:  # what the command recommends is measured
        assert {f"{bits}-bit encode", f"{bits}-bit decode", f"{bits}-bit delta encode"} <= tasks
    said = capsys.readouterr().out
    assert "Ratios" in said and "asked" not in said and result["ratios"][0].keys() == {"what", "ratio"}


def test_json_into_nowhere_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "CHECKS", [doctor.check_python])
    assert main(["doctor", "--json", "/proc/nowhere/x.json"]) == 2
    assert "cannot write /proc/nowhere/x.json" in capsys.readouterr().err


def test_importing_thinwire_is_light():
    """Neither the package nor the command's help imports torch."""
    code = "import sys, thinwire.cli; thinwire.cli._parser([]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
