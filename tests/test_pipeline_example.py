"""The plain script and the compressed one: a few lines apart, and equally good."""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def launch(name: str) -> str:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLES / name)]
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
