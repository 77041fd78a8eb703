"""The parts of a compressed pipeline that need no second process."""

from __future__ import annotations

import errno
import os

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire import codecs as c
from thinwire import memory as m
from thinwire.bench.pipeline_modes import MODES, predicted_bytes
from thinwire.cli import main
from thinwire.config.wire import Link
from thinwire.errors import UsageError
from thinwire.memory.file_store import FileStore
from thinwire.pipeline import lazy_error as lazy_module
from thinwire.pipeline.announce import Announcement
from thinwire.pipeline.counters import store_forecast
from thinwire.pipeline.dropout import SampleDropout, find_dropout, seed_dropout
from thinwire.pipeline.early_receives import is_refusal
from thinwire.pipeline.lane import DIRECTIONS, REFUSED, Lane
from thinwire.pipeline.lazy_error import AGAIN, STEPS
from thinwire.pipeline.message_choice import Message, Plan, critical_sends, predicate
from thinwire.pipeline.step_plan import StagePosition, message_tag, plan_step
from thinwire.planner.step import Send, Traffic

CODED = dict.fromkeys(DIRECTIONS, True)


@pytest.mark.parametrize(("rows", "microbatches"), [(8, 4), (7, 4), (5, 5), (13, 4)])
def test_samples_are_split_as_torch_splits_a_batch(rows, microbatches):
    ids = torch.arange(100, 100 + rows)
    expected = [tuple(piece.tolist()) for piece in torch.tensor_split(ids, microbatches)]
    position = StagePosition(0, 2, microbatches, 0)
    always = dict.fromkeys(DIRECTIONS, lambda sender, microbatch: True)
    plan = plan_step(Announcement(3, True, tuple(ids.tolist())), position, CODED, always)
    assert plan.ids == expected and plan.rows == [len(piece) for piece in expected]
    assert [message.ids for message in plan.outgoing["forward"]] == expected
    assert plan_step(Announcement(3, True, None, (rows, 9)), position, CODED, always).rows == plan.rows


def test_a_plan_marks_the_messages_that_when_chose():
    """By the sender's choice at both ends; nothing arrives from stages that do not exist."""
    compress = {
        "forward": lambda sender, microbatch: sender == microbatch,
        "backward": lambda sender, microbatch: False,
    }
    plan = plan_step(Announcement(1, True), StagePosition(1, 3, 3, None), CODED, compress)
    assert [message.coded for message in plan.outgoing["forward"]] == [False, True, False]
    assert [message.coded for message in plan.incoming["forward"]] == [True, False, False]
    assert not any(message.coded for message in plan.incoming["backward"] + plan.outgoing["backward"])
    exact = plan_step(Announcement(1, False), StagePosition(0, 3, 3, None), dict.fromkeys(DIRECTIONS, False), compress)
    assert not any(message.coded for message in exact.outgoing["forward"]) and exact.incoming["forward"] == []


# --- when


def test_epilogue_is_the_papers_set():
    """P(P − 1)/2 sends in all, P − s on stage s (counted from 0, sending to s − 1)."""
    chosen = predicate("epilogue", Traffic.BACKWARD, Plan(), 4, 4, 16)
    per_stage = [sum(chosen(s, mb) for mb in range(16)) for s in range(1, 4)]
    assert per_stage == [3, 2, 1] and sum(per_stage) == 6


@pytest.mark.parametrize(("name", "virtual"), [("1F1B", 1), ("GPipe", 1), ("Interleaved1F1B", 2), ("ZBVZeroBubble", 2)])
def test_critical_is_the_simulators_set(name, virtual):
    sends = critical_sends(name, 4, 8, virtual, 0.2)
    plan = Plan(name)
    for traffic in (Traffic.FORWARD, Traffic.BACKWARD):
        chosen = predicate("critical", traffic, plan, 4, 4 * virtual, 8)
        table = {Send(traffic, s, mb) for s in range(4 * virtual) for mb in range(8) if chosen(s, mb)}
        assert table == {send for send in sends if send.traffic is traffic}
    assert 0 < len(sends) <= 2 * 8 * (4 * virtual - 1)
    given = frozenset({Send(Traffic.FORWARD, 1, 2)})
    assert predicate("critical", Traffic.FORWARD, Plan(sends=given), 4, 4, 8)(1, 2)


def test_when_mistakes():
    with pytest.raises(UsageError, match="backward messages"):
        predicate("epilogue", Traffic.FORWARD, Plan(), 2, 2, 2)
    with pytest.raises(UsageError, match="name the schedule"):
        predicate("critical", Traffic.FORWARD, Plan(), 2, 2, 2)
    with pytest.raises(UsageError, match="in full at random"):
        Lane(Link(c.Quantize(4), m.RandDiana(0.5)), "forward 0→1", "send", 0)


