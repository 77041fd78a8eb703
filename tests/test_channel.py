"""Both ends of a wire stay together: mirrors bitwise equal, steps atomic, state that survives, bad frames refused."""

from __future__ import annotations

import io
import os
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from inputs import tensor

import thinwire as tw
from thinwire import codecs as c
from thinwire import memory as m
from thinwire.codecs.frame import BYTES
from thinwire.errors import UsageError
from thinwire.memory.store import FileStore, RamStore

DELTAS = [m.Delta(store=s, gate=g, cold=k) for s in ("fp32", "bf16", "int8") for g in (False, True)
          for k in (None, c.Rotated(c.Quantize(4)))]  # fmt: skip
MEMORIES = [m.Plain(), m.Diana(0.3), m.RandDiana(0.4), m.EF21(), m.ErrorFeedback(), m.EControl(0.3), *DELTAS]


def ends(codec: c.Codec, memory: m.Memory) -> tuple[tw.Channel, tw.Channel]:
    return tw.Channel(codec, memory, name="sender"), tw.Channel(codec, memory, name="receiver")


def move(pair: tuple[tw.Channel, tw.Channel], key, x: torch.Tensor) -> torch.Tensor:
    size = pair[0].nbytes(key, x.shape, x.dtype)
    frame = pair[0].send(key, x)
    assert frame.numel() == size == pair[1].nbytes(key, x.shape, x.dtype) or pair[1].state.read("h", key) is None
    return pair[1].recv(key, frame, x.shape, x.dtype)


def digests(channel: tw.Channel, keys) -> list[int]:
    return [channel.digest(k) for k in keys]


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
@pytest.mark.parametrize("codec", [c.Quantize(4), c.LowRank(2), c.TopK(0.2)], ids=str)
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


# --- bad messages


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


# --- stores


@pytest.mark.parametrize("dtype", ["native", "fp32", "bf16", "int8"])
def test_file_store_equals_ram_store(tmp_path, dtype):
    ram, file = RamStore(dtype), FileStore(tmp_path / "store.bin", dtype)
    g = torch.Generator().manual_seed(0)
    for i in range(200):
        key, op = int(torch.randint(0, 20, (), generator=g)), int(torch.randint(0, 5, (), generator=g))
        shape = (int(torch.randint(1, 4, (), generator=g)) * 8,)
        for store in (ram, file):
            if op == 0:
                store.forget(key)
            else:
                store.put(key, store.pack(torch.full(shape, i + 0.37)))
        a, b = ram.get(key), file.get(key)
        assert (a is None) == (b is None) and sorted(ram) == sorted(file)
        if a is not None and b is not None:
            assert torch.equal(ram.unpack(a), file.unpack(b))
    assert ram.used == file.used and file.end >= file.used
    assert os.path.getsize(file.path) <= file.end
    file.close()
    assert not file.path.exists()


def test_pinned_share_is_chosen_by_hash_alone():
    """Half of the ids are kept, the same half whatever the order: both ends agree without talking."""
    a, b = RamStore("bf16", 0.5), RamStore("bf16", 0.5)
    value = torch.ones(4)
    for key in range(2000):
        a.put(key, a.pack(value))
        b.put(1999 - key, b.pack(value))
    assert sorted(a) == sorted(b) and 900 < len(list(a)) < 1100


def test_capacity_in_bytes_keeps_the_first_that_fit(tmp_path):
    for store in (RamStore("fp32", "1KB"), FileStore(tmp_path / "s", "fp32", 1000)):
        for key in range(10):
            store.put(key, store.pack(torch.ones(64)))  # 256 bytes
        assert list(store) == [0, 1, 2] and store.used == 768
        store.forget(1)
        assert store.put(9, store.pack(torch.ones(64))) and sorted(store) == [0, 2, 9]


def test_samples_beyond_capacity_stay_cold_and_both_ends_agree():
    pair = ends(c.Quantize(4), m.Delta(capacity=0.5))
    for _ in range(3):
        for key in range(40):
            for end in pair:
                end.begin()
            move(pair, key, torch.ones(32))
            for end in pair:
                end.commit()
    kept = sum(pair[0].is_warm(key, (32,)) for key in range(40))
    assert 10 < kept < 30 and pair[0].stats.warm == 2 * kept == pair[1].stats.warm


def test_delta_through_a_file_equals_ram(tmp_path):
    in_file = [tw.Channel(c.Quantize(3), m.Delta(path=str(tmp_path / f"{i}.bin"))) for i in range(2)]
    in_ram = ends(c.Quantize(3), m.Delta())
    for visit in range(3):
        for key in range(6):
            x = tensor("gaussian", (4, 50), torch.float32, key) + 0.01 * visit
            assert torch.equal(move(tuple(in_file), key, x), move(in_ram, key, x))


def test_delta_in_host_memory_equals_ram_and_is_checkpointed():
    """Here tensors are in host memory already; on a card benchmarks/card/gpu.py --only nccl compares."""
    in_host, in_ram = ends(c.Quantize(3), m.Delta(host=True)), ends(c.Quantize(3), m.Delta())
    for visit in range(3):
        for key in range(6):
            x = tensor("gaussian", (4, 50), torch.float32, key) + 0.01 * visit
            assert torch.equal(move(in_host, key, x), move(in_ram, key, x))
    mine, theirs = in_host[0].state_dict(), in_ram[0].state_dict()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    with pytest.raises(UsageError, match="path or host"):
        m.Delta(path="somewhere", host=True)


def test_unwritable_store_is_one_line():
    with pytest.raises(ValueError, match="cannot open the store /proc/nowhere/x") as caught:
        FileStore("/proc/nowhere/x")
    assert "\n" not in str(caught.value)


def test_a_store_cut_while_in_use_is_an_error(tmp_path):
    store = FileStore(tmp_path / "s", "fp32")
    store.put(1, store.pack(torch.ones(64)))
    os.truncate(store.path, 10)
    with pytest.raises(OSError, match="cut while in use"):
        store.get(1)


def test_file_store_memory_stays_small(tmp_path):
    """200 MB through the store, under 40 MB more resident memory (the 2 GB version: benchmarks/pipeline/store.py)."""

    def resident() -> int:
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    store, row = FileStore(tmp_path / "s", "bf16"), torch.ones(1024, 1024)
    store.put(0, store.pack(row))
    before = resident()
    for key in range(1, 100):
        store.put(key, store.pack(row))
        store.get(key)
    assert store.used == 200 * 2**20 and resident() - before < 40e6


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
