"""The plain script and the compressed one: a few lines apart, and equally good; and a method of one's own."""

from __future__ import annotations

import difflib
import re
import runpy
from pathlib import Path

import pytest
from forked_ranks import printed

EXAMPLES = Path(__file__).parent.parent / "examples"


SCRIPTS = {
    "plain": ("pipeline_plain.py", 2), "compressed": ("pipeline_compressed.py", 2), "own": ("own_method.py", 2),
    "3D": ("three_d.py", 4), "by hand": ("two_stages.py", 2), "by hand, plain": ("two_stages.py", 2, "--plain"),
}  # fmt: skip


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """What each script prints."""
    found = printed(*((str(EXAMPLES / name), ranks, words) for name, ranks, *words in SCRIPTS.values()))
    return dict(zip(SCRIPTS, found, strict=True))


@pytest.mark.timeout(290)
def test_compressed_script_is_as_good(said):
    plain, ours = (float(re.search(r"held-out accuracy ([\d.]+)", said[name])[1]) for name in ("plain", "compressed"))
    assert plain > 0.9 and ours > plain - 0.03
    assert said["compressed"].count("rejected=0") == 2


def test_a_wire_by_hand(said):
    """Two processes over Gloo: compressed and plain reach the same accuracy, with a quarter of the bytes."""
    (right, sent), (plain_right, plain_sent) = (
        map(float, re.search(r"accuracy ([\d.]+), ([\d.]+) MB", said[name]).groups())
        for name in ("by hand", "by hand, plain")
    )
    assert abs(right - plain_right) < 0.02 and sent < 0.25 * plain_sent


def test_the_difference_is_a_few_lines():
    plain, ours = ((EXAMPLES / n).read_text() for n in ("pipeline_plain.py", "pipeline_compressed.py"))
    bodies = [text[text.index("from __future__") :].splitlines() for text in (plain, ours)]
    added = [line for line in difflib.ndiff(*bodies) if line.startswith("+ ") and line[2:].strip()]
    assert len(added) <= 6, added


def test_a_codec_and_a_memory_of_ones_own(said, capsys):
    """What docs/extend.md says is enough: in this process, then on two ranks."""
    runpy.run_path(str(EXAMPLES / "own_method.py"), run_name="__main__")
    here = capsys.readouterr().out
    error = {name: float(value) for name, value in re.findall(r"^(\w+): relative error (\S+)", here, re.MULTILINE)}
    assert error["DIANA"] < 1e-14 < 1e-11 < error["DCGD"] < 1e-8, here
    right = [float(value) for value in re.findall(r"accuracy ([\d.]+)", said["own"])]
    assert len(right) == 2 and min(right) > 0.93 and "times smaller" in said["own"]


def test_pipelines_and_replicas_in_one_script(said):
    """Preset max: far fewer bytes than 17.3 and 79.6 MB, which the same script sends with off."""
    found = re.search(r"accuracy ([\d.]+); ([\d.]+) MB \D+ ([\d.]+) between", said["3D"])
    right, along, between = map(float, found.groups())
    assert right > 0.9 and along < 17.3 / 8 and between < 79.6 / 7
