"""The lab without root: what the other files test as whoever runs them, run again as nobody."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from lab_support import require_network

pytestmark = [pytest.mark.lab, pytest.mark.timeout(200)]
require_network()

NOBODY = 65534
HERE = Path(__file__).parent
CHOSEN = "20mbit or 1gbit or (counters and 1000000) or reach or reshape or latency or failing or hang or survives"


def as_nobody(*words: str, timeout: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words,
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        cwd=HERE.parent,
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join([*filter(None, sys.path)]),
            "HOME": "/nowhere",
        },
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def interpreter() -> str:
    """A Python of this version that nobody may execute; ours may lie in a private home."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for path in (sys.executable, f"/usr/bin/{version}", f"/usr/local/bin/{version}"):
        try:
            if as_nobody(path, "-c", "import pytest, torch, thinwire.lab", timeout=60).returncode == 0:
                return path
        except OSError:
            continue
    pytest.skip(f"no {version} here that an unprivileged user may execute with these packages")


@pytest.mark.skipif(os.geteuid() != 0, reason="the other lab tests are running without privileges already")
def test_the_same_without_root() -> None:
    files = [str(HERE / "test_lab_network.py"), str(HERE / "test_lab_failures.py")]
    pytest_words = ("-m", "pytest", "-p", "no:cacheprovider", "-k", CHOSEN, *files)
    run = as_nobody(interpreter(), *pytest_words, timeout=180)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert "passed" in run.stdout or run.stdout.strip().endswith("[100%]")
    assert "skipped" not in run.stdout.lower()
