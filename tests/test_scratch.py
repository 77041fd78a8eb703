"""Pre-training: the preset `scratch`, and that a wire which remembers samples says when none of them comes again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from train_ranks import settings

from thinwire import codecs as c
from thinwire import memory as m
from thinwire.codecs import frame as framing
from thinwire.config.wire import Link, Wire
from thinwire.pipeline import counters
from thinwire.pipeline.counters import StoreReport
from thinwire.pipeline.lane import Lane
from thinwire.pipeline.message_choice import Message
from thinwire.planner.config import read_run
from thinwire.planner.predict import predict
from thinwire.planner.settings import preset
from thinwire.planner.step import Traffic
from thinwire.train.build import _say_if_once


def visit(lanes: tuple[Lane, Lane], step: int, ids: tuple[int, ...]) -> None:
    message = Message(0, ids, True)
    x = torch.randn(len(ids), 8)
    for lane in lanes:
        lane.begin(step)
        lane.digests(ids)
    lanes[1].recv(message, 0, lanes[0].send(message, 0, x), x.shape, x.dtype)
    for lane in lanes:
        lane.end_step(keep=True)


@pytest.mark.parametrize("samples", [None, 8])
@pytest.mark.parametrize("again", [False, True])
def test_a_pipeline_says_once_that_no_sample_comes_again(samples, again, monkeypatch):
    """After so many steps, or more visits than there are samples; never once a sample has come again."""
    monkeypatch.setattr(counters, "LONG", 4)
    link = Link(c.Quantize(4), m.Delta(cold=c.Quantize(8)))
    lanes = Lane(link, "forward 0→1", "send", 0), Lane(link, "forward 0→1", "recv", 0)
    said: list[str] = []
    report = StoreReport(samples, (8,), said.append)
    lines = []
    for step in range(8):
        visit(lanes, step, (0, 1) if again and step == 3 else (2 * step, 2 * step + 1))
        report.after(lanes[:1], first=step == 0)
        lines.append(len(said))
    expected = 4 if samples is None else 5
    assert lines == [0] * 8 if again else lines == [0] * (expected - 1) + [1] * (9 - expected)
    assert all("forward 0→1: none of" in line and "'scratch'" in line for line in said)


@pytest.mark.parametrize(
    ("wire", "steps", "pp", "says"),
    [("max", 9, 2, True), ("max", 10, 2, False), ("max", 9, 1, False), ("scratch", 9, 2, False), ("off", 9, 2, False)],
)
def test_thinwire_train_says_which_preset_one_epoch_takes(wire, steps, pp, says):
    said: list[str] = []
    config = settings("out", {"preset": wire}, optim={"steps": steps}, mesh={"pp": pp})
    assert _say_if_once(config, Wire.of(wire), 9, said.append) == steps
    assert len(said) == says and all("'scratch'" in line for line in said)


def test_the_preset_keeps_nothing_of_samples():
    wire = Wire.of("scratch")
    assert wire.forward == wire.backward == Link(c.Rotated(c.Quantize(4, scale="mse")))
    assert not wire.forward.remembers_samples and Wire.of("max").forward.remembers_samples
    assert (wire.gradient, wire.embedding) == (Wire.of("max").gradient, Wire.of("max").embedding)
    tokens = Wire.of("scratch-tokens")
    assert replace(tokens, forward=wire.forward) == wire and tokens.forward == replace(wire.forward, tokens=0.5)
    few = Wire.of("scratch-two-bits")
    assert few.forward == Link(c.Transform(2), tokens=0.5, scale_gradient=True) and few.needs_tokens
    assert few.backward == Link(c.Transform(2), tokens=0.1) and few.gradient == wire.gradient


def test_the_planner_prices_what_crosses_a_learned_boundary():
    document = {
        "model": {"layers": 2, "hidden": 256, "seq": 64, "vocab": 256, "crossing": 64},
        "mesh": {"pp": 2}, "schedule": {"name": "1F1B"}, "batch": {"microbatches": 2, "size": 4},
        "compute": {"flops": 1e9}, "network": {"rate": "100mbit"},
    }  # fmt: skip
    sent = predict(read_run(document), preset("scratch")).sent[Traffic.FORWARD]
    assert sent == 2 * (framing.BYTES + c.Rotated(c.Quantize(4)).nbytes((4, 64, 64), torch.float32))
