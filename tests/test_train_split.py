"""Cutting layers into stages: against every possible cut."""

from itertools import combinations, pairwise

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import UsageError
from thinwire.train.config.sections import read_config
from thinwire.train.model.blueprint import plan_model
from thinwire.train.model.split import split_layers
from thinwire.train.tune import layer_times as measure


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


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def by_time(out, **model):
    document = {
        "model": {"hidden": 16, "heads": 2, "layers": 6, **model}, "data": {"seq_len": 8},
        "mesh": {"pp": 2, "split": "time"}, "run": {"out": str(out)},
    }  # fmt: skip
    config = read_config(document)
    return config, plan_model(config.model, 2, 256, 8)


def test_layers_are_cut_by_measured_time(tmp_path, alone, monkeypatch) -> None:
    """By what rank 0 finds, and once there are checkpoints by what it found at the start of the run."""
    config, blueprint = by_time(tmp_path)
    real = measure._measure(config, blueprint)
    assert len(real) == 8 and min(real[1:-1]) > 0 and len(set(real[1:-1])) == 1  # one kind of layer: measured once
    assert [len(run) for run in blueprint.layers] == [3, 3]
    monkeypatch.setattr(measure, "_measure", lambda *_: [0.0, *[1.0] * 6, 2.0])
    said: list[str] = []
    assert [len(run) for run in measure.cut_by_time(config, blueprint, said.append).layers] == [4, 2]
    assert "4+2" in said[0]
    monkeypatch.setattr(measure, "_measure", lambda *_: [2.0, *[1.0] * 6, 0.0])
    assert [len(run) for run in measure.cut_by_time(config, blueprint, said.append).layers] == [2, 4]
    (tmp_path / "checkpoints" / "step-00000003").mkdir(parents=True)
    monkeypatch.setattr(measure, "_measure", lambda *_: pytest.fail("a resumed run was measured again"))
    assert [len(run) for run in measure.cut_by_time(config, blueprint, said.append).layers] == [2, 4]


def test_layers_with_adapters_are_another_kind(tmp_path, monkeypatch) -> None:
    pytest.importorskip("peft")
    config, blueprint = by_time(tmp_path, lora={"from_layer": 3})
    asked: list[tuple[int, range]] = []
    monkeypatch.setattr(measure, "_seconds", lambda c, b, index, layers: asked.append((index, layers)) or len(asked))
    assert measure._measure(config, blueprint) == [5, 1, 1, 1, 2, 3, 3, 1]
    assert asked == [(1, range(1)), (1, range(3, 4)), (1, range(4, 5)), (2, range(5, 6)), (0, range(0))]
    monkeypatch.undo()
    assert len(measure._measure(config, blueprint)) == 8


def test_times_are_given_or_measured(tmp_path) -> None:
    with pytest.raises(UsageError, match="split = 'time': measures"):
        by_time(tmp_path, split_times=[1.0] * 8)
