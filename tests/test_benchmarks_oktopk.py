"""benchmarks/papers/oktopk.py: a tiny run in this process, that it goes on where it stopped, and its table."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks" / "papers"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import oktopk

    def call(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["oktopk.py", *arguments])
        oktopk.main()

    return call


def test_quick_run_goes_on_and_reports(bench, tmp_path, capsys):
    tiny = ("--out", str(tmp_path), "--quick", "--parallel", "0", "--cpu", "--tasks", "llama")
    bench(*tiny, "--methods", "dense,Ok-Topk 1 %,4 bits")
    file = tmp_path / "runs-cpu.jsonl"
    lines = file.read_text().splitlines()
    rows = {(row["method"], row["seed"]): row for row in map(json.loads, lines)}
    assert len(lines) == len(rows) == 6 and all(row["agree"] for row in rows.values())
    n = rows["dense", 0]["n"]
    assert rows["dense", 0]["bytes"] == pytest.approx(2 * 4 * n * 3 / 4, rel=0.01)  # as a ring of four sends
    assert rows["4 bits", 0]["bytes"] < rows["dense", 0]["bytes"] / 7
    assert rows["dense", 0]["loss"] < rows["4 bits", 0]["loss"] < rows["Ok-Topk 1 %", 0]["loss"] < 4.1  # log 64 = 4.16
    probes = rows["Ok-Topk 1 %", 0]["probes"]
    assert len(probes) >= 20 and probes[0]["passed"] == pytest.approx(0.01 * n, rel=0.1) and probes[-1]["xi"] > 0
    file.write_text("\n".join([*lines[:-1], lines[-1][:40]]) + "\n")  # the last line was cut off
    capsys.readouterr()
    bench(*tiny, "--methods", "dense,Ok-Topk 1 %,4 bits")
    assert "1 runs to do" in capsys.readouterr().out
    again = json.loads(file.read_text().splitlines()[-1])
    assert again["loss"] == json.loads(lines[-1])["loss"]  # a run repeats to the bit

    page = tmp_path / "page.md"
    page.write_text("before\n<!-- oktopk.py writes from here -->\nold\n<!-- to here -->\nafter\n")
    bench("--out", str(tmp_path), "--table", "--docs", str(page), "--figure", str(tmp_path / "length.png"))
    table = capsys.readouterr().out
    assert "| Ok-Topk 1 % | 2 |" in table and " ± " in table and "| llama, Ok-Topk 1 %, 78 |" in table
    assert (
        page.read_text().startswith("before\n") and table.strip() in page.read_text() and "old" not in page.read_text()
    )
    assert (tmp_path / "length.png").stat().st_size > 5_000


@pytest.mark.slow
def test_the_papers_tasks_run_with_its_exact_steps(bench, tmp_path):
    """The rows of docs/papers.md, quickly: three exact steps, then 2 % of the gradient, in eight bytes per entry."""
    bench("--out", str(tmp_path), "--quick", "--parallel", "0", "--cpu", "--tasks", "vgg,an4-small-sgd", "--methods",
          "dense,Ok-Topk 2 % warm")  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "runs-cpu.jsonl").read_text().splitlines()]
    by = {(row["task"], row["method"], row["seed"]): row for row in rows}
    assert len(by) == len(rows) == 8 and all(row["agree"] for row in rows)
    for (task, method, seed), row in by.items():
        if method == "dense":
            continue
        dense, steps = by[task, "dense", seed], row["steps"]
        exact = 3 / steps * dense["bytes"]
        assert exact < row["bytes"] < exact + 0.2 * dense["bytes"], (task, row["bytes"], dense["bytes"])
        assert row["loss"] != dense["loss"]


def test_a_run_is_written_when_it_ends(bench, tmp_path, monkeypatch):
    """Not when all have ended: the next one may be stopped."""
    import oktopk

    def stopped(run, *arguments):
        if run.seed == 1:
            raise KeyboardInterrupt
        return {**asdict(run), "steps": 1, "seconds": 1.0, "bytes": 1.0, "how": "", "loss": 1.0}

    monkeypatch.setattr(oktopk, "train", stopped)
    with pytest.raises(KeyboardInterrupt):
        bench("--out", str(tmp_path), "--quick", "--parallel", "0", "--tasks", "llama", "--methods", "dense", "--cpu")
    assert [json.loads(line)["seed"] for line in (tmp_path / "runs-cpu.jsonl").read_text().splitlines()] == [0]


@pytest.mark.parametrize("task", ["vgg", "an4"])
def test_rows_of_gradients_are_the_workers_own(bench, task):
    """Row w is the gradient of worker w's batch alone, in the order of the flat weights."""
    from oktopk_data import made_up
    from oktopk_methods import METHODS
    from oktopk_tasks import TASKS
    from oktopk_train import Gradients, Weights

    torch.manual_seed(0)
    made = TASKS[task](made_up(task), torch.device("cpu"), True)
    weights = Weights(made.build(), METHODS["dense"].reduction(0))
    batch = next(made.batches(0, 4, 1))
    rows = Gradients(made, weights, 4, batch)(batch)
    for worker in (0, 3):
        own = [part[worker] for part in batch] if made.is_static else batch[worker]
        weights.model.zero_grad()
        made.loss(weights.model, own, worker).backward()
        named = dict(weights.model.named_parameters())
        expected = torch.cat([named[name].grad.reshape(-1) for name in weights.shapes])
        assert torch.equal(rows[worker], expected)
        assert torch.equal(weights.flat.data, torch.cat([named[name].data.reshape(-1) for name in weights.shapes]))


