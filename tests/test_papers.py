"""The presets `paper-…` are the papers: a few steps of each on three ranks, beside straight-line code."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import paper_cases as paper
import pytest
from rank_cases import name_of, run_cases
from rank_launch import launch, needs_network, passed
from torch import nn

import thinwire as tw
from thinwire.bench import optimus
from thinwire.data_parallel.gradient_units import is_exact, make_units
from thinwire.errors import UsageError
from thinwire.lab import Network
from thinwire.train.config.sections import OptimConfig, TrainConfig
from thinwire.train.learning_rate import frozen_adam

CASES = [
    functools.partial(paper.aqsgd_is_the_published_algorithm, True),
    functools.partial(paper.aqsgd_is_the_published_algorithm, False),
    paper.aqsgd_survives_a_resume_in_its_first_epoch, paper.aqsgd_between_replicas_is_frozen_adam,
    paper.oktopk_is_the_published_algorithm, paper.optimus_is_the_published_backward,
    paper.optimus_is_the_published_averaging,
]  # fmt: skip


@pytest.fixture(scope="module")
def ranks():
    with Network(hosts=3, preload=("warm", "paper_cases")) as net:
        return launch(net, run_cases, CASES, timeout=120)


@pytest.mark.lab
@needs_network
@pytest.mark.timeout(150)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_case(ranks, case):
    passed(ranks, case)


def test_an_epoch_is_told_in_steps():
    """Of the pipeline's warm-up there are as many per step as passes; who is not told refuses."""
    wire = tw.Wire.of("paper-aqsgd")
    told = wire.with_epoch(7, passes=2)
    assert (told.backward.warmup, told.gradient.warmup, told.embedding.warmup) == (14, 7, 7)
    assert told.forward == wire.forward and told.with_epoch(9) == told
    with pytest.raises(UsageError, match="with_epoch"):
        tw.parallel.Reducer(nn.Linear(2, 2).named_parameters(), wire)
    with pytest.raises(UsageError, match="would remember nothing"):
        tw.Link(tw.codecs.Quantize(4), tw.memory.Delta(), warmup=3)


def test_defaults_that_a_step_does_not_show():
    """Which stages are coded, who adds what, and the tied embedding: as its paper has it, or as the gradient."""
    aqsgd, oktopk, optimus = (tw.Wire.of(f"paper-{name}") for name in ("aqsgd", "oktopk", "optimus"))
    assert optimus.gradient.stages == 0.75 and oktopk.gradient.collective.tau == 64
    assert [wire.embedding.sync for wire in (aqsgd, oktopk, optimus)] == ["fused"] * 3
    for wire in (aqsgd, oktopk):
        assert (wire.embedding.collective, wire.embedding.memory) == (wire.gradient.collective, wire.gradient.memory)
    assert aqsgd.embedding.warmup == "epoch" == aqsgd.gradient.warmup
    assert optimus.embedding.collective == tw.collectives.Dense()
    assert not (optimus.forward or oktopk.forward or oktopk.backward)
    exchange = oktopk.gradient.collective
    assert exchange.rotation and exchange.bucketing and exchange.repartition and exchange.balancing


def test_what_is_one_unit_and_what_is_left_out():
    """Ok-Topk takes a large gradient whole; Optimus-CC leaves out embeddings, by the names that models give them."""
    shapes = {"one": (4096, 4096), "two": (4096, 4096), "bias": (4096,)}
    assert len(make_units(shapes, tw.Wire.of("paper-oktopk").gradient)) == 1
    gradient = tw.Wire.of("paper-optimus").gradient
    bert = "bert.embeddings.word_embeddings"
    for name in ("model.embed_tokens", "lm_head", "transformer.wte", "transformer.wpe", bert):
        assert is_exact(f"{name}.weight", (1000, 1000), gradient), name
    for name in ("model.layers.0.mlp.up_proj", "transformer.h.0.attn.c_attn"):
        assert not is_exact(f"{name}.weight", (1000, 1000), gradient), name


@pytest.mark.parametrize(("given", "expected"), [({}, 11), ({"freeze_after": 3}, 3)])
def test_frozen_adam_freezes_after_the_first_epoch(given, expected):
    """By a key of its own: not when the rate has warmed up."""
    config = TrainConfig(optim=OptimConfig(name="frozen_adam", warmup=5, **given))
    mesh = SimpleNamespace(dp=None)
    adam = frozen_adam(config, tw.Wire.of("paper-aqsgd"), mesh, dict(nn.Linear(2, 2).named_parameters()), 11)
    assert adam.freeze_after == expected


def test_every_rung_of_the_ladder_is_a_run_of_its_own(tmp_path, monkeypatch):
    """What is trained, and not only what is named: the embedding separate and fused, three quarters of the stages."""
    event = {"kind": "step", "step": 1, "skips": 0}
    run = []
    monkeypatch.setattr(optimus, "train_local", lambda config, **about: run.append(config) or [event])
    monkeypatch.setattr(optimus, "sent", lambda event: {})
    args = SimpleNamespace(json=None, samples=192, epochs=1)
    bench = optimus.Bench(tmp_path, args, list(optimus.LADDER))
    for rung in optimus.LADDER:
        bench._fine_tuned(None, tmp_path, rung, 0)
    wires = dict(zip(optimus.LADDER, (tw.Wire.of(config.wire) for config in run)))
    assert len(set(map(str, wires.values()))) == len(wires)
    assert [wires[rung].embedding.sync for rung in ("+ epilogue only", "+ fused embedding")] == ["separate", "fused"]
    selective = wires["+ selective stages"].gradient
    assert (selective.stages, selective.collective.rank) == (0.75, 16) and run[0].mesh.pp == 4