def test_tags_are_each_message_s_own():
    """Within a step, and against the steps before: what a failed step has posted must never match."""
    position = StagePosition(0, 4, 8, 2**31)
    tags = [
        Message(microbatch, None, True, message_tag(position, step, direction, sender, microbatch)).tag(index)
        for direction in DIRECTIONS for sender in range(4) for microbatch in range(8) for index in range(2)
        for step in range(300)
    ]  # fmt: skip
    assert len(set(tags)) == len(tags) and min(tags) > 0 and max(tags) < 2**31
    assert Message(0, None, True, tags[0]).tag(16) == 0
    for untagged in (StagePosition(0, 2048, 2048, 0), StagePosition(0, 4, 8, None)):
        message = Message(0, None, True, message_tag(untagged, 0, "forward", 0, 0))
        assert message.tag(0) == message.tag(1) == 0


# --- lazy error


def scene(kind: str, step: int, microbatches: int = 4, tokens: int = 512, width: int = 32):
    """(a, g) of every micro-batch. "common": activations are alike; "apart": nothing is; "drift": nor are they here,
    but every gradient has a part below the quantiser's first step, which is lost each time."""
    for microbatch in range(microbatches):
        g = torch.Generator().manual_seed(1000 * step + microbatch)
        mean = torch.linspace(-2, 2, width) + 3
        noise, gradient = (torch.randn(tokens, width, generator=g) for _ in range(2))
        share = {"common": 0.9, "apart": 0.0, "drift": 0.1, "half": 0.6}[kind]
        a = share**0.5 * mean / mean.square().mean().sqrt() + (1 - share) ** 0.5 * noise
        if kind == "drift":
            gradient = 0.1 + 9.0 * (torch.rand(tokens, width, generator=g) < 0.02)
        yield a, gradient


def weight_errors(codec, memory, kind: str, steps: range) -> float:
    """‖Σ aᵀ(ĝ − g)‖²/‖Σ aᵀg‖², summed over steps, as the other end decodes."""
    lanes = [Lane(Link(codec, memory), "backward 1→0", end, 0) for end in ("send", "recv")]
    error = size = 0.0
    for step in range(steps.stop):
        for lane in lanes:
            lane.begin(step)
        pairs = []
        for i, (a, g) in enumerate(scene(kind, step)):
            message = Message(i, None, True)
            frame = lanes[0].send(message, 0, g)
            pairs.append((a, g, lanes[1].recv(message, 0, frame, g.shape, g.dtype)))
        for lane in lanes:
            lane.end_step(keep=True)
        if step in steps:
            error += float(sum(a.T @ (y - g) for a, g, y in pairs).square().sum())
            size += float(sum(a.T @ g for a, g, _ in pairs).square().sum())
    return error / size


def tried(lane: Lane, kind: str, steps: range) -> None:
    """The lane's messages of these steps."""
    for step in steps:
        lane.begin(step)
        for i, (a, g) in enumerate(scene(kind, step)):
            lane.trial.note_activation(i, 0, a)
            lane.send(Message(i, None, True), 0, g)
        lane.end_step(keep=True)


@pytest.mark.slow
@pytest.mark.parametrize(("codec", "kind", "lazy"), [
    (c.Quantize(3), "common", True), (c.Quantize(3), "apart", False),
    (c.Quantize(3), "drift", True),  # activations differ, errors do not
    (c.LowRank(2), "half", False),  # activations are alike, but the residual grows
])  # fmt: skip
def test_lazy_error_is_kept_where_it_makes_gradients_better(codec, kind, lazy, monkeypatch):
    """The trial's answer is that of two runs, with and without, whose weight gradients are compared in full."""
    monkeypatch.setattr(lazy_module, "SKETCH", 16)
    lane = Lane(Link(codec, "auto"), "backward 1→0", "send", 0)
    tried(lane, kind, range(2 * STEPS))
    steps = range(STEPS, 2 * STEPS)
    truth = weight_errors(codec, m.ErrorFeedback(), kind, steps) / weight_errors(codec, m.Plain(), kind, steps)
    assert lane.trial.ratio == pytest.approx(truth, rel=0.35) and (truth < 1) is lazy
    assert lane.trial.lazy is lazy and lane.memory == (m.ErrorFeedback() if lazy else m.Plain())
    assert lane.trial.began == AGAIN * 2 * STEPS and not lane.trial.on
    tried(lane, "apart", range(2 * STEPS, lane.trial.began + 2 * STEPS))
    assert not lane.trial.lazy and lane.trial.began == AGAIN**2 * 2 * STEPS + AGAIN * 2 * STEPS


