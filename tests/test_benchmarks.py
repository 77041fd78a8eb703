"""The card's benchmark can be read and set up without a card, so that a break shows before a card is there."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks" / "card"


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


def test_gpu_options(load, capsys):
    gpu = load("gpu")
    options = gpu.parser().parse_args(["--only", "check", "--json", "x.json"])
    assert options.only == ["check"] and options.json == Path("x.json")
    assert tuple(gpu.parser().parse_args([]).only) == tuple(gpu.SECTIONS)
    with pytest.raises(SystemExit):
        gpu.parser().parse_args(["--only", "nothing"])
    if not torch.cuda.is_available():
        assert gpu.main([]) == 2
        assert "needs a CUDA device" in capsys.readouterr().err


def test_gpu_check_list(load):
    """Every case runs by the reference; against itself it does not differ."""
    checks = load("gpu_checks")
    names = set()
    for where, (name, run) in checks.cases((0, 150)):
        result = run(lambda x: x.clone(), "reference")
        assert checks.mismatches(result, result) == 0, (name, where)
        names.add(name.split()[0])
    expected = "quantize delta sign hadamard histogram top kth select scatter pack ternary checksum frame indices"
    assert names == set(expected.split())


def test_gpu_rows(load):
    """Every row of the table is set up, and its eager side runs; goals name rows that exist."""
    kernels = load("gpu_kernels")
    names = []
    for _, row in kernels.rows("cpu", 1 << 13):
        assert row.moved > 0
        row.eager()
        names.append(row.name)
    assert set(kernels.GOALS) <= set(names)


def test_steps_model_has_a_gradient(load):
    """A tied head over large embeddings is so certain of its own input that the gradient is zero, and sparse ways send
    nothing."""
    ways = load("gpu_steps_ways")
    model = ways.Model(ways.Size(1, 768, 12, 500, 8, 1, True))
    tokens = torch.arange(8)[None]
    torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    assert all(float(p.grad.abs().max()) > 0 for p in model.parameters())


def test_steps_trace(load):
    """Two streams: 6 ms of computing, 5 ms of codec and message, 2 ms of them at once."""
    spans = (
        (7, "gemm", 0, 4),
        (7, "gemm", 6, 2),
        (9, "_encode", 3, 1),
        (9, "ncclKernel", 3.5, 3.5),
        (9, "_decode", 9, 1),
    )
    events = [
        {"cat": "kernel", "name": name, "ts": 1e3 * at, "dur": 1e3 * ms, "args": {"stream": stream}}
        for stream, name, at, ms in spans
    ]
    found = load("gpu_steps_trace").read({"traceEvents": events})
    of_messages = {"messages": 1, "messages_s": 3.5e-3, "from_first_to_last_s": 3.5e-3, "kernels": 3}
    assert found == pytest.approx({"computing_s": 6e-3, "exchange_s": 5e-3, "both_s": 2e-3} | of_messages)
