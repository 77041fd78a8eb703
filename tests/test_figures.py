"""The figures of benches: they draw, name everything that they show, and hide nothing behind a legend or an edge."""

from __future__ import annotations

import importlib
import json
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from matplotlib.figure import Figure

from thinwire.bench import allreduce, allreduce_figure, pipeline_figure
from thinwire.bench.pipeline_modes import MODES, OURS
from thinwire.cli import main

ROOT = Path(__file__).parent.parent


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Figures as they are saved."""
    kept: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *arguments: Any, **options: Any) -> None:
        kept.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return kept


def room(name: str, monkeypatch: pytest.MonkeyPatch, module: str) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / name))
    return importlib.import_module(module)


def words(figure: Figure) -> str:
    return " ".join(text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text")))


def test_pipeline(tmp_path: Path, drawn: list[Figure]) -> None:
    """Rates as people write them, and no mode that is called the best by itself."""
    names = [name for name, mode in MODES.items() if not mode.ablation]
    result = {
        "setup": {"samples": 64, "rows": 4, "microbatches": 8},
        "time": [{"mode": n, "rate": r, "cold": 2.0, "warm": 1.0} for n in names for r in (1_158_130.0, 25e6)],
        "loss": [{"mode": n, "seed": 0, "losses": [2.0, 1.9, 1.8]} for n in names],
    }
    pipeline_figure.draw(result, tmp_path / "p.png")
    said = words(drawn[0])
    assert "1.16mbit" in said and "1.15813" not in said and OURS in said and "best" not in said


def test_pipeline_resumed_with_rows_of_a_mode_that_is_no_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thinwire.bench.pipeline.asdict", lambda setup: {})
    (tmp_path / "p.json").write_text(json.dumps({"setup": {}, "loss": [], "time": [{"mode": "best"}]}))
    assert main(["bench", "pipeline", "--resume", "--json", str(tmp_path / "p.json")]) == 2
    assert "has rows of best; modes are fp32" in capsys.readouterr().err


def test_allreduce(tmp_path: Path, drawn: list[Figure]) -> None:
    """Every line of both panels has its name in one legend, which stands outside of them."""
    rows = allreduce._chosen(allreduce.contestants((100, 100), 0.1), "oktopk,dense")
    measured = [
        {"collective": name, "hosts": p, "seconds": 0.1 * p, "words_per_k": 3.0, "sparse": row.sparse}
        for name, row in rows.items() for p in (2, 4)
    ]  # fmt: skip
    allreduce_figure.draw(measured, allreduce._model(rows, 1000, 1e8, "0ms"), tmp_path / "a.png", "title")
    (legend,) = drawn[0].legends
    named = {text.get_text() for text in legend.get_texts()}
    assert {*rows, allreduce_figure.BOUND, "closed form, in the collective's colour"} == named
    box = legend.get_window_extent()
    assert not any(box.overlaps(axes.get_window_extent()) for axes in drawn[0].axes)


def test_gpu_quality(tmp_path: Path, drawn: list[Figure], monkeypatch: pytest.MonkeyPatch) -> None:
    """All methods are inside both panels, and have their names in them."""
    figure = room("card", monkeypatch, "gpu_figure")
    figure.draw(json.loads((ROOT / "docs" / "gpu.json").read_text())["quality"], tmp_path / "g.png")
    for axes in drawn[0].axes:
        low, high = axes.get_ylim()
        said = " ".join(text.get_text() for text in axes.texts)
        assert all(name in said for name in figure.LOOK)
        assert len(axes.lines) == len(figure.LOOK)
        assert all(low < y < high for line in axes.lines for y in line.get_ydata())


def test_quality_frontier(tmp_path: Path, drawn: list[Figure], monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's tables, every row of them: a method's name is beside its point, and on no other."""
    figure = room("quality", monkeypatch, "quality_figure")
    page = (ROOT / "docs" / "quality.md").read_text()
    bars = figure.bars_of_page(page)
    rows = [line for line in page.splitlines() if "±" in line and line.count("|") == 9]  # of eight columns
    assert len(bars) == sum(not line.startswith("| method") for line in rows)
    assert {bar.method for bar in bars} <= figure.METHODS.keys()
    quantized = next(bar for bar in bars if bar.method == "Quantized 4")
    assert (quantized.mean, quantized.half, quantized.ratio) == (0.17, 1.13, 7.7)
    figure.figure(bars, tmp_path / "q.png")
    for axes in drawn[0].axes:
        boxes = [label.get_window_extent() for label in axes.get_yticklabels()]
        assert not any(a.overlaps(b) for a, b in pairwise(boxes))
