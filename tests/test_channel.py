"""Both ends of a wire stay together: mirrors bitwise equal, steps atomic, state that survives."""

from __future__ import annotations

import io
from itertools import pairwise

import numpy as np
import pytest
import torch
from channel_support import DELTAS, MEMORIES, digests, ends, move
from hypothesis import given
from hypothesis import strategies as st
from inputs import tensor

import thinwire as tw
from thinwire import codecs as c
from thinwire import memory as m
from thinwire.codecs.frame import BYTES
from thinwire.errors import UsageError


@pytest.mark.slow
@given(st.sampled_from(MEMORIES), st.sampled_from([torch.float32, torch.bfloat16, torch.float64]), st.data())
def test_mirrors_stay_equal_in_any_order(memory, dtype, data):
    """Random keys in random order, steps committed or rolled back: sizes as announced, mirrors bitwise equal."""
    pair = ends(c.Quantize(3), memory)
    for step in range(6):
        for end in pair:
            end.begin()
        for _ in range(3):
            key = data.draw(st.sampled_from(["a", "b", 7]))
            x = tensor("gaussian", (5, 40), dtype, step) + 0.1
            frame = pair[0].send(key, x)
            assert frame.numel() == pair[1].nbytes(key, x.shape, dtype)
            pair[1].recv(key, frame, x.shape, dtype)
        keep = data.draw(st.booleans())
        for end in pair:
            end.commit() if keep else end.rollback()
        assert digests(pair[0], ["a", "b", 7]) == digests(pair[1], ["a", "b", 7])


@pytest.mark.parametrize("memory", DELTAS, ids=lambda k: f"{k.store}-{k.gate}-{k.cold}")
def test_rows_have_their_own_memory(memory):
    pair = ends(c.Quantize(4), memory)
    base = {i: tensor("gaussian", (6, 32), torch.float32, i) for i in range(8)}
    for visit, ids in enumerate([[0, 1, 2], [5, 1, 7], [2, 0, 5], [1, 3, 0]]):
        x = torch.stack([base[i] + 0.001 * visit for i in ids])
        size = pair[1].nbytes(ids, x.shape, x.dtype)
        frame = pair[0].send(ids, x)
        assert frame.numel() == size
        y = pair[1].recv(ids, frame, x.shape, x.dtype)
        assert digests(pair[0], ids) == digests(pair[1], ids)
        assert (y - x).norm() / x.norm() < 0.15
    assert (pair[0].stats.cold, pair[0].stats.warm) == (6, 6) and pair[1].stats.hit_rate == 0.5


def test_rows_do_not_depend_on_their_neighbours():
    """A sample's message is the same bytes whatever stands beside it in the micro-batch."""
    x = tensor("gaussian", (3, 37), torch.float32, 0)  # 37 is no multiple of a block
    together, alone = tw.Channel(c.Quantize(4), m.Delta()), tw.Channel(c.Quantize(4), m.Delta())
    for _ in range(2):
        frame = together.send([1, 2, 3], x)
        single = [alone.send([i + 1], x[i : i + 1]) for i in range(3)]
    assert torch.equal(frame[BYTES:-1], torch.cat([s[BYTES:-1] for s in single]))


def test_delta_converges_from_a_compressed_first_visit():
    """The sheet's figures, from m = 0 by 2 bits on a fixed activation: error about halves or better at each visit."""
    pair = ends(c.Quantize(2, scale="mse"), m.Delta(store="fp32", cold=c.Quantize(2, scale="mse")))
    x = tensor("gaussian", (16, 128), torch.float32, 3)
    errors = [float((move(pair, 1, x) - x).norm() / x.norm()) for _ in range(5)]
    assert errors[0] < 0.45 and all(b < 0.6 * a for a, b in pairwise(errors))


