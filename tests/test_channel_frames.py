"""Frames that a channel refuses (not finite, foreign, stale, cut, damaged), at once or at the end of a step."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from channel_support import MEMORIES, digests, ends, move
from inputs import tensor

import thinwire as tw
from thinwire import codecs as c
from thinwire import memory as m


def test_nonfinite_names_the_key_and_changes_nothing():
    for memory in MEMORIES:
        for codec in (c.Quantize(4), c.LowRank(2), c.TopK(0.5)):
            pair = ends(codec, memory)
            x = tensor("gaussian", (8, 16), torch.float32, 0)
            move(pair, "layer.3", x)
            before = digests(pair[0], ["layer.3"]), pair[0].state.read("e", "layer.3")
            bad = x.clone()
            bad[0, 0] = torch.nan
            with pytest.raises(ValueError, match=r"layer\.3.*1 of 128 values are NaN or Inf"):
                pair[0].send("layer.3", bad)
            size = pair[0].nbytes("layer.3", x.shape, x.dtype)
            frame = pair[0].send("layer.3", bad, nonfinite="flag")
            assert frame.numel() == size
            assert pair[1].recv("layer.3", frame, x.shape, x.dtype).isnan().all()
            after = digests(pair[0], ["layer.3"]), pair[0].state.read("e", "layer.3")
            assert before[0] == after[0] and (before[1] is None or torch.equal(before[1], after[1]))
            assert pair[0].stats.nonfinite == pair[1].stats.nonfinite == 1
            move(pair, "layer.3", x)


def test_nonfinite_row_flags_the_whole_message():
    pair = ends(c.Quantize(4), m.Delta())
    x = torch.ones(3, 16)
    x[1, 2] = torch.inf
    with pytest.raises(ValueError, match="NaN or Inf"):
        pair[0].send([1, 2, 3], x)
    frame = pair[0].send([1, 2, 3], x, nonfinite="flag")
    assert pair[1].recv([1, 2, 3], frame, x.shape, x.dtype).isnan().all() and pair[0].digest(1) == -1


def test_foreign_stale_truncated_and_flipped_frames_are_refused():
    pair = ends(c.Quantize(4), m.Delta())
    x = torch.ones(64)
    for end in pair:
        end.begin(7)
    frame, other = pair[0].send(1, x), pair[0].send(2, x)
    cases = {"another key": other, "damaged": frame[:-1], "at least 16 bytes": frame[:10], "uint8": frame.float()}
    for said, bad in cases.items():
        with pytest.raises(ValueError, match=said):
            pair[1].recv(1, bad, x.shape, x.dtype)
    pair[1].recv(1, frame, x.shape, x.dtype)
    with pytest.raises(ValueError, match="expected step 7, send 1"):
        pair[1].recv(1, frame, x.shape, x.dtype)  # a second time
    pair[1].rollback()
    pair[1].begin(8)
    with pytest.raises(ValueError, match="frame of step 7"):
        pair[1].recv(1, frame, x.shape, x.dtype)
    assert pair[1].stats.rejected == 6


def test_a_change_without_a_mirror_is_refused():
    pair = ends(c.Quantize(4), m.Delta())
    x = torch.ones(64)
    move(pair, 1, x)
    pair[1].state.forget(1)  # one end loses its store
    with pytest.raises(ValueError, match="remembers no such sample"):
        pair[1].recv(1, pair[0].send(1, x), x.shape, x.dtype)


def test_wrong_shape_is_refused():
    pair = ends(c.Quantize(4), m.Plain())
    with pytest.raises(ValueError, match="bytes"):
        pair[1].recv("w", pair[0].send("w", torch.ones(64)), (65,), torch.float32)


@pytest.mark.parametrize("memory", [m.Plain(), m.Delta()], ids=lambda k: k.name)
def test_every_flipped_bit_is_found(memory):
    pair = ends(c.Quantize(4), memory)
    x = tensor("gaussian", (40,), torch.float32, 0)
    move(pair, 1, x)
    frame = pair[0].send(1, x)
    for bit in range(frame.numel() * 8):
        bad = frame.clone()
        bad[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(ValueError):
            pair[1].recv(1, bad, x.shape, x.dtype)
    pair[1].recv(1, frame, x.shape, x.dtype)


FUZZ = int(os.environ.get("THINWIRE_FUZZ", "3000"))
FUZZED = [
    c.Quantize(3), c.TopK(0.1), c.Chain(c.TopK(0.2), c.Natural()), c.Ternary(), c.NaturalDither(3), c.ScaledSign(),
    c.LowRank(1), c.RandK(0.2), c.Rotated(c.Quantize(4)), c.Induced(c.TopK(0.1), c.Dither(3)), c.Natural(),
]  # fmt: skip


def mutate(wire: np.ndarray, rng: np.random.Generator) -> torch.Tensor:
    """One of: bytes overwritten, bits flipped, cut short, grown, all random."""
    kind, out = rng.integers(5), wire.copy()
    place = rng.integers(0, max(wire.size, 1), rng.integers(1, 5))
    if kind == 0:
        out[place] = rng.integers(0, 256, place.size)
    elif kind == 1:
        out[place] ^= np.uint8(1) << rng.integers(0, 8, place.size).astype(np.uint8)
    elif kind == 2:
        out = out[: place[0]]
    elif kind == 3:
        out = np.concatenate((out, out[: place[0]]))
    else:
        out = rng.integers(0, 256, wire.size).astype(np.uint8)
    return torch.from_numpy(out)


@pytest.mark.timeout(3600)
def test_mutated_messages_never_crash_and_mutated_frames_never_pass():
    """A codec may decode damage of the right length, or raise ValueError; a frame that differs from the one sent is
    always refused. THINWIRE_FUZZ=1000000 runs the long version."""
    rng, x, passed = np.random.default_rng(FUZZ), tensor("gaussian", (9, 15), torch.float32, 0), 0
    pairs = [ends(codec, m.Plain()) for codec in FUZZED]
    messages = [codec.encode(x, 1).numpy() for codec in FUZZED]
    frames = [pair[0].send("w", x).numpy() for pair in pairs]
    for i in range(FUZZ):
        at = i % len(FUZZED)
        try:
            y = FUZZED[at].decode(mutate(messages[at], rng), x.shape, x.dtype, 1)
            assert y.shape == x.shape
        except ValueError:
            pass
        bad = mutate(frames[at], rng)
        if np.array_equal(bad.numpy(), frames[at]):
            continue
        try:
            pairs[at][1].recv("w", bad, x.shape, x.dtype)
            passed += 1
        except ValueError:
            pass
    assert passed == 0
    for pair, frame in zip(pairs, frames):  # and the frames themselves still pass
        pair[1].recv("w", torch.from_numpy(frame), x.shape, x.dtype)


NEVER_SYNC = [c.Identity(), c.Cast("bf16"), c.Quantize(3), c.ScaledSign(), c.Rotated(c.Quantize(4))]


@pytest.mark.parametrize("codec", NEVER_SYNC, ids=str)
@pytest.mark.parametrize(
    "memory", [m.Plain(), m.EF21(), m.ErrorFeedback(), m.Delta(cold=c.Quantize(8))], ids=lambda k: k.name
)
def test_checks_may_wait_for_the_steps_end(codec, memory):
    """Messages whose checks are deferred are the same bits; what was wrong with one is known when the step ends."""
    seen = ends(codec, memory)
    unseen = tuple(tw.Channel(codec, memory, name=end.name, defer=True) for end in seen)
    keys = [4, 5, 6] if memory.cold_start else "x"
    for step, fault in enumerate(["", "", "nan", "", "damaged", "stale", ""]):
        x = tensor("gaussian", (3, 256), torch.float32, step)
        if fault == "nan":
            x[1, 7] = torch.nan
        for end in (*seen, *unseen):
            end.begin()
        frame, again = seen[0].send(keys, x, nonfinite="flag"), unseen[0].send(keys, x, nonfinite="later")
        assert torch.equal(frame, again) or fault == "nan"
        if fault == "damaged":
            again[40] ^= 16
        if fault == "stale":
            unseen[1].step += 1
        y = unseen[1].recv(keys, again, x.shape, x.dtype, later=True)
        with pytest.raises(RuntimeError, match="are open"):
            unseen[1].commit()
        told = [bool(end.resolve_checks()) for end in unseen]
        assert told == [fault == "nan", fault != ""]
        if not fault:
            assert torch.equal(y, seen[1].recv(keys, frame, x.shape, x.dtype))
        else:
            assert torch.isnan(y).all()
        for end in (*seen, *unseen):
            end.step = step + 1
            end.rollback() if fault else end.commit()
    assert (unseen[1].stats.nonfinite, unseen[1].stats.rejected) == (1, 2)


def test_a_codec_that_reads_values_on_the_host_is_not_deferred():
    channel = tw.Channel(c.LowRank(1), m.ErrorFeedback(), defer=True)
    channel.begin()
    channel.send("x", tensor("gaussian", (100,), torch.float32, 0), nonfinite="later")
    channel.commit()
