"""`thinwire bench scratch`: stages in one process have the bits of real ranks; seconds are the published ones."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from rank_launch import launch, on_a_network

from thinwire.bench.pipeline_ranks import loss_of
from thinwire.bench.scratch.corpus import text
from thinwire.bench.scratch.optimisers import Optimisers
from thinwire.bench.scratch.options import YARDSTICK, Scratch
from thinwire.bench.scratch.ranks import PRELOAD, timed
from thinwire.bench.scratch.rows import DENSE, ROWS, row_of
from thinwire.bench.scratch.seconds import PUBLISHED, Yardstick, boundary_bytes, bytes_per_token, seconds_per_step
from thinwire.bench.scratch.training import sequence_of, steps_to
from thinwire.cli import main
from thinwire.errors import UsageError
from thinwire.lab import Network

SMALL = Scratch(stages=2, width=32, length=16, rows=4, steps=5, every=1, held_out=4)
MICROBATCHES = 2


YARD = replace(SMALL, model=YARDSTICK, rate=0.02)
CASES = {  # rows, and of what model
    "rotated 3 bits": SMALL, "learned d/4 + anchors at 4 bits": SMALL, "tokens + basis 2 back 3": SMALL,
    "tokens both ways + normal 2 back 2 through of 0.5": YARD,
}  # fmt: skip


def on_ranks() -> list[list[dict]]:
    """What every rank of two answers, for each row."""
    with Network(hosts=2, preload=PRELOAD) as net:
        return [
            launch(net, timed, row_of(row), setup, setup.steps, MICROBATCHES, timeout=60)
            for row, setup in CASES.items()
        ]


@on_a_network[0]
@on_a_network[1]
@pytest.mark.timeout(120)
def test_one_process_has_the_bits_of_real_ranks(one_thread):
    """Losses, weights and bytes after five steps of two micro-batches: learned boundaries, anchors, books; tables,
    means both ways and the gradient through the scale too."""
    for (name, setup), ranks in zip(CASES.items(), on_ranks()):
        model = sequence_of(row_of(name), setup, 0)
        optimiser = Optimisers(setup, model.stages)
        optimiser.set_rate(setup.rate)
        samples, _ = text(setup, 0)
        losses = []
        for batch in samples.long().split(setup.rows)[: setup.steps]:
            optimiser.zero_grad()
            losses.append(float(model.step(batch[:, :-1], batch[:, 1:], loss_of, MICROBATCHES)))
            optimiser.step()
            if model.boundaries is not None:
                model.boundaries.step(setup.rate)
        assert losses == pytest.approx(ranks[-1]["losses"], rel=1e-6), name
        weights = [[p.detach().double().sum().item() for p in stage.parameters()] for stage in model.stages]
        assert weights == [rank["weights"] for rank in ranks], name
        learns = model.boundaries is not None and model.boundaries.config.learns
        own = 0 if model.boundaries is None else (1 + 2 * setup.steps * learns) * model.boundaries.nbytes()
        assert model.sent() + own == sum(rank["sent"] for rank in ranks), name  # the first values are handed out too


def test_seconds_are_the_published_ones():
    size = Yardstick()
    assert bytes_per_token(ROWS[DENSE], size) == pytest.approx(PUBLISHED[DENSE][0], rel=1e-4)
    assert seconds_per_step(ROWS[DENSE], size) == pytest.approx(PUBLISHED[DENSE][1], rel=1e-4)
    assert seconds_per_step(ROWS["fixed subspace bf16"], size) == pytest.approx(19.889, rel=0.01)  # 640 and not 644 B
    learned = ROWS["learned d/4 at 4 bits"]
    assert boundary_bytes(learned, size) == 16 + 4 * 1024 * 256 and boundary_bytes(ROWS[DENSE], size) == 0
    fitted = bytes_per_token(ROWS["tokens + basis 2 back 2"], size)
    assert fitted == pytest.approx(2 * (1024 * 2 / 8 + 2) + 2 * 1024**2 / 100 / 524_288, rel=1e-3)
    assert bytes_per_token(learned, size) == pytest.approx(2 * 256 * 4.125 / 8 + 2 * 4 * 1024 * 256 / 524_288, rel=1e-3)


def test_steps_are_counted_between_evaluations():
    curve = [(10, 3.0), (20, 2.0), (30, 2.2), (40, 1.0)]
    assert [steps_to(curve, target) for target in (3.5, 2.5, 2.0, 1.5, 0.5)] == [
        10,
        15,
        20,
        pytest.approx(35.83, 1e-3),
        None,
    ]


@pytest.mark.slow
def test_the_command_measures_resumes_and_draws(tmp_path, capsys):
    words = [
        "bench",
        "scratch",
        "--quick",
        "--stages",
        "2",
        "--steps",
        "4",
        "--every",
        "2",
        "--only",
        "learned",
        "--opened",
        "2",
    ]
    out = tmp_path / "rows.json"
    assert main([*words, "--json", str(out), "--figure", str(tmp_path / "f.png")]) == 0
    document = json.loads(out.read_text())
    assert [row["row"] for row in document["rows"]] == [DENSE, "learned d/4 at 4 bits"]
    assert document["rows"][0]["time_ratio"] == 1 and (tmp_path / "f.png").stat().st_size > 10_000
    assert "T / T dense" in capsys.readouterr().out and [step for step, _ in document["runs"][1]["opened"]] == [0, 2]
    assert main([*words, "--json", str(out), "--resume"]) == 0
    assert json.loads(out.read_text())["runs"] == document["runs"]
    assert main([*words, "--json", str(out), "--resume", "--width", "32"]) == 2
    assert "is of other options" in capsys.readouterr().err
    assert main(["bench", "scratch", "--only", "wings"]) == 2


def test_tokens_that_are_kept_are_those_of_the_text(tmp_path):
    """Learned tokens of a folder, read again from the file; another text's are refused."""
    for number in range(20):
        (tmp_path / f"{number:02}.py").write_text(f"def number():\n    return {number}\n\n" * 40)
    setup = replace(SMALL, text=str(tmp_path), vocabulary=280, cache=str(tmp_path / "tokens.npz"))
    first, again = text(setup, 0), text(setup, 0)
    assert all(torch.equal(*pair) for pair in zip(first, again)) and int(first[0].max()) >= 256
    with pytest.raises(UsageError, match="name another file"):
        text(replace(setup, vocabulary=256), 0)


def test_text_comes_from_several_folders_each_file_once(tmp_path):
    """One of them below a hidden folder; no text at all is an error, and leaves no file of tokens."""
    folders = [tmp_path / "a", tmp_path / ".hidden" / "b"]
    for folder, letters in zip(folders, ("xyz", "zuv")):
        folder.mkdir(parents=True)
        for letter in letters:
            (folder / f"{letter}.py").write_text(letter * 100)
    setup = replace(SMALL, text=",".join(map(str, folders)), steps=12, most=1, held_out=1, rows=1, length=31)
    held_out = text(setup, 0)[1]
    assert bytes(held_out[0].tolist()) == b"x" * 32  # of the first of five files; the others' 400 bytes: 12 samples
    with pytest.raises(UsageError, match="has 12"):
        text(replace(setup, steps=13), 0)
    cache = tmp_path / "tokens.npz"
    with pytest.raises(UsageError, match="no text there"):
        text(replace(setup, text=str(tmp_path / "none"), cache=str(cache)), 0)
    assert not cache.exists()