@pytest.mark.parametrize("memory", MEMORIES, ids=lambda k: f"{k.name}-{k.store}-{k.gate}-{k.cold}")
@pytest.mark.parametrize(
    "codec", [c.Quantize(4), pytest.param(c.LowRank(2), marks=pytest.mark.slow), c.TopK(0.2)], ids=str
)
def test_state_resumes_bitwise(memory, codec):
    """Save after 5 steps, load with weights_only, go on: the same frames as without stopping."""
    xs = [tensor("gaussian", (12, 20), torch.float32, t) for t in range(10)]
    whole, halves = ends(codec, memory), ends(codec, memory)
    for x in xs[:5]:
        move(whole, "w", x)
        move(halves, "w", x)
    resumed = ends(codec, memory)
    for old, new in zip(halves, resumed):
        file = io.BytesIO()
        torch.save(old.state_dict(), file)
        file.seek(0)
        new.load_state_dict(torch.load(file, weights_only=True))
    for x in xs[5:]:
        frames = [pair[0].send("w", x) for pair in (whole, resumed)]
        assert torch.equal(*frames)
        assert torch.equal(*(pair[1].recv("w", frames[0], x.shape, x.dtype) for pair in (whole, resumed)))


def test_rollback_is_as_if_never_sent():
    for memory in MEMORIES:
        pair, fresh = ends(c.Quantize(4), memory), ends(c.Quantize(4), memory)
        x, junk = tensor("gaussian", (64,), torch.float32, 1), tensor("laplace", (64,), torch.float32, 2)
        for end in (*pair, *fresh):
            end.begin(1)
        for p in (pair, fresh):
            move(p, "w", x)
            for end in p:
                end.commit()
        for end in pair:
            end.begin(2)
        move(pair, "w", junk)
        for end in pair:
            end.rollback()
        for end in (*pair, *fresh):
            end.begin(3)
        assert torch.equal(pair[0].send("w", x), fresh[0].send("w", x)), memory.name


def test_forget_makes_cold():
    pair = ends(c.Quantize(4), m.Delta())
    x = torch.ones(64)
    move(pair, 1, x)
    assert pair[0].is_warm(1, x.shape) and not pair[0].is_warm(1, (65,))
    for end in pair:
        end.forget(1)
    assert not pair[0].is_warm(1, x.shape) and pair[0].digest(1) == -1
    move(pair, 1, x)
    assert pair[0].stats.cold == 2


def test_a_sample_of_another_length_is_cold():
    pair = ends(c.Quantize(4), m.Delta())
    for length in (64, 64, 50, 50):
        move(pair, 1, torch.ones(length))
    assert (pair[0].stats.cold, pair[0].stats.warm) == (2, 2)


def test_counters():
    pair = ends(c.Quantize(4), m.Plain())
    for _ in range(20):
        move(pair, "w", tensor("gaussian", (1280,), torch.float32, 0))
    stats = pair[0].stats
    assert stats.messages == 20 and stats.raw_bytes == 20 * 5120
    assert stats.wire_bytes == 20 * (16 + 640 + 20) == pair[1].stats.wire_bytes
    assert stats.ratio == pytest.approx(5120 / 676) and 0.1 < stats.relative_error < 0.14


def test_unbalanced_steps_are_errors():
    channel = tw.Channel(c.Quantize(4), m.Delta())
    with pytest.raises(RuntimeError, match="no step is open"):
        channel.commit()
    channel.begin()
    with pytest.raises(RuntimeError, match="open already"):
        channel.begin()
    with pytest.raises(RuntimeError, match="before taking the state"):
        channel.state_dict()


@pytest.mark.parametrize(
    ("keys", "said"), [([1], "one key per row"), ([1, 1, 2], "stands twice"), (None, "None: must be a text")]
)
def test_bad_row_keys(keys, said):
    with pytest.raises(ValueError, match=said):
        tw.Channel(c.Quantize(4), m.Delta()).send(keys, torch.ones(3, 8))


