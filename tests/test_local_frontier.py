"""benchmarks/quality/local_frontier.py without training: which runs it makes, that it resumes, and what it reports."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks" / "quality"


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Lines of the tuning: the second candidate for ours is the best."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from frontier_jobs import tuning
    from stacked_model import Size

    out = []
    for number, job in enumerate(tuning(100, 16, Size())):
        held = 1.0 if job.method == "ours: hops" and job.lr == 2e-3 else 2.0 + number / 1000
        out.append(json.loads(json.dumps(asdict(job))) | {"held": held, "held_anchor": 3.0, "stage": "tune"})
    return out


def test_the_grid_takes_what_the_tuning_found(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    from frontier_jobs import STAGES, Chosen, key
    from local_frontier import done, fleets, is_done
    from stacked_model import Size

    chosen = Chosen(rows, 5000, 16, Size())
    jobs = chosen.stage("frontier")
    ours = [job for job in jobs if job.method == "ours"]
    assert {job.every for job in ours} == {10, 30, 100} and all(job.lr == 2e-3 and job.flush for job in ours)
    assert ours[0].table["wire"]["gradient"]["collective"] == "two_hop"
    assert len(jobs) == len({str(job) for job in jobs}) and sum(job.method == "fp32 per step" for job in jobs) == 1
    together = fleets(jobs, 4)
    assert sum(map(len, together)) == len(jobs) and all(len({j.copies for j in some}) == 1 for some in together)
    for stage in STAGES[1:]:
        assert all(not job.every or job.table or job.method == "large batch" for job in chosen.stage(stage)), stage
    path = tmp_path / "frontier.jsonl"
    line = json.dumps(key(jobs[0], "frontier") | {"held": 1.0})
    path.write_text(f"{line}\n{line[:50]}")  # the last line was cut off
    found = done(path)
    assert len(found) == 1 and is_done(jobs[0], "frontier", found) and not is_done(jobs[1], "frontier", found)


def test_the_report_is_paired_and_counts_rounds(rows: list[dict[str, Any]]) -> None:
    from local_frontier_report import over, step_seconds, steps_to, table

    def row(method: str, every: int, seed: int, held: float, sent: float, given: dict[str, Any]) -> dict[str, Any]:
        sizes = {"bytes": 1000 * sent, "bytes_per_token": sent, "fp32_bytes_per_token": 600.0, "table": given}
        kind = {"method": method, "sites": 4, "every": every, "seed": seed, "apart": False, "stage": "grid"}
        return {**kind, **sizes, "held": held, "held_anchor": held, "steps": 100, "curve": [(50, 2 * held)]}

    exact = [row("fp32 per step", 0, seed, 1.0 + seed, 600.0, {}) for seed in (0, 1)]
    mine = [row("SparseLoCo", 10, seed, 1.01 * (1.0 + seed), 0.5, {"preset": "sparseloco"}) for seed in (0, 1)]
    found = over({r["seed"]: r for r in mine}, {r["seed"]: r for r in exact})
    assert found is not None and found[0] == pytest.approx(1.0) and found[1] == pytest.approx(0.0, abs=1e-9)
    assert "1,200×" in table([*exact, *mine])[-1]
    assert steps_to(mine[0], 1.5 * 1.01) == pytest.approx(75) and steps_to(mine[0], 0.5) is None
    # ten rounds of 50 bytes each, one latency, of ten steps
    assert step_seconds(mine[0], 8.0, 0.1) == pytest.approx(0.1 + (50 + 0.05) / 10)
