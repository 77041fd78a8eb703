"""`thinwire bench allreduce` as a user meets it, and its byte counts against the lab's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lab_support import require_network

from thinwire import cli
from thinwire.bench import allreduce as bench
from thinwire.bench import allreduce_count
from thinwire.bench.allreduce import contestants

pytestmark = [pytest.mark.lab, pytest.mark.timeout(90)]
require_network()


def test_counts_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Dense and OkTopk: closed form = handed over = counted from outside, up to headers and what goes beside."""
    record, figure = tmp_path / "out" / "bench.json", tmp_path / "bench.png"
    words = ["bench", "allreduce", "--hosts", "2", "--rate", "200mbit", "--numel", "1e6", "--steps", "2"]
    options = ["--only", "dense,fp16,oktopk int8", "--json", str(record), "--figure", str(figure)]
    assert cli.main([*words, *options]) == 0
    assert "PowerSGD hook is not run" in " ".join(capsys.readouterr().out.split())
    result = json.loads(record.read_text())
    dense, half, sparse = result["rows"]
    assert half["collective"] == "fp16 (torch's DDP hook)" and half["payload"] == half["predicted"] == 2e6
    assert 1.0 < half["counted"] / half["payload"] < 1.05
    points = result["model"]["OkTopk int8+coded"]
    assert [p["hosts"] for p in points] == [2, 4, 8, 16, 32, 64, 128, 256] and points[0]["seconds"] > 0
    assert dense["payload"] == dense["predicted"] == 4e6
    assert 1.0 < dense["counted"] / dense["payload"] < 1.05
    assert sparse["collective"] == "OkTopk int8+coded" and sparse["words_per_k"] < 6 * 0.5 / 3
    assert 1.0 < sparse["counted"] / (sparse["payload"] + sparse["beside"]) < 1.3
    assert figure.stat().st_size > 10_000


def test_rows_are_kept_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is cut off in its second launch leaves the first row; adversarial workers stay within the bound."""
    record, launch, done = tmp_path / "bench.json", bench._Bench._launch, []

    def cut_off(self: bench._Bench, collective: object, *rest: object) -> object:
        done.append(collective)
        if len(done) == 3:  # after the idle launch and the first row
            raise KeyboardInterrupt
        return launch(self, collective, *rest)

    monkeypatch.setattr(bench._Bench, "_launch", cut_off)
    words = ["bench", "allreduce", "--hosts", "3", "--rate", "1gbit", "--numel", "1e5", "--steps", "1"]
    options = ["--density", "0.1", "--workers", "adversarial", "--only", "oktopk", "--json", str(record)]
    assert cli.main([*words, *options]) != 0
    (row,) = json.loads(record.read_text())["rows"]
    assert row["collective"] == "OkTopk fp32+int32" and 3.0 < row["words_per_k"] <= 2 + 4 * 2 / 3
    assert row["payload_busiest"] / 4e4 <= 1.005 * (2 + 4 * 2 / 3)


def test_every_collective_has_a_row() -> None:
    names = " ".join(contestants((100, 100), 0.01))
    for name in ("dense", "fp16", "Quantized", "LowRank", "TopkAllgather", "TopkDSA", "GTopk", "OkTopk"):
        assert name in names


@pytest.mark.parametrize(("words", "said"), [
    (["--hosts", "1"], "--hosts 1"), (["--hosts", "two"], "--hosts two"), (["--numel", "x"], "--numel x"),
    (["--density", "0"], "density"), (["--only", "zip"], "--only zip"), (["--rate", "fast"], "rate"),
    (["--steps", "0"], "--steps 0"),
])  # fmt: skip
def test_bad_options(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "allreduce", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_count_prints_both_ratios(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    """ξ by the mean accumulated gradient, and by the mean gradient, which is shorter and the paper's."""
    out = tmp_path / "count.json"
    monkeypatch.setattr(
        "sys.argv", ["count", "--steps", "12", "--hosts", "2", "--thresholds", "reused", "--json", str(out)]
    )
    allreduce_count.main()
    said = capsys.readouterr().out
    assert "ξ of acc (÷ ‖mean acc‖)" in said and "ξ of gradient (÷ ‖mean gradient‖, the paper's)" in said
    (rank, other) = json.loads(out.read_text())["runs"]["unit"]
    by_acc, by_gradient = rank["xi of acc"], rank["xi of gradient"]
    assert by_acc == other["xi of acc"] and by_gradient[0] == pytest.approx(by_acc[0]), "no residual yet"
    assert all(paper > 2 * share for share, paper in zip(by_acc[6:], by_gradient[6:]))
