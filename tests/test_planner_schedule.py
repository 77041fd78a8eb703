"""Generated action lists: equal to torch's own, complete, and free of deadlock."""

from __future__ import annotations

import csv
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from thinwire.errors import UsageError
from thinwire.planner.actions import Kind, Schedule, from_lists, parse_action, read_csv, write_csv
from thinwire.planner.schedule import SCHEDULES, generate, generate_ahead
from thinwire.planner.simulate import simulate
from thinwire.planner.step import Hop, Step, Work

TORCH = {
    "Interleaved1F1B": torch_schedules.ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": torch_schedules.ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": torch_schedules.ScheduleZBVZeroBubble,
    "DualPipeV": torch_schedules.ScheduleDualPipeV,
}


def torch_list(name: str, ranks: int, microbatches: int, virtual: int, rank: int) -> list:
    """torch's compute-only list of one rank, without a process group."""
    schedule = object.__new__(TORCH[name])
    rounds = max(1, microbatches // ranks)
    vars(schedule).update(
        pp_group_size=ranks, _n_microbatches=microbatches, n_local_stages=virtual, number_of_rounds=rounds,
        microbatches_per_round=microbatches // rounds, num_stages=ranks * virtual,
        _num_stages=ranks * virtual,
    )  # fmt: skip
    return [a for a in schedule._calculate_single_rank_operations(rank) if a is not None]


def allowed(name: str, ranks: int, microbatches: int, virtual: int) -> bool:
    recipe = SCHEDULES[name]
    return (
        recipe.virtual in (None, virtual)
        and not (recipe.even_rounds and microbatches % max(1, microbatches // ranks))
        and not (recipe.full and microbatches < ranks * virtual)
    )


@pytest.mark.parametrize("name", TORCH)
def test_lists_equal_torchs(name: str) -> None:
    compared = 0
    for ranks in (1, 2, 3, 4, 5, 8):
        for microbatches in (1, 2, 3, 4, 6, 8, 10, 12, 16, 17):
            for virtual in (1, 2, 3):
                if not allowed(name, ranks, microbatches, virtual):
                    continue
                ours = generate(name, ranks, microbatches, virtual)
                for rank in range(ranks):
                    theirs = torch_list(name, ranks, microbatches, virtual, rank)
                    assert list(map(str, ours.ranks[rank])) == list(map(str, theirs))
                compared += 1
    assert compared >= 13


@pytest.mark.parametrize("name, cls", [("GPipe", "ScheduleGPipe"), ("1F1B", "Schedule1F1B")])
@pytest.mark.parametrize("ranks, microbatches", [(1, 3), (2, 2), (4, 4), (4, 16), (3, 7)])
def test_single_stage_lists_equal_what_torch_performs(name: str, cls: str, ranks: int, microbatches: int) -> None:
    """torch's loop is run on a stage that only writes down its calls (its printed 1F1B list is wrong)."""
    ours = generate(name, ranks, microbatches)
    for rank in range(ranks):
        calls: list[str] = []
        stage = SimpleNamespace(
            stage_index=rank, is_last=False, has_backward=True, is_first=rank == 0,
            forward_one_chunk=lambda m, *a, at=rank, c=calls, **k: c.append(f"{at}F{m}"),
            backward_one_chunk=lambda m, *a, at=rank, c=calls, **k: c.append(f"{at}B{m}"),
            get_fwd_recv_ops=lambda m: [], get_fwd_send_ops=lambda m: [], get_bwd_recv_ops=lambda m: [],
            get_bwd_send_ops=lambda m: [], perform_reduce_grad=lambda n: None,
            release_fwd_send_outputs=lambda m: None,  # since torch 2.15
        )  # fmt: skip
        loop = object.__new__(getattr(torch_schedules, cls))
        vars(loop).update(
            _stage=stage, _num_stages=ranks, _n_microbatches=microbatches, _has_backward=True, _loss_fn=None,
            _internal_losses=[], scale_grads=True, _initialize_stage=lambda *a: None,
            _check_inputs=lambda *a: ([()] * microbatches, [{}] * microbatches),
            _maybe_compute_loss=lambda *a: None, _maybe_get_loss=lambda *a: None,
            _update_losses=lambda *a: None, _finalize_gradients=True,  # the last since torch 2.15
        )  # fmt: skip
        loop._step_microbatches()
        assert list(map(str, ours.ranks[rank])) == calls


@pytest.mark.parametrize("name", TORCH)
def test_messages_equal_torchs(name: str) -> None:
    ranks, microbatches, virtual = 4, 8, 2
    ours = generate(name, ranks, microbatches, virtual)
    lists = {r: torch_list(name, ranks, microbatches, virtual, r) for r in range(ranks)}
    lowered = torch_schedules._add_send_recv(lists, ours.rank_of.__getitem__, ours.stages)
    for rank, actions in enumerate(ours.lowered()):
        sends = [[str(a) for a in some if "SEND" in str(a)] for some in (actions, lowered[rank])]
        receives = [{str(a) for a in some if "RECV" in str(a)} for some in (actions, lowered[rank])]
        assert sends[0] == sends[1] and receives[0] == receives[1]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    recipe = SCHEDULES[name]
    ranks, virtual = draw(st.integers(1, 6)), recipe.virtual or draw(st.integers(1, 3))
    microbatches = draw(st.integers(ranks * virtual if recipe.full else 1, 20))
    if recipe.even_rounds:
        microbatches -= microbatches % max(1, microbatches // ranks)
    return generate(name, ranks, microbatches, virtual)


@settings(deadline=None, max_examples=60)
@given(schedules())
def test_every_computation_once_and_no_deadlock(schedule: Schedule) -> None:
    checked = from_lists(schedule.name, schedule.ranks)  # raises on anything missing, repeated or out of order
    assert checked.rank_of == schedule.rank_of and checked.microbatches == schedule.microbatches
    result = simulate(Step(schedule, Work.even(schedule.stages, 1.0, 2.0), lambda send: Hop(0, 0.25)))
    assert result.makespan >= 3.0 * schedule.microbatches * schedule.stages / len(schedule.ranks)


def test_csv_round_trip_and_torch_reads_it(tmp_path) -> None:
    for name in SCHEDULES:
        schedule = generate(name, 4, 8)
        for messages in (False, True):
            path = tmp_path / "list.csv"
            write_csv(schedule, path, messages)
            assert read_csv(path).ranks == schedule.ranks
            with open(path, newline="") as file:
                for row in csv.reader(file):
                    assert [str(torch_schedules._Action.from_str(cell)) for cell in row] == row


def test_reads_torchs_idle_slots(tmp_path) -> None:
    path = tmp_path / "idle.csv"
    path.write_text("0F0,,0B0\n,1F0,1B0\n")
    assert [list(map(str, row)) for row in read_csv(path).ranks] == [["0F0", "0B0"], ["1F0", "1B0"]]


@pytest.mark.parametrize(
    "rows, words",
    [
        (["0F0,0X0"], "0X0"),
        (["0F0"], "micro-batch 0"),
        (["0F0,0B0,0B0"], "0B0"),
        (["0B0,0F0"], "before its F"),
        (["0F0,0B0", "0F1,0B1"], "two ranks"),
        (["1F0,1B0"], "stages [1]"),
        ([""], "stages []"),
    ],
)
def test_bad_csv_names_the_trouble(tmp_path, rows: list[str], words: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("\n".join(rows) + "\n")
    with pytest.raises(UsageError, match=words.replace("[", r"\[").replace("]", r"\]")):
        read_csv(path)


def test_a_schedule_that_waits_for_itself_is_refused() -> None:
    lists = [
        ["0F0", "0B0", "0F1", "0B1"],
        ["1F1", "1B1", "1F0", "1B0"],
    ]  # stage 1 wants 1 first, stage 0 waits for 0
    schedule = from_lists("crossed", [[parse_action(word) for word in row] for row in lists])
    with pytest.raises(UsageError, match="never finishes"):
        simulate(Step(schedule, Work.even(2, 1.0, 2.0), lambda send: Hop()))


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("2F2B", 4, 8), "2F2B.*GPipe, 1F1B"),
        (("1F1B", 0, 8), "0 ranks"),
        (("1F1B", 4, 8, 2), "virtual = 2"),
        (("Interleaved1F1B", 4, 9), "microbatches = 9.*multiple of 2"),
        (("Interleaved1F1B", 4, 8, 0), "virtual = 0"),
        (("DualPipeV", 4, 7), "microbatches = 7.*8"),
    ],
)
def test_bad_schedules_name_the_value_and_what_is_allowed(arguments: tuple, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        generate(*arguments)


def test_printed_form() -> None:
    text = generate("1F1B", 2, 2).text().splitlines()
    assert text[0] == "rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD"
    assert text[1] == "rank 1: 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE_GRAD"
    assert parse_action("(3F5;4B1)OVERLAP_F_B").flat()[1].kind is Kind.B


@given(st.integers(1, 6), st.integers(1, 12), st.integers(1, 4))
def test_ahead_begins_more_and_does_the_same_work(ranks, microbatches, ahead):
    """As run_ahead makes torch's 1F1B do it: ahead · (P − 1 − r) + 1 forwards before a rank's first backward."""
    found, plain = generate_ahead(ranks, microbatches, ahead), generate("1F1B", ranks, microbatches)
    for rank, actions in enumerate(found.ranks):
        kinds = [action.kind for action in actions]
        assert kinds.index(Kind.B) == min(microbatches, ahead * (ranks - 1 - rank) + 1)
        assert set(actions) == set(plain.ranks[rank]) and len(actions) == 2 * microbatches
        assert [a for a in actions if a.kind is Kind.B] == [a for a in plain.ranks[rank] if a.kind is Kind.B]
    assert generate_ahead(ranks, microbatches, 1) == plain
