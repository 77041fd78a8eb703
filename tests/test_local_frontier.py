"""benchmarks/quality/local_frontier.py without training: which runs it makes, that it resumes, and what it reports."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks" / "quality"


@pytest.fixture(autouse=True)
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_the_grid_is_whole_and_resumes(tmp_path: Path) -> None:
    from frontier_jobs import OUR_HS, STAGES, Protocol, key, ours
    from local_frontier import done, fleets, is_done, read_jobs
    from stacked_model import Size
    from stacked_sites import table_of

    protocol = Protocol(5000, 64, Size())
    jobs = protocol.stage("frontier")
    assert {job.every for job in jobs if job.method == "ours"} == set(OUR_HS)
    assert table_of(ours(), 10) == table_of({"preset": "local-max"}, 10), "ablations start from the preset"
    for stage in STAGES:
        made = protocol.stage(stage)
        assert len(made) == len({str(job) for job in made}), stage
        assert all(not job.every or job.table or job.method == "large batch" for job in made), stage
    together = fleets(jobs, 4)
    assert sum(map(len, together)) == len(jobs) and all(len({j.copies for j in some}) == 1 for some in together)
    path = tmp_path / "frontier.jsonl"
    line = json.dumps(key(jobs[0], "frontier") | {"held": 1.0})
    path.write_text(f"{line}\n{line[:50]}")  # the last line was cut off
    found = done(path)
    assert len(found) == 1 and is_done(jobs[0], "frontier", found) and not is_done(jobs[1], "frontier", found)
    path.write_text(json.dumps(asdict(jobs[3]) | {"size": [512, 8, 256]}) + "\n")
    assert read_jobs(path) == [jobs[3]]


def test_the_report_is_paired_and_counts_rounds() -> None:
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