def test_a_trial_goes_on_where_it_was_saved():
    whole, first = (Lane(Link(c.Quantize(3), "auto"), "backward 1→0", "send", 0) for _ in range(2))
    for cut in (0, 1, STEPS, 2 * STEPS - 1, 2 * STEPS, 2 * STEPS + 1):
        again = Lane(Link(c.Quantize(3), "auto"), "backward 1→0", "send", 0)
        tried(first, "common", range(first.trial.step, cut))
        again.load_state_dict(first.state_dict(stores=True))
        tried(whole, "common", range(whole.trial.step, cut + 1))
        tried(again, "common", range(cut, cut + 1))
        ends = [lane.state_dict(stores=True) for lane in (whole, again)]
        assert ends[0].keys() == ends[1].keys() and all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
        first = again
    assert whole.trial.lazy and "coded0/e/s:backward 1→0/0" in ends[0]


def test_a_step_that_is_rolled_back_is_no_trial():
    lane = Lane(Link(c.Quantize(3), "auto"), "backward 1→0", "send", 0)
    tried(lane, "common", range(STEPS + 1))
    before, state = dict(lane.trial.sums), lane.trial.state_dict()
    lane.begin(STEPS + 1)
    lane.trial.note_activation(0, 0, torch.randn(8, 32))
    lane.send(Message(0, None, True), 0, torch.randn(8, 32))
    lane.end_step(keep=False)
    assert lane.trial.step == STEPS + 1 and lane.trial.sums == before and before["plain"] > 0
    after = lane.trial.state_dict()
    residuals = [name for name in after if "/e/" in name]
    assert len(residuals) == 2 and all(torch.equal(after[name], state[name]) for name in residuals)


def test_a_residual_of_another_shape_is_dropped():
    """A short last batch: what is left of a longer one belongs to other rows."""
    end = tw.Channel(c.Quantize(2), m.ErrorFeedback())
    fresh = tw.Channel(c.Quantize(2), m.ErrorFeedback())
    end.send("b", torch.randn(8, 32))
    x = torch.randn(5, 32)
    end.send("b", x)
    fresh.send("b", x)
    assert torch.equal(end.state.read("e", "b"), fresh.state.read("e", "b"))


# --- dropout


def test_masks_belong_to_samples():
    ids: dict[str, tuple[int, ...] | None] = {"now": (7, 8, 9)}
    layer, other = SampleDropout(0.25, 1, lambda: ids["now"]), SampleDropout(0.25, 2, lambda: ids["now"])
    x = torch.ones(3, 40, 50)
    first = layer(x)
    ids["now"] = (9, 7, 8)
    assert torch.equal(layer(x), first[[2, 0, 1]])  # whatever the order
    assert not torch.equal(other(x), layer(x))  # layers differ
    assert float((first == 0).float().mean()) == pytest.approx(0.25, abs=0.02)
    assert float(first.max()) == pytest.approx(1 / 0.75)
    ids["now"] = None
    assert not torch.equal(layer(x), layer(x))  # unknown samples: as torch does it
    assert torch.equal(layer.eval()(x), x)


def test_dropout_is_found_and_replaced():
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Sequential(nn.Dropout(0.0), nn.Dropout(0.3)))
    assert find_dropout(module) == ["1", "2.1"]
    assert find_dropout(nn.MultiheadAttention(8, 2, dropout=0.1)) == ["MultiheadAttention"]
    seed_dropout(module, 0, lambda: None)
    assert find_dropout(module) == [] and isinstance(module[2][1], SampleDropout)


# --- stores


def test_a_full_disk_is_one_clear_error(tmp_path, monkeypatch):
    lane = Lane(Link(c.Quantize(4), m.Delta(path=str(tmp_path))), "forward 0→1", "send", 0)
    lane.begin(1)
    lane.send(Message(0, (1, 2), True), 0, torch.randn(2, 128))

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(UsageError, match=r"cannot write the store .*forward-0-1-send-0.store: No space left"):
            lane.end_step(keep=True)
    lane.begin(2)  # the step has ended all the same, and nothing of it is remembered
    assert lane.digests((1, 2)).tolist() == [-1, -1]
    lane.end_step(keep=True)


def test_prefetched_rows_are_never_stale(tmp_path):
    store = FileStore(tmp_path / "s", "fp32")
    for key in range(4):
        store.put(key, store.pack(torch.full((8,), float(key))))
    store.prefetch([1, 2, 99])
    store.put(2, store.pack(torch.full((8,), 20.0)))
    store.load([1, 2, 3])
    assert [float(store.get(k).data[0]) for k in (1, 2, 3)] == [1.0, 20.0, 3.0]
    store.put(3, store.pack(torch.full((8,), 30.0)))
    store.forget(1)
    assert store.get(1) is None and float(store.get(3).data[0]) == 30.0 and not store.coming


