"""`make compat`: the fast tests on the oldest, the pinned and the newest torch, each in an environment of its own.

    python tests/compat.py                        # all three
    python tests/compat.py 2.15 2.12              # these
    python tests/compat.py --envs /big/disk 2.15  # with environments in that folder instead of .compat
    python tests/compat.py --install 2.15         # only make the environment
    python tests/compat.py --tests ddp,fsdp 2.15  # only tests/test_ddp.py and tests/test_fsdp.py

An environment is pythonX.Y-torchX.Y: made once, and used again until it is deleted. Everything but torch and what comes
with it is as constraints.txt says. The log of a run is beside its environment.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
FAST = (
    "versions,pipeline,pipeline_parts,pipeline_example,ddp,fsdp,tied,train_plain,train_run,channel,codecs,collectives,"
    "kernels,kernels_gpu,kernels_gpu_select,planner_schedule"
)
WITH_TORCH = ("torch", "triton", "nvidia-", "cuda-")  # what a version of torch brings is its own affair


def chosen() -> list[str]:
    """Minor versions: the oldest and newest of TRIED, and the pinned one. Read as text: torch need not be there yet."""
    source = (ROOT / "thinwire" / "torch_private" / "versions.py").read_text()
    tried = [f"{a}.{b}" for a, b in re.findall(r"\((\d+), (\d+)\)", source.split("TRIED = ")[1].splitlines()[0])]
    pinned = re.search(r"^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    return [tried[0], pinned[1], tried[-1]]


def prepare(place: Path, version: str) -> Path:
    """The interpreter of the environment in `place`, after installing what is not there."""
    python, stamp = place / "bin" / "python", place / ".installed"
    if stamp.exists():
        return python
    print(f"installing {place}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    (place / "constraints.txt").write_text("\n".join(x for x in lines if not x.startswith(WITH_TORCH)) + "\n")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["-c", str(place / "constraints.txt"), f"torch=={version}.*", f"{ROOT}[train,theory,test]"]
    subprocess.run(pip, check=True)
    stamp.touch()
    return python


def test(python: Path, log: Path, tests: list[str]) -> list[str]:
    """One row of the table: versions, how the tests went, minutes."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    ask = "import platform, torch; print(platform.python_version(), torch.__version__)"
    found = subprocess.run([python, "-c", ask], env=env, capture_output=True, text=True, check=True).stdout.split()
    began = time.monotonic()
    with open(log, "w") as file:
        words = [str(python), "-m", "pytest", "-p", "no:cacheprovider", *(f"tests/test_{name}.py" for name in tests)]
        done = subprocess.run(words, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT)
    last = log.read_text().strip().splitlines()[-1].strip("= ")
    return [*found, "yes" if done.returncode == 0 else "NO", last, f"{(time.monotonic() - began) / 60:.1f}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=chosen(), help="minor versions of torch")
    parser.add_argument("--envs", type=Path, default=ROOT / ".compat", help="the folder of the environments and logs")
    parser.add_argument("--tests", default=FAST, help="names of test files, with commas (default: %(default)s)")
    parser.add_argument("--install", action="store_true", help="make the environments, run nothing")
    options = parser.parse_args()
    rows = [["python", "torch", "passes", "tests", "minutes"]]
    for version in options.versions:
        place = options.envs.absolute() / f"python{sys.version_info[0]}.{sys.version_info[1]}-torch{version}"
        python = prepare(place, version)
        if not options.install:
            rows.append(test(python, place.with_name(f"{place.name}.log"), options.tests.split(",")))
            print(f"torch {version}: {rows[-1][3]}", flush=True)
    widths = [max(map(len, column)) for column in zip(*rows)]
    print("\n" + "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows))
    return 0 if all(row[2] == "yes" for row in rows[1:]) else 1


if __name__ == "__main__":
    sys.exit(main())
