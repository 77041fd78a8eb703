"""Cutting layers into stages: against every possible cut."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import UsageError
from thinwire.train.split import split_layers


def worst(costs: list[float], cuts: list[int]) -> tuple[float, float]:
    stages = [sum(costs[1 + a : 1 + b]) for a, b in pairwise(cuts)]
    stages[0] += costs[0]
    stages[-1] += costs[-1]
    return max(stages), sum(s * s for s in stages)


@given(st.lists(st.integers(0, 9), min_size=3, max_size=9), st.data())
def test_no_cut_is_better(costs: list[int], data) -> None:
    layers = len(costs) - 2
    stages = data.draw(st.integers(1, layers))
    found = split_layers(costs, stages)
    assert [i for run in found for i in run] == list(range(layers))
    assert len(found) == stages and all(len(run) for run in found)
    every = ([0, *inner, layers] for inner in combinations(range(1, layers), stages - 1))
    assert worst(costs, [0, *(run.stop for run in found)]) == min(worst(costs, cuts) for cuts in every)


def test_a_heavy_embedding_leaves_its_stage_fewer_layers() -> None:
    assert [len(run) for run in split_layers([4, *[1] * 10, 4], 3)] == [2, 6, 2]
    assert [len(run) for run in split_layers([0, *[1] * 8, 0], 4)] == [2, 2, 2, 2]


@pytest.mark.parametrize("stages", [0, 4])
def test_too_few_layers(stages: int) -> None:
    with pytest.raises(UsageError, match=f"3 layers cannot be split into {stages} stages: each needs at least one"):
        split_layers([1, 1, 1, 1, 1], stages)


def test_many_layers_are_quick() -> None:
    assert len(split_layers([5.0, *[1.0] * 200, 5.0], 64)) == 64
