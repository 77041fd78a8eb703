"""benchmarks/quality/quality.py: a tiny run end to end, what it counts, that it resumes, and its statistics."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks" / "quality"


def quick(folder: Path, *more: str) -> str:
    command = [sys.executable, str(BENCHMARKS / "quality.py"), "--quick", "--json", str(folder / "runs.jsonl")]
    done = subprocess.run(
        [*command, "--data", str(folder / "data.pt"), *more], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_quick_run_resumes(tmp_path: Path) -> None:
    out = quick(tmp_path, "--figure", str(tmp_path / "frontier.png"))
    lines = (tmp_path / "runs.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 6  # three methods, one rate, two seeds
    assert all(row["ranks_agree"] and row["held"] < 3 for row in rows), rows
    exact = {row["bytes"] for row in rows if row["method"] == "dense"}
    n = rows[0]["parameters"]
    # a ring of four sends 2·(3/4)·4 bytes per value; flags and checksums that the ranks agree on come on top
    assert all(6 * n <= sent <= 6 * n + 1000 for sent in exact)
    assert all(row["bytes"] < 0.1 * 6 * n for row in rows if row["method"].startswith("OkTopk"))
    assert (tmp_path / "frontier.png").stat().st_size > 10_000
    assert "| OkTopk 5 %" in out
    (tmp_path / "runs.jsonl").write_text("\n".join([*lines[:-1], lines[-1][:40]]))  # the last line was cut off
    again = quick(tmp_path)
    assert sum(line.startswith("6:") for line in again.splitlines()) == 1 and "5:" not in again


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import quality_report

    return quality_report


def test_differences_are_paired(report) -> None:
    def row(method: str, rate: float, seed: int, held: float | None) -> dict:
        sizes = {"bytes": 50.0 if method == "fp16" else 100.0, "steady_bytes": 50.0 if method == "fp16" else 100.0}
        return {"task": "cnn", "method": method, "rate": rate, "seed": seed, "steps": 9, "held": held, **sizes}

    rows = [row("dense", 0.1, 0, 1.0), row("dense", 0.2, 0, 1.5), row("dense", 0.1, 1, 2.0), row("dense", 0.1, 2, 4.0)]
    rows += [row("fp16", 0.1, 0, None), row("fp16", 0.2, 0, 1.01), row("fp16", 0.2, 1, 2.02), row("fp16", 0.2, 2, 4.04)]
    dense, half = report.summarise(rows, Namespace(tasks=["cnn"], steps=9, rates=2))
    assert dense.differences == (0, 0, 0) and dense.rate == 0.1
    assert half.rate == 0.2 and half.mean == pytest.approx(0.01) and half.interval == pytest.approx(0, abs=1e-12)
    assert half.verdict == "no" and half.ratio == 2
    assert "| fp16 | 0.2* | 2.3567 | +1.00 ± 0.00 |" in report.markdown([dense, half])