def resident() -> int:
    """Bytes of RAM this process holds now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def visit(lanes: tuple[Lane, Lane], step: int, ids: tuple[int, ...], x: torch.Tensor) -> None:
    for lane in lanes:
        lane.begin(step)
        lane.digests(ids)
    lanes[1].recv(Message(0, ids, True), 0, lanes[0].send(Message(0, ids, True), 0, x), x.shape, x.dtype)
    for lane in lanes:
        lane.end_step(keep=True)


@pytest.mark.slow
def test_a_file_store_stays_on_disk(tmp_path):
    """64 MB remembered at two ends, visited twice: resident memory grows by a fraction of it."""
    link = Link(c.Quantize(4), m.Delta(cold=c.Quantize(8), path=str(tmp_path)))
    lanes = Lane(link, "forward 0→1", "send", 0), Lane(link, "forward 0→1", "recv", 0)
    x = torch.randn(4, 1 << 17)
    for step in range(2):  # cold and warm: whatever is compiled is compiled here
        visit(lanes, step, (1, 2, 3, 4), x)
    before = resident()
    for step in range(2, 66):
        visit(lanes, step, tuple(4 * (step % 32) + i for i in range(4)), x)
    kept = sum(lane.coded[0].state.stores["h"].used for lane in lanes)
    assert kept >= 2**26 and resident() - before < kept / 4
    for lane in lanes:
        lane.close()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_shows_before_the_first_step(tmp_path, monkeypatch):
    def forecast(samples, **more):
        lane = Lane(Link(c.Quantize(4), m.Delta(path=str(tmp_path), **more)), "forward 0→1", "send", 0)
        return store_forecast([lane], samples, (64, 100))[0]

    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1_000_000}))
    assert "12.80 kB per sample" in forecast(70) and "896.00 kB for 70 samples" in forecast(70)
    with pytest.raises(UsageError, match=r"1\.02 MB in .*, where 1\.00 MB are free"):
        forecast(80)
    assert "512.00 kB for 80 samples" in forecast(80, capacity=0.5) and "40.00 kB for 80" in forecast(
        80, capacity="40kB"
    )
    assert "6.60 kB per sample" in forecast(80, store="int8")


def test_nothing_grows():
    """500 steps over the same samples: as much memory as after 50."""
    forward, backward = Link(c.Quantize(4), m.Delta(cold=c.Quantize(8))), Link(c.Quantize(3), m.ErrorFeedback())
    lanes = Lane(forward, "forward 0→1", "send", 0), Lane(forward, "forward 0→1", "recv", 0)
    back = Lane(backward, "backward 1→0", "send", 0), Lane(backward, "backward 1→0", "recv", 0)
    x, sizes = torch.randn(4, 32, 128), []
    for step in range(500):
        visit(lanes, step, tuple(4 * (step % 8) + i for i in range(4)), x)
        visit(back, step, (0, 1, 2, 3), x)
        sizes.append(resident())
    assert max(sizes[450:]) - max(sizes[:50]) < 4 << 20


# --- the bench


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("warm", [False, True])
def test_predicted_bytes_are_the_sent_ones(name, warm):
    mode, shape = MODES[name], (3, 16, 40)
    if mode.wire is None:
        assert predicted_bytes(mode, *shape, warm) == (4 * 3 * 16 * 40,) * 2
        return
    for way, link in (("forward", mode.wire.forward), ("backward", mode.wire.backward)):
        lane, message = Lane(link, f"{way} 0→1", "send", 0), Message(0, (1, 2, 3), True)
        for step in range(1 + warm):
            lane.begin(step)
            frame = lane.send(message, 0, torch.randn(shape))
            lane.end_step(keep=True)
        assert frame.numel() == predicted_bytes(mode, *shape, warm)[way == "backward"]


@pytest.mark.parametrize(("words", "said"), [
    (["--hosts", "1"], "--hosts 1"), (["--only", "zip"], "zip"), (["--microbatches", "2"], "1F1B needs"),
    (["--held-out", "3"], "multiple"),
])  # fmt: skip
def test_bench_mistakes(words, said, capsys):
    assert main(["bench", "pipeline", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("options", [{"nonfinite": "skip"}, {"evaluate": "fast"}])
def test_pipeline_options(options):
    with pytest.raises(UsageError, match=next(iter(options))):
        tw.parallel.Pipeline([object()], **options)


def test_only_a_frame_can_say_that_a_batch_is_refused():
    """Whole numbers cross a boundary as they are: a mask of 255s is a mask."""
    lane = Lane(Link(c.Quantize(4)), "forward 0→1", "send", 0)
    lane.begin(0)
    message = Message(0, (0, 1), True)
    sent = lane.send(message, 0, torch.randn(2, 64))
    refused = lane.refusal(message, 0, (2, 64), torch.empty(2, 64))
    mask = lane.send(message, 1, torch.full((2, 64), REFUSED, dtype=torch.uint8))
    assert [is_refusal(x, torch.float32) for x in (sent, refused)] == [False, True]
    assert not is_refusal(mask, mask.dtype)