@pytest.mark.parametrize(
    "key", [None, 1.0, True, b"a", (1, 2), torch.tensor(1), np.bool_(True), np.float32(1)], ids=repr
)
def test_keys_that_no_checkpoint_could_name_are_refused(key):
    channel = tw.Channel(c.Quantize(4), m.Delta(), name="wire")
    calls = [lambda: channel.digest(key), lambda: channel.forget(key), lambda: channel.is_warm(key, (8,))]
    calls += [lambda: channel.send([key, 2], torch.ones(2, 8)), lambda: channel.nbytes([key], (1, 8), torch.float32)]
    for call in calls:
        with pytest.raises(UsageError, match="must be a text or a whole number") as caught:
            call()
        assert "\n" not in str(caught.value)
    assert not list(channel.state.stores["h"])


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.text(st.characters(codec="utf-8")), min_size=1, unique=True))
def test_all_other_keys_survive_a_checkpoint(keys):
    """NumPy's whole numbers too, which are Python's from then on."""
    pair, again = ends(c.Quantize(4), m.Delta()), tw.Channel(c.Quantize(4), m.Delta())
    given_keys = [np.int64(key) if isinstance(key, int) else np.str_(key) for key in keys]
    x = torch.ones(len(keys), 8)
    pair[1].recv(keys, pair[0].send(given_keys, x), x.shape, x.dtype)
    again.load_state_dict(pair[0].state_dict())
    assert digests(again, keys) == digests(pair[1], given_keys) == digests(pair[0], keys)
    assert all(again.is_warm(key, (8,)) for key in keys)


@pytest.mark.parametrize("memory", [m.ErrorFeedback(), m.EF21(), m.Delta(cold=c.Cast("fp16"))], ids=lambda k: k.name)
def test_a_row_that_does_not_fit_leaves_the_state_of_all_rows_alone(memory):
    """Rows are coded one after the other; one beyond the codec's range refuses the message, also for rows before it."""
    sender = tw.Channel(c.Cast("fp16"), memory)
    x = torch.ones(3, 5)
    x[2] = 1e30
    with pytest.raises(ValueError, match="do not fit the codec's range"):
        sender.send([1, 2, 3], x)
    assert not any(name.startswith(("e/", "h/")) for name in sender.state_dict())
    assert sender.stats.cold == 0


def test_a_channel_does_what_its_codec_or_collective_can():
    with pytest.raises(ValueError, match="reduce takes a collective"):
        tw.Channel(c.Identity()).reduce("w", torch.ones(3))
    with pytest.raises(ValueError, match="take a codec"):
        tw.Channel(tw.collectives.Dense()).send("w", torch.ones(3))


def test_changing_the_memory_drops_residuals_of_another():
    channel = tw.Channel(c.TopK(0.1), m.ErrorFeedback())
    channel.send("w", tensor("gaussian", (100,), torch.float32, 0))
    channel.change_memory(m.ErrorFeedback())
    assert channel.state.read("e", "w") is not None
    channel.change_memory(m.Plain())
    assert channel.state.read("e", "w") is None and channel.memory == m.Plain()


@pytest.mark.parametrize("cold", [None, c.Quantize(8), c.Rotated(c.Quantize(4)), c.TopK(0.5)], ids=str)
def test_rows_together_equal_rows_alone(cold):
    """Whole blocks go through one call: same values and mirrors as row by row, mixed with cold rows too."""
    memory = m.Delta(cold=cold, gate=True)
    together, alone = ends(c.Quantize(4, block=32), memory), ends(c.Quantize(4, block=32), memory)
    for visit, ids in enumerate([[1, 2, 3], [2, 1, 3], [4, 1, 5, 2]]):
        x = torch.stack([tensor("gaussian", (4, 64), torch.float32, i) + 0.01 * visit for i in ids])
        whole = move(together, ids, x)
        single = torch.cat([move(alone, [i], x[n : n + 1]) for n, i in enumerate(ids)])
        if not isinstance(cold, c.Rotated):  # its rotation follows the message
            assert torch.equal(whole, single)
            assert digests(together[0], ids) == digests(alone[0], ids)
        assert digests(together[0], ids) == digests(together[1], ids)
