"""Batches: balanced, pinned to replicas, the same for any number of them, resumed bit for bit; rates and groups."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import UsageError
from thinwire.train.config.sections import OptimConfig
from thinwire.train.data.batches import Batches, held_out_batches
from thinwire.train.data.samples import IGNORED, Samples
from thinwire.train.learning_rate import groups, rate, total_steps

SEQ = 3


def numbered(train: int, held_out: int = 0) -> Samples:
    """Sample i holds the tokens 10 i …; ids are scattered."""
    count = train + held_out
    stream = np.concatenate([10 * i + np.arange(SEQ + 1) for i in range(count)]).astype(np.int32)
    starts = np.arange(count) * (SEQ + 1)
    ids = np.array([i * 0x9E3779B97F4A7C15 % 2**63 for i in range(count)], np.int64)
    numbers = np.random.default_rng(count).permutation(count)
    return Samples(
        stream, np.ones(len(stream), bool), starts, starts + SEQ + 1, ids,
        np.sort(numbers[:train]), np.sort(numbers[train:]), SEQ, 0,
    )  # fmt: skip


def epochs(samples, batch, replicas, count, seed=0):
    """ids[epoch][replica] in order."""
    loaders = [Batches(samples, batch, seed, r, replicas) for r in range(replicas)]
    steps = loaders[0].steps_per_epoch
    return [[[loader.next().ids.tolist() for _ in range(steps)] for loader in loaders] for _ in range(count)]


@given(replicas=st.sampled_from([1, 2, 3, 4]), rows=st.integers(1, 4), extra=st.integers(0, 30), seed=st.integers(0, 3))
def test_pinned_balanced_and_independent_of_the_replicas(replicas, rows, extra, seed) -> None:
    batch = replicas * rows
    samples = numbered(2 * batch + extra)
    runs = epochs(samples, batch, replicas, 3, seed)
    together = epochs(samples, batch, 1, 3, seed)
    home: dict[int, int] = {}
    for epoch, whole in zip(runs, together):
        steps = [[i for part in epoch for i in part[t]] for t in range(len(epoch[0]))]
        assert steps == whole[0], "the batch of a step is the same whatever the number of replicas"
        seen = Counter(i for step in steps for i in step)
        assert set(seen.values()) == {1} and len(seen) == len(samples.train) // batch * batch
        assert set(seen) <= set(samples.ids[samples.train].tolist())
        for replica, part in enumerate(epoch):
            for i in (i for step in part for i in step):
                assert home.setdefault(i, replica) == replica, "a sample stays with its replica"
    assert runs[0] != runs[1] or len(samples.train) // batch < 3, "epochs differ in order"


def test_every_sample_is_met_and_left_out_ones_change() -> None:
    samples = numbered(23)
    runs = epochs(samples, 4, 2, 12)
    left = [set(samples.ids.tolist()) - {i for part in epoch for step in part for i in step} for epoch in runs]
    assert all(len(out) == 3 for out in left)
    assert not set.intersection(*left)


def test_shuffling_is_a_matter_of_the_seed_and_shuffles() -> None:
    samples = numbered(64)
    (first,), (second,) = (epochs(samples, 8, 1, 1, seed) for seed in (0, 1))
    assert first != second
    flat = [i for step in first[0] for i in step]
    assert flat != sorted(flat) and flat != samples.ids[samples.train].tolist()
    lanes = [{i: lane for step in run[0] for lane, i in enumerate(step)} for run in (first, second)]
    assert lanes[0] != lanes[1], "which samples share a lane is dealt by the seed too"
    places = {int(i): n for n, i in enumerate(samples.ids)}
    order = np.array([places[i] for i in flat])
    assert abs(np.corrcoef(order, np.arange(64))[0, 1]) < 0.4


@given(st.integers(1, 40), st.integers(0, 25))
def test_resumed_as_if_never_stopped(steps, stop) -> None:
    samples = numbered(30)
    whole, before = Batches(samples, 6, 1, 1, 2), Batches(samples, 6, 1, 1, 2)
    for _ in range(stop):
        whole.next()
        before.next()
    after = Batches(samples, 6, 1, 1, 2)
    after.load_state_dict(before.state_dict())
    for _ in range(min(steps, 12)):
        ahead = after.peek()
        expected, got = whole.next(), after.next()
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(expected[:4], got[:4]))
        assert got.segments is None
        assert torch.equal(ahead, got.ids)
    assert after.state_dict() == whole.state_dict()


def test_rows_belong_to_their_ids() -> None:
    samples = numbered(12)
    batch = Batches(samples, 4, 0, 0, 2).next()
    number = {int(i): n for n, i in enumerate(samples.ids)}
    for i, inputs, labels in zip(batch.ids.tolist(), batch.inputs, batch.labels):
        assert inputs.tolist() == [10 * number[i], 10 * number[i] + 1, 10 * number[i] + 2]
        assert labels.tolist() == [10 * number[i] + 1, 10 * number[i] + 2, 10 * number[i] + 3]
    assert batch.labelled == 4 * SEQ, "of all replicas"


@pytest.mark.parametrize(("count", "batch", "replicas"), [(7, 4, 2), (8, 4, 2), (1, 6, 3), (0, 4, 1)])
def test_held_out_samples_are_met_once_each(count, batch, replicas) -> None:
    samples = numbered(5, count)
    parts = [list(held_out_batches(samples, batch, r, replicas)) for r in range(replicas)]
    assert {len(part) for part in parts} == {-(-count // batch)}
    rows = [b for part in parts for b in part]
    ids = [i for b in rows for i in b.ids.tolist()]
    assert sorted(i for i in ids if i >= 0) == sorted(samples.ids[samples.held_out].tolist())
    assert len(set(ids)) == len(ids) or count > batch, "one batch never has an id twice"
    for b in rows:
        assert b.inputs.shape == (batch // replicas, SEQ)
        assert ((b.labels == IGNORED).all(1) == (b.ids < 0)).all()
    assert sum(b.labelled for b in parts[0]) == count * SEQ


def test_mistakes() -> None:
    with pytest.raises(UsageError, match=r"\[optim\] batch = 8: there are only 5 samples of 3 tokens"):
        Batches(numbered(5), 8, 0)
    with pytest.raises(UsageError, match=r"\[optim\] batch = 5: must be a multiple of dp = 2"):
        Batches(numbered(5), 5, 0, 0, 2)
    state = Batches(numbered(8), 4, 0).state_dict()
    for other, words in (
        (Batches(numbered(9), 4, 0), "its samples are not these: .*"),
        (Batches(numbered(8), 2, 0), r"\[optim\] batch was 4, now it is 2"),
        (Batches(numbered(8), 4, 1), r"\[data\] seed was 0, now it is 1"),
    ):
        with pytest.raises(UsageError, match=f"the checkpoint cannot go on here: {words}; train anew"):
            other.load_state_dict(state)


def test_rate() -> None:
    cosine = OptimConfig(lr=2.0, warmup=4, final=0.1)
    assert [rate(cosine, step, 20) for step in range(4)] == [0.5, 1.0, 1.5, 2.0]
    assert rate(cosine, 4, 20) == 2.0
    assert rate(cosine, 19, 20) == pytest.approx(0.2) and rate(cosine, 99, 20) == pytest.approx(0.2)
    falling = [rate(cosine, step, 20) for step in range(4, 20)]
    assert falling == sorted(falling, reverse=True) and falling[7] + falling[8] == pytest.approx(2.2)
    constant = OptimConfig(lr=2.0, warmup=0, schedule="constant")
    assert {rate(constant, step, 20) for step in range(30)} == {2.0}
    assert rate(OptimConfig(lr=1.0, warmup=3), 0, 1) == pytest.approx(1 / 3)


def test_groups_and_length() -> None:
    named = dict(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3)).named_parameters())
    decayed, plain = groups(OptimConfig(weight_decay=0.3), named)
    assert (decayed["names"], decayed["weight_decay"]) == (["0.weight"], 0.3)
    assert (plain["names"], plain["weight_decay"]) == (["0.bias", "1.weight", "1.bias"], 0.0)
    torch.optim.AdamW([decayed, plain], lr=1.0)
    assert len(groups(OptimConfig(), {"0.weight": named["0.weight"]})) == 1
    assert total_steps(OptimConfig(epochs=3), 7) == 21 and total_steps(OptimConfig(epochs=3, steps=5), 7) == 5
