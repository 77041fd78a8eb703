"""What the first stage announces arrives at all stages as it was sent, or not at all."""

from __future__ import annotations

import random

import pytest
import torch

from thinwire.errors import RunFailed, UsageError
from thinwire.pipeline.announce import FIRST_LENGTH, Announcement, Announcer, sample_ids


@pytest.mark.parametrize("sent", [
    Announcement(1, True), Announcement(7, False, (), (0, 3)), Announcement(2, True, (5, -7), (2, 9), (2**62,)),
    Announcement(9, True, tuple(range(3000)), None, tuple(range(3000))),
])  # fmt: skip
def test_an_announcement_arrives_as_it_was_sent(sent):
    assert Announcement.read(sent.words()) == sent
    assert Announcer(None, 0, torch.device("cpu")).announce(sent) == sent


@pytest.mark.parametrize("ids", [4, 300])
def test_a_bit_of_an_announcement_that_changes_on_its_way_is_found(ids, monkeypatch):
    """In the first message or in the second, the checksum included."""
    announcer, bits = Announcer(None, 0, torch.device("cpu")), random.Random(ids)
    announcer.size = 2
    sent = Announcement(3, True, tuple(range(ids)))
    lengths: list[int] = []
    monkeypatch.setattr(announcer, "_send", lambda words: (lengths.append(len(words)), words)[1])
    assert announcer.announce(sent) == sent and len(lengths) == 1 + (ids > 64)
    for _ in range(100):
        which, left = bits.randrange(len(lengths)), iter(range(len(lengths)))

        def flip(words, which=which, left=left):
            if next(left) == which:
                words[bits.randrange(len(words))] ^= 1 << bits.randrange(63)
            return words

        announcer.length = FIRST_LENGTH
        monkeypatch.setattr(announcer, "_send", flip)
        with pytest.raises(RunFailed, match="damaged at rank 0"):
            announcer.announce(sent)


def test_a_text_is_raised_where_it_arrives():
    with pytest.raises(UsageError, match="ünique"):
        Announcer(None, 0, torch.device("cpu")).announce("ids must be ünique")


def test_sample_ids():
    assert sample_ids(torch.tensor([3, 1])) == (3, 1) and sample_ids(None) is None
    assert len(set(sample_ids(["a", "b", 1]))) == 3
    for wrong in ([1, 1], ["a", "a"], [True], [1.0], [2**64]):
        with pytest.raises(UsageError, match="id"):
            sample_ids(wrong)
