"""benchmarks/quality/quality.py: a tiny run end to end, what it counts, that it resumes, and its statistics."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from thinwire.quantities import half_interval

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks" / "quality"


def quick(folder: Path, *more: str) -> str:
    command = [sys.executable, str(BENCHMARKS / "quality.py"), "--quick", "--json", str(folder / "runs.jsonl")]
    done = subprocess.run(
        [*command, "--data", str(folder / "data.pt"), *more], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


ONE_AFTER_THE_OTHER = """
import contextlib, io, json, os, runpy, sys
said = []
for words in json.loads(sys.argv[1]):
    sys.argv, sys.path[0] = words, os.path.dirname(words[0])
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(words[0], run_name="__main__")
    said.append(printed.getvalue())
print(json.dumps(said))
"""


def one_after_the_other(*commands: tuple[str, ...]) -> list[str]:
    """What scripts print, each with its words: run in turn in one new process, which imports torch once."""
    words = [sys.executable, "-c", ONE_AFTER_THE_OTHER, json.dumps(commands)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


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


@pytest.mark.slow
def test_tables_of_papers_are_made_by_their_commands(tmp_path: Path) -> None:
    """aqsgd.py and lazy_long.py on tiny data of their own; a second call finds all runs and makes none."""
    tiny = ("--quick", "--device", "cpu", "--out", str(tmp_path))
    figures = {name: str(tmp_path / name) for name in ("lazy.png", "aq.png", "ends.png")}
    drawn = (str(BENCHMARKS / "aqsgd_figure.py"), str(tmp_path / "runs.jsonl"))
    aqsgd, lazy = str(BENCHMARKS / "aqsgd.py"), str(BENCHMARKS.parent / "card/lazy_long.py")
    first, ends, again, long, shown, *_ = one_after_the_other(
        (aqsgd, *tiny, "--tasks", "sst2,wikitext"),
        (aqsgd, *tiny, "--tasks", "wikitext-dp2"),  # replicas too
        (aqsgd, *tiny, "--tasks", "sst2,wikitext"),
        (lazy, *tiny),
        (lazy, *tiny, "--table", "--figure", figures["lazy.png"]),
        (*drawn, figures["aq.png"]),
        (*drawn, figures["ends.png"], "wikitext-dp2"),
    )
    assert not any("failed" in said for said in (first, ends, again, long, shown)), (first, ends, again, long, shown)
    rows = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    single = [row for row in rows if row["task"] != "wikitext-dp2"]
    assert len(single) == 2 * (1 + 2 * 3) and first.count("| ours 3/3 | 2 |") == 2  # a rate more, then two seeds
    assert all(row["held_out"][-1] < row["held_out"][0] for row in single)
    exact, ours = (next(r["bytes"][-1] for r in single if r["wire"] == wire) for wire in ("fp32", "ours 3/3"))
    assert 5 * ours["forward"] < exact["forward"] and 9 * ours["backward"] < exact["backward"]
    assert "| end to end, published | 2 |" in ends and "| end to end, ours | 2 |" in ends
    assert "| end to end, published | 2 | fp32's least + 0.5 % |" in ends
    assert "rate 0.003, seed" not in again and again.count("| ours 3/3 | 2 |") == 2
    assert "| rank 16 | lazy | 2 |" in long and "cosine" in shown
    assert all(Path(figure).stat().st_size > 5_000 for figure in figures.values())


def test_intervals_are_students() -> None:
    """Half of the 95 % interval: t of the tables times the standard error."""
    for count, t in ((2, 12.71), (3, 4.303), (8, 2.365), (10, 2.262), (11, 2.228), (21, 2.086), (121, 1.980)):
        values = [float(i % 2) for i in range(count)]
        half = half_interval(values)
        assert half == pytest.approx(t * statistics.stdev(values) / count**0.5, rel=2e-3), count
    assert half_interval([1.0]) is None


def test_verdicts_are_of_the_whole_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from aqsgd_table import seconds, within

    cases = {"yes": [0.1, 0.2, 0.15], "no": [2.0, 2.1, 2.2], "on average": [0.0, 0.9], "not on average": [0.0, 1.2]}
    cases["?"] = [0.1]
    assert {name: within(values) for name, values in cases.items()} == {name: name for name in cases}
    step = 16 * 256 * 576 * 4 * 3  # SmolLM2's activations, over three boundaries
    found = seconds({"forward": step, "backward": step, "embedding": 2 * 4 * 49152 * 576}, 3e8)
    assert found == pytest.approx(4.16, rel=0.05)  # as fp32 took on a card at 300 Mb/s (docs/papers.md)


def test_low_rank_steps_are_the_librarys_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages and residuals of lazy_steps.py beside both ends of a lane, after the first message, whose start is
    drawn; the exact run before it in the stack is left alone."""
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent / "card"))
    import lazy_error
    from lazy_steps import Boundary, Coding

    lane = lazy_error.Boundary(lazy_error.links("rank 4")["lazy"], 1)
    ours = Boundary([Coding(), Coding(4, lazy=True)], 0, 3)
    group = ours.groups[1]
    torch.manual_seed(0)
    for step in range(3):
        lane.begin(step)
        ours.begin(watched=True)
        for microbatch in range(3):
            a, g = torch.randn(2, 2, 20, 16)
            both = torch.stack([torch.full_like(g, 7.0), g])
            found = ours.send(torch.stack([a, a]), both.clone())
            expected = lane.send(a, g)
            (channel,) = lane.lanes[0].coded.values()
            kept = [channel.state.read(slot, f"{lane.lanes[0].name}/0") for slot in ("q", "e")]
            assert torch.equal(found[0], both[0])
            if step or microbatch:
                assert torch.allclose(found[1], expected, atol=1e-5)
                assert torch.allclose(group.e, kept[1].reshape(group.e.shape), atol=1e-5)
            group.q, group.e = (one.reshape(1, -1, one.shape[-1]).clone() for one in kept)
        lane.end()
    assert list(ours.noted) == [1] and set(ours.diagnostic(1)) == {"error_mean", "change_mean", "cosine"}


