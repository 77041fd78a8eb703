"""The plain script and the compressed one: a few lines apart, and equally good; and a method of one's own."""

from __future__ import annotations

import difflib
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def launch(name: str, ranks: int = 2) -> str:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(EXAMPLES / name)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=140)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.timeout(290)
def test_compressed_script_is_as_good():
    accuracy = []
    for name in ("pipeline_plain.py", "pipeline_compressed.py"):
        said = launch(name)
        accuracy.append(float(re.search(r"held-out accuracy ([\d.]+)", said)[1]))
    assert accuracy[0] > 0.9 and accuracy[1] > accuracy[0] - 0.03
    assert "rejected=0" in said


def test_the_difference_is_a_few_lines():
    plain, ours = ((EXAMPLES / n).read_text() for n in ("pipeline_plain.py", "pipeline_compressed.py"))
    bodies = [text[text.index("from __future__") :].splitlines() for text in (plain, ours)]
    added = [line for line in difflib.ndiff(*bodies) if line.startswith("+ ") and line[2:].strip()]
    assert len(added) <= 6, added


def test_a_codec_and_a_memory_of_ones_own(capsys):
    """What docs/extend.md says is enough: in this process, then on two ranks."""
    runpy.run_path(str(EXAMPLES / "own_method.py"), run_name="__main__")
    said = capsys.readouterr().out
    error = {name: float(value) for name, value in re.findall(r"^(\w+): relative error (\S+)", said, re.MULTILINE)}
    assert error["DIANA"] < 1e-14 < 1e-11 < error["DCGD"] < 1e-8, said
    said = launch("own_method.py")
    assert all(float(value) > 0.93 for value in re.findall(r"accuracy ([\d.]+)", said)) and "times smaller" in said


def test_pipelines_and_replicas_in_one_script():
    """Preset max: far fewer bytes than 17.3 and 79.6 MB, which the same script sends with off."""
    said = launch("three_d.py", ranks=4)
    right, along, between = map(float, re.search(r"accuracy ([\d.]+); ([\d.]+) MB \D+ ([\d.]+) between", said).groups())
    assert right > 0.9 and along < 17.3 / 8 and between < 79.6 / 7
