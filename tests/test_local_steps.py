"""LocalSteps on real processes, and its schedule: what is sent, when, and what becomes of it."""

from __future__ import annotations

from itertools import pairwise

import local_cases
import local_keep_cases
import local_own_cases
import local_paper_cases
import local_site_cases
import local_stacked_cases
import pytest
import torch
from rank_cases import name_of, run_cases
from rank_launch import launch, needs_network, passed

from thinwire.errors import UsageError
from thinwire.lab import Network
from thinwire.local_steps.pace import Pace
from thinwire.local_steps.schedule import Schedule, split_fragments
from thinwire.local_steps.trainers import _HuggingFace

PRELOAD = (
    "warm",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "local_cases",
    "local_keep_cases",
    "local_own_cases",
    "local_paper_cases",
    "local_site_cases",
    "local_stacked_cases",
)
STRAIGHT = [*local_paper_cases.CASES, *local_own_cases.CASES, *local_site_cases.CASES, *local_stacked_cases.CASES]


def _cases(folder):
    return [*STRAIGHT, *local_cases.cases(folder), *local_keep_cases.cases(folder)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    cases = _cases(str(tmp_path_factory.mktemp("local")))
    with Network(hosts=4, preload=PRELOAD) as net:
        found = launch(net, run_cases, cases, timeout=240)
    return {name_of(case).partition("(")[0]: (found, case) for case in cases}


NAMES = [name_of(case).partition("(")[0] for case in _cases("")]


@pytest.mark.lab
@needs_network
@pytest.mark.timeout(280)
@pytest.mark.parametrize("name", NAMES)
def test_case(ranks, name):
    passed(*ranks[name])


def test_every_fragment_is_sent_once_per_interval():
    schedule = Schedule(every=10, fragments=3, delay=4, warmup=5)
    sent = {step: schedule.sent(step) for step in range(1, 36) if schedule.sent(step)}
    assert sent == {8: [1], 11: [2], 15: [0], 18: [1], 21: [2], 25: [0], 28: [1], 31: [2], 35: [0]}
    assert [step for step in range(1, 36) if schedule.applied(step)] == [12, 15, 19, 22, 25, 29, 32, 35]


@pytest.mark.parametrize(("grow", "every", "delay"), [(8, 20, 0), (33, 20, 1), (5, 7, 3), (1, 1, 0)])
def test_rounds_become_rarer(grow, every, delay):
    schedule = Schedule(every=every, fragments=1, delay=delay, warmup=3, grow=grow)
    rounds = [1]
    while rounds[-1] < 500:
        rounds.append(rounds[-1] + min(every, max(1, rounds[-1] // grow)))
    applied = [a + min(delay, b - a - 1) for a, b in pairwise(rounds)]
    steps = range(1, 400)
    assert [step for step in steps if schedule.sent(step)] == [3 + r for r in rounds if 3 + r < 400]
    assert [step for step in steps if schedule.applied(step)] == [3 + r for r in applied if 3 + r < 400]


def test_fragments_are_strided_and_even():
    shapes = {"embed": (64, 4), **{f"layers.{i}.w": (8, 4) for i in range(5)}, "norm": (4,), "head": (64, 4)}
    parts = split_fragments(shapes, 2)
    assert parts[0] == ["layers.0.w", "layers.2.w", "layers.4.w", "head"]
    assert parts[1] == ["embed", "layers.1.w", "layers.3.w", "norm"]
    with pytest.raises(UsageError, match="fragments = 9"):
        split_fragments(shapes, 9)


def test_a_slow_site_makes_fewer_inner_steps_and_never_passes_over_a_round():
    pace = Pace(slow=2.0, schedule=Schedule(every=5, fragments=1, delay=0, warmup=0))
    pace.compare(0, [3.5, 1.0, 1.0, 0.0])
    assert pace.stride == 3, "a newcomer, with no inner step yet, is not compared with"
    steps = [0]
    while steps[-1] < 10:
        steps.append(pace.advance(steps[-1]))
    assert steps == [0, 3, 5, 8, 10] and pace.made == 4
    pace.compare(0, [1.9, 1.0])
    assert pace.stride == 1 and pace.advance(10) == 11
    pace.compare(1, [1.0, 0.0])
    never = Pace(None, pace.schedule)
    never.compare(0, [9.0, 1.0])
    assert never.stride == 1


def test_all_files_of_hugging_faces_checkpoint_are_read_where_sites_are_others(tmp_path):
    callback = _HuggingFace("sparseloco", {})
    with pytest.raises(UsageError, match="is missing"):
        callback._saved(tmp_path / "thinwire-local-0of2.pt")
    for rank in range(3):
        torch.save({f"rank{rank}of3/step": torch.tensor(7)}, tmp_path / f"thinwire-local-{rank}of3.pt")
    assert set(callback._saved(tmp_path / "thinwire-local-0of2.pt")) == {f"rank{rank}of3/step" for rank in range(3)}
    assert set(callback._saved(tmp_path / "thinwire-local-1of3.pt")) == {"rank1of3/step"}
