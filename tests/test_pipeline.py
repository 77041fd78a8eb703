"""Compressed pipeline stages on real processes: bitwise neutral with Identity, mirrored, healed, resumable.

Each world size is launched once (the fixture) and runs all its cases; a test looks at what one case found.
"""

from __future__ import annotations

import functools

import pipeline_bits_cases as bits
import pipeline_fault_cases as fault
import pipeline_lazy_cases as lazy
import pipeline_memory_cases as memory
import pipeline_refusal_cases as refusal
import pytest
from pipeline_support import SCHEDULES
from rank_cases import Case, name_of, run_cases
from rank_launch import launch, on_a_network, passed

from thinwire.codecs import LowRank, Quantize
from thinwire.lab import Network

pytestmark = [*on_a_network, pytest.mark.timeout(280)]
PRELOAD = (
    "warm", "torch.utils.checkpoint", "pipeline_bits_cases", "pipeline_fault_cases", "pipeline_lazy_cases",
    "pipeline_memory_cases", "pipeline_refusal_cases",
)  # fmt: skip


def each(case, values, *more) -> list[Case]:
    """The case for each of its first argument's values."""
    return [functools.partial(case, value, *more) for value in values]


LAZY_ERROR = [
    functools.partial(lazy.arrivals_and_residual_sum_to_what_was_computed, codec, when)
    for codec in (Quantize(3, block=16), LowRank(2))
    for when in ("always", "epilogue", "critical", lazy.every_second)
]
CASES = {
    1: [bits.one_rank_has_no_wire],
    2: [
        *each(bits.identity_gives_the_bits_of_the_plain_stage, SCHEDULES),
        *each(memory.mirrors_stay_equal_over_shuffled_epochs, SCHEDULES, 60),
        memory.batches_of_other_shapes, *fault.FAULTS, *LAZY_ERROR, lazy.auto_keeps_lazy_error_only_where_it_helps,
        *each(memory.resumed_run, (True, False)), *each(bits.evaluation_leaves_memory_alone, ("exact", "same")),
        *refusal.CASES, memory.dropout_before_a_boundary, memory.mirrors_in_files_or_of_half_the_ids,
        bits.recomputed_and_retried_steps_change_no_bit, bits.accumulated_step_adds_to_the_gradients,
        bits.bf16_trains_to_the_loss_of_the_plain_stage, bits.changing_loss_scale_changes_no_bit,
        memory.size_of_the_stores_is_said_once, memory.store_changed_by_somebody_else_is_healed,
        *each(bits.early_receives_change_no_bit, SCHEDULES), bits.steps_announced_ahead_change_no_bit,
        *each(bits.streams_change_no_bit, (False, True)),
    ],
    4: [
        *each(bits.identity_gives_the_bits_of_the_plain_stage, SCHEDULES),
        *each(memory.mirrors_stay_equal_over_shuffled_epochs, SCHEDULES, 16),
        memory.batches_of_other_shapes, *LAZY_ERROR, *fault.FAULTS, memory.replicas_remember_their_own_samples,
        memory.replicas_and_runs_share_a_folder,
        fault.faults_are_found_at_the_end_of_a_step,
        *each(fault.overlapped_frames_change_no_bit, ("GPipe", "1F1B")),
        *each(fault.overlapped_frames_are_mirrored_and_healed, ("GPipe", "1F1B")), *refusal.CASES,
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def ranks(request):
    with Network(hosts=request.param, preload=PRELOAD) as net:
        return launch(net, run_cases, CASES[request.param], timeout=240)


@pytest.mark.parametrize(
    ("ranks", "case"),
    # pytest runs tests with equal parameters one after another: a case of two sizes must not be equal, or every one of
    # its tests would launch its ranks anew
    [pytest.param(size, (size, case), id=f"{size} ranks-{name_of(case)}") for size in CASES for case in CASES[size]],
    indirect=["ranks"],
    scope="module",  # else every test would launch its ranks
)
def test_case(ranks, case):
    passed(ranks, case[1])
