"""`make compat`: the fast tests on the oldest, the pinned and the newest torch, each in an environment of its own.

    python tests/compat.py                # all three
    python tests/compat.py 2.15 2.12      # these

An environment is .compat/pythonX.Y-torchX.Y: made once, and used again until that folder is deleted. Everything but
torch and what comes with it is as constraints.txt says. The log of a run is beside its environment.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
COMPAT = ROOT / ".compat"
FAST = [
    f"tests/test_{name}.py"
    for name in (
        "versions", "pipeline", "pipeline_parts", "pipeline_example", "ddp", "fsdp", "tied", "train_plain", "train_run",
        "channel", "codecs", "collectives", "kernels_gpu", "planner_schedule",
    )
]  # fmt: skip
WITH_TORCH = ("torch", "triton", "nvidia-", "cuda-")  # what a version of torch brings is its own affair


def chosen() -> list[str]:
    """Minor versions: the oldest and newest of TRIED, and the pinned one. Read as text: torch need not be there yet."""
    source = (ROOT / "thinwire" / "torch_private" / "versions.py").read_text()
    tried = [f"{a}.{b}" for a, b in re.findall(r"\((\d+), (\d+)\)", source.split("TRIED = ")[1].splitlines()[0])]
    pinned = re.search(r"^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    return [tried[0], pinned[1], tried[-1]]


def prepare(version: str) -> Path:
    """The environment's interpreter, after installing what is not there."""
    place = COMPAT / f"python{sys.version_info[0]}.{sys.version_info[1]}-torch{version}"
    python, stamp = place / "bin" / "python", place / ".installed"
    if stamp.exists():
        return python
    print(f"installing {place.relative_to(ROOT)}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    (place / "constraints.txt").write_text("\n".join(x for x in lines if not x.startswith(WITH_TORCH)) + "\n")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["-c", str(place / "constraints.txt"), f"torch=={version}.*", f"{ROOT}[train,test]"]
    subprocess.run(pip, check=True)
    stamp.touch()
    return python


def test(version: str, python: Path) -> list[str]:
    """One row of the table: versions, how the tests went, minutes."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    ask = "import platform, torch; print(platform.python_version(), torch.__version__)"
    found = subprocess.run([python, "-c", ask], env=env, capture_output=True, text=True, check=True).stdout.split()
    began, log = time.monotonic(), COMPAT / f"torch{version}.log"
    with open(log, "w") as file:
        words = [str(python), "-m", "pytest", "-p", "no:cacheprovider", *FAST]
        done = subprocess.run(words, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT)
    last = log.read_text().strip().splitlines()[-1].strip("= ")
    return [*found, "yes" if done.returncode == 0 else "NO", last, f"{(time.monotonic() - began) / 60:.1f}"]


def main(versions: list[str]) -> int:
    rows = [["python", "torch", "passes", "tests", "minutes"]]
    for version in versions or chosen():
        rows.append(test(version, prepare(version)))
        print(f"torch {version}: {rows[-1][3]}", flush=True)
    widths = [max(map(len, column)) for column in zip(*rows)]
    print("\n" + "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows))
    return 0 if all(row[2] == "yes" for row in rows[1:]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
