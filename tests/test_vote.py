"""The vote at the end of a step, and which gradients are final before backward ends: without a network."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.collectives.transit import Transit
from thinwire.data_parallel.gradient_pass import GradientWatch
from thinwire.errors import RunFailed
from thinwire.train.vote import Ballot, Exchanging, Vote

PAIR = Exchanging([[0, 2], [1, 3]])


def ballot(step: int = 7) -> Ballot:
    tables = torch.arange(PAIR.bytes, dtype=torch.uint8)
    return Ballot(step, 2, 0.1, True, 2**31 - 1, 0.25, torch.tensor([1.5, float("inf"), -0.0]), tables)


def test_a_ballot_arrives_as_it_was_sent():
    read = Vote(3, [PAIR])._read(1, ballot().pack())
    assert (read.step, read.faults, read.squares, read.stop) == (7, 2, 0.1, True)
    assert (read.tied, read.seconds) == (2**31 - 1, 0.25)
    assert torch.equal(read.numbers, ballot().numbers.double()) and torch.equal(read.tables, ballot().tables)


@given(st.integers(0, 10**6), st.integers(0, 7))
def test_a_bit_of_a_ballot_that_changes_on_its_way_is_found(place: int, bit: int):
    packed = ballot().pack()
    packed[place % len(packed)] ^= 1 << bit
    with pytest.raises(RunFailed, match="rank 1 said of the step arrived damaged"):
        Vote(3, [PAIR])._read(1, packed)


def test_damaged_gradient_messages_are_found_by_all_and_silent_groups_are_not_asked():
    def table(rank: int, total: int) -> torch.Tensor:
        transit = Transit(2, rank)
        transit.add(0, 1, torch.tensor(total))
        transit.add(1, 0, torch.tensor(5))
        return transit.table(torch.device("cpu"))

    nothing = torch.zeros(PAIR.bytes, dtype=torch.uint8)
    assert PAIR.intact([table(0, 4), nothing, table(1, 4), nothing])
    assert not PAIR.intact([table(0, 4), nothing, table(1, 6), nothing])  # the other end got something else
    assert not PAIR.intact([table(0, 4), nothing, nothing, nothing])  # the other end got nothing


def test_gradients_are_taken_when_they_are_final():
    """From the second step on, in the backward of the last micro-batch; one more than usual is an error."""
    layers = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    taken: list[str] = []
    names = {
        p: (f"{i}.{n}", lambda name, _: taken.append(name))
        for i, m in enumerate(layers)
        for n, p in m.named_parameters()
    }
    watch = GradientWatch(names)

    def backward() -> list[str]:
        taken.clear()
        layers[1](layers[0](torch.ones(2, 3))).sum().backward()
        return list(taken)

    assert [backward(), backward()] == [[], []]
    watch.end_backward()
    assert backward() == [] and sorted(backward()) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert taken[0].startswith("1.")  # the last layer's come first
    with pytest.raises(RuntimeError, match="more gradients than in the step before"):
        backward()
    watch.close()
    assert backward() == []