def test_stacked_runs_are_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of lazy_steps.py in one stack have the gradients that each has in a stack of its own, and the exact one
    those of gpu_quality's model under autocast."""
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent / "card"))
    from gpu_quality import Model, Size, loss_of
    from lazy_steps import Coding, Steps, Training, stacked

    size, codings = Size(4, 16, 2, 12), [Coding(), Coding(1), Coding(1, lazy=True)]
    data = torch.randint(40, (20, 13), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    order = torch.randint(20, (3, 1, 4), generator=torch.Generator().manual_seed(2)).expand(-1, 3, -1)

    def train(runs: slice) -> torch.Tensor:
        w = stacked(size, [0, 0, 0][runs], torch.device("cpu"))
        training = Training(w, size, data, Steps(order[:, runs], torch.full((3,), 1e-3)), 2, codings[runs])
        for _ in order:
            training.step()
        return torch.cat([p.grad.flatten(1) for p in w.values()], 1)

    def apart(a: torch.Tensor, b: torch.Tensor) -> float:
        return float((a - b).norm() / b.norm())

    together = train(slice(0, 3))
    alone = [train(slice(i, i + 1))[0] for i in range(3)]
    assert max(apart(a, b) for a, b in zip(together, alone)) < 0.02
    assert min(apart(alone[i], alone[j]) for i, j in ((0, 1), (0, 2), (1, 2))) > 0.1

    torch.manual_seed(0)
    model = Model(size)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    for rows in order[:, 0]:
        adam.zero_grad()
        for part in data[rows].chunk(2):
            (loss_of(model, part) / 2).backward()
        adam.step()
    assert apart(torch.cat([p.grad.flatten() for p in model.parameters()]), alone[0]) < 0.02