def test_halved_convolutions_have_autocasts_bits(bench, monkeypatch):
    """Copies that are made once per step, and followed when weights move, against casts in every use."""
    import oktopk_train
    from oktopk_data import made_up
    from oktopk_methods import METHODS
    from oktopk_tasks import TASKS

    monkeypatch.setattr(oktopk_train, "half", lambda task: torch.autocast("cpu", torch.bfloat16, cache_enabled=False))
    found = []
    for halved in (False, True):
        torch.manual_seed(0)
        made = TASKS["vgg"](made_up("vgg"), torch.device("cpu"), True)
        weights = oktopk_train.Weights(made.build(), METHODS["4 bits"].reduction(0))
        if halved:
            weights.halve_convolutions()
        batch = next(made.batches(0, 2, 1))
        gradients = oktopk_train.Gradients(made, weights, 2, batch)
        first = gradients(batch).clone()
        weights.flat.data -= 0.1 * first.mean(0)
        found.append((first, gradients(batch), oktopk_train.measured(made, weights)))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert found[0][2] == found[1][2] and not torch.equal(found[0][0], found[0][1])


def test_all_workers_at_once_have_the_collectives_bits(bench, monkeypatch):
    """Means, residuals and counts over re-cuts, re-estimations and nudges; bytes but for counts and histograms. Passes
    over the rows and the one kernel, by its interpreter, alike."""
    from oktopk_fast import AllAtOnce, is_published
    from oktopk_methods import METHODS
    from oktopk_train import Workers

    torch.manual_seed(0)
    n, reduction = 6000, METHODS["Ok-Topk 2 % warm"].reduction(2)
    assert is_published(reduction) and not is_published(METHODS["Ok-Topk 1 % predicted"].reduction(0))
    members, at_once = Workers(4, {"w": (n,)}, reduction, 0), AllAtOnce(4, n, reduction, torch.device("cpu"))
    kernel = AllAtOnce(4, n, reduction, torch.device("cpu"))
    kernel.by_kernel = importlib.util.find_spec("triton") is not None and not torch.cuda.is_available()
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # while the kernel is imported, and while it runs
    sizes = torch.rand(n) ** 3
    for step in range(70):
        rows = torch.randn(4, n) * sizes * (1 + step // 15)
        mean = members.average(rows)[0]
        for other in (at_once, kernel):
            assert torch.equal(mean, other.average(rows)[0]), step
            if step > 2:
                assert members.selected() == other.selected()
                assert all(torch.equal(members.residual(rank), other.residual(rank)) for rank in range(4))
    assert kernel.sent() == at_once.sent()
    assert at_once.shift == int(members.channels[0][members.units[0]].collective_state[members.units[0].name]["shift"])
    missing = {a - b for a, b in zip(members.sent(), at_once.sent())}
    assert max(missing) - min(missing) < 200 and 0 < min(missing) < 70 * 2000


def test_rows_have_the_collectives_bits(bench):
    """Means, residuals and bytes of every method that is computed for all workers at once; two shifts of Rand-DIANA."""
    from oktopk_methods import METHODS
    from oktopk_rows import Rows, is_known
    from oktopk_train import Workers

    shapes, seen = {"a": (40, 100), "b": (33, 60), "v": (77,)}, []
    n = sum(torch.zeros(shape).numel() for shape in shapes.values())
    for name, method in METHODS.items():
        reduction = method.reduction(0)
        if not is_known(reduction):
            continue
        torch.manual_seed(0)
        members, rows = Workers(4, shapes, reduction, 3), Rows(4, shapes, reduction, 3)
        for step in range(40):
            given = torch.randn(4, n) * torch.rand(n) ** 3 * (1 + step // 15)
            assert torch.equal(members.average(given)[0], rows.average(given)[0]), (name, step)
            if members.residual(1) is not None:
                assert torch.equal(members.residual(1), rows.residual(1)), (name, step)
        assert sum(members.sent()) == sum(rows.sent()), name
        seen.append(name)
    assert seen == ["dense", "4 bits", "gTopk 1 %", "EF21 top 1 %", "DIANA 4 bits", "Rand-DIANA 4 bits"]


def test_what_is_packed_is_read(bench, tmp_path, monkeypatch):
    """oktopk_data.py on folders as the real ones are: pictures, speech, code."""
    from PIL import Image

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    import oktopk_data

    for part, count in (("train", 3), ("test", 2)):
        for label, name in enumerate(("bird", "cat")):
            folder = tmp_path / "cifar" / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (32, 32), (40 * i, 200 * label, 0)).save(folder / f"{i}.jpg")
    for folder in ("an4/etc", "an4/feat", "code"):
        (tmp_path / folder).mkdir(parents=True)
    for part in ("train", "test"):
        (tmp_path / "an4/etc" / f"an4_{part}.fileids").write_text(f"{part}1\n{part}2\n")
        (tmp_path / "an4/etc" / f"an4_{part}.transcription").write_text(f"<s> GO </s> ({part}1)\nYES NO ({part}2)\n")
        for i in (1, 2):
            np.concatenate([[0.0], np.arange(13.0 * 5 * i) ** 2]).astype(">f4").tofile(
                tmp_path / "an4/feat" / f"{part}{i}.mfc"
            )
    for i in range(40):
        (tmp_path / "code" / f"m{i}.py").write_text(f"def f{i}(x):\n    return x + {i}\n" * 80)
    given = {"--cifar": "cifar", "--an4": "an4", "--code": "code", "--out": "packed"}
    words = [word for option, folder in given.items() for word in (option, str(tmp_path / folder))]
    monkeypatch.setattr(sys, "argv", ["oktopk_data.py", *words])
    oktopk_data.main()

    pictures, labels = oktopk_data.read(tmp_path / "packed", "vgg")["train"]
    assert pictures.shape == (6, 3, 32, 32) and labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert pictures[5, :, 9, 9].tolist() == pytest.approx([80, 200, 0], abs=8)  # as JPEG keeps it
    speech = oktopk_data.read(tmp_path / "packed", "an4")["train"]
    assert [said for _, said in speech] == ["GO", "YES NO"] and [len(frames) for frames, _ in speech] == [5, 10]
    code = oktopk_data.read(tmp_path / "packed", "llama")
    assert len(code["train"]) > 10 * len(code["held"]) > 1000 and int(code["train"].max()) < oktopk_data.VOCABULARY
