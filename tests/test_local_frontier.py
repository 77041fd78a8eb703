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


def test_a_stacked_llama_is_that_of_transformers() -> None:
    import torch
    from stacked_llama import Llama
    from torch.nn.functional import cross_entropy

    transformers = pytest.importorskip("transformers")
    size = Llama(width=32, layers=2, heads=4, groups=2, inside=48, vocabulary=64, length=12)
    config = transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
        vocab_size=64, tie_word_embeddings=True, rms_norm_eps=size.epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": size.theta},
    )  # fmt: skip
    rows = torch.randint(0, 64, (2, 3, 13), generator=torch.Generator().manual_seed(0))
    flat = torch.stack([size.initial(seed) for seed in (1, 2)])
    weights = {name: view.detach().requires_grad_() for name, view in size.views(flat).items()}
    losses = size.losses(weights, rows)
    found = torch.cat([g.flatten(1) for g in torch.autograd.grad(losses.sum(), list(weights.values()))], 1)
    for copy, mine in enumerate(rows):
        model = transformers.LlamaForCausalLM(config)
        assert {name: tuple(p.shape) for name, p in model.named_parameters()} == size.shapes()
        torch.nn.utils.vector_to_parameters(flat[copy], model.parameters())
        logits = model(mine[:, :-1]).logits
        loss = cross_entropy(logits.reshape(-1, 64), mine[:, 1:].reshape(-1))
        wanted = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
        torch.testing.assert_close(losses[copy], loss, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found[copy], wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("apart", [False, True])
def test_no_sequence_comes_twice(apart: bool) -> None:
    import torch
    from stacked_llama import Llama

    begin = Llama(length=8).starts(torch.zeros(8 * 100 + 1), 3, 6, 4, 4, apart)
    assert begin.shape == (6, 4, 4) and begin.flatten().unique().numel() == begin.numel() == 96
    parts = begin.transpose(0, 1).flatten(1) // (8 * 25)  # of the text, in which a site draws
    assert torch.equal(parts, torch.arange(4)[:, None].expand_as(parts)) is apart
