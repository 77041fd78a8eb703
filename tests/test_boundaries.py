"""Learned boundaries on real processes: every schedule beside straight-line code, replicas, resuming, and mistakes."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import boundary_cases as cases
import pytest
import torch
from pipeline_support import SCHEDULES
from rank_cases import Case, name_of, run_cases
from rank_launch import launch, on_a_network, passed
from torch import nn

import thinwire as tw
from thinwire.boundaries.stiefel import StiefelAdam, orthonormal, polar, retract, tangent
from thinwire.errors import UsageError
from thinwire.lab import Network

PRELOAD = ("warm", "boundary_cases")


def trains(names: Iterable[str]) -> list[Case]:
    return [functools.partial(cases.trains_as_straight_line_code, name) for name in names]


def with_tokens(*runs: tuple[str, tw.parallel.Projected]) -> list[Case]:
    return [functools.partial(cases.tokens_train_as_straight_line_code, name, config) for name, config in runs]


CASES: dict[int, list[Case]] = {
    2: [
        *trains(SCHEDULES), *with_tokens(("1F1B", cases.ANCHORED), ("1F1B", cases.TABLED), ("ZBV", cases.BOTH)),
        cases.resumed_boundaries_have_the_same_bits, cases.skipped_step_moves_nothing,
        cases.damaged_message_is_found, cases.ranks_must_agree,
    ],
    4: [*trains(("1F1B", "ZBV")), functools.partial(cases.replicas_train_as_one, cases.BOTH)],
}  # fmt: skip


@pytest.fixture(scope="module")
def ranks(request):
    with Network(hosts=request.param, preload=PRELOAD) as net:
        return launch(net, run_cases, CASES[request.param], timeout=100)


@pytest.mark.parametrize(
    ("ranks", "case"),
    [pytest.param(size, (size, case), id=f"{size} ranks-{name_of(case)}") for size in CASES for case in CASES[size]],
    indirect=["ranks"],
    scope="module",  # else every test would launch its ranks
)
@pytest.mark.timeout(120)
@on_a_network[0]
@on_a_network[1]
def test_case(ranks, case):
    passed(ranks, case[1])


# --- the manifold


def test_the_polar_factor_is_the_nearest_orthonormal_matrix():
    matrix = torch.randn(24, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    assert torch.allclose(polar(matrix), left @ right, atol=1e-10)


def test_a_tangent_keeps_the_basis_orthonormal_to_first_order():
    basis, gradient = orthonormal(24, 5, 0).double(), torch.randn(24, 5, dtype=torch.float64)
    step = tangent(polar(basis), gradient)
    assert torch.allclose(polar(basis).T @ step + step.T @ polar(basis), torch.zeros(5, 5).double(), atol=1e-10)
    assert (step * gradient).sum() >= 0  # it descends


@pytest.mark.parametrize("size", [1e-3, 0.3, 5.0])
def test_products_alone_retract_to_the_polar_factor(size):
    """Along a tangent, also a long one whose singular values have to be scaled down."""
    basis = polar(orthonormal(24, 5, 0).double())
    slope = tangent(basis, torch.randn(24, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2)))
    moved = basis - size * slope / slope.norm()
    assert torch.allclose(retract(moved), polar(moved), atol=1e-10)


def test_a_boundary_opens_from_what_was_learnt_to_a_plain_stage():
    torch.manual_seed(0)
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    stages = [tw.parallel.Projected(2).around(module, index, 2, 6) for index, module in enumerate((first, second))]
    x = torch.randn(3, 6)
    learnt = stages[1](stages[0](x))
    found = []
    for share in (0.0, 0.5, 1.0):
        for stage in stages:
            stage.opening = share
        found.append(stages[1](stages[0](x)))
    assert torch.allclose(found[0], learnt, atol=1e-6) and torch.allclose(found[2], second(first(x)), atol=1e-6)
    assert torch.allclose(found[1], (found[0] + found[2]) / 2, atol=1e-6)
    assert not torch.allclose(found[0], found[2], atol=1e-3)


def test_a_filled_table_gives_back_what_of_the_embedding_does_not_cross():
    """Blocks that are nothing: three stages compute the embedding, whose values outside the basis were lost before."""
    torch.manual_seed(0)
    embedding, tokens = nn.Embedding(7, 6), torch.randint(7, (2, 5))
    config = tw.parallel.Projected(2, vocabulary=7, rate=0, tables=True)
    blocks = [embedding, nn.Identity(), nn.Identity()]
    stages = [config.around(block, index, 3, 6) for index, block in enumerate(blocks)]
    assert [len(stage.trained()) for stage in stages] == [1, 1, 1]

    def passed_on() -> torch.Tensor:
        x = tokens
        for stage in stages:
            x = stage(x, tokens=tokens)
        return x

    assert not torch.allclose(passed_on(), embedding(tokens), atol=0.1)
    for stage in stages:
        stage.fill_table(embedding.weight)
    assert torch.allclose(passed_on(), embedding(tokens), atol=1e-6)
    with pytest.raises(UsageError, match=r"fill_table: .*\(6, 7\).*\(7, 6\)"):
        stages[1].fill_table(embedding.weight.T)


@pytest.mark.slow
def test_the_basis_finds_the_space_of_the_data():
    """Reconstruction loss of data in a subspace of the rank: its optimum is that subspace."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(64, 3, generator=generator) @ torch.randn(3, 16, generator=generator)
    basis = orthonormal(16, 3, 1)
    rule = StiefelAdam(basis)
    for _ in range(300):
        moving = basis.clone().requires_grad_()
        (data - data @ moving @ moving.T).square().mean().backward()
        basis = rule.step(basis, moving.grad, 0.02)
    assert (data - data @ basis @ basis.T).norm() < 0.05 * data.norm()


# --- mistakes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"rank": 0}, "rank = 0: must be an integer, 1 or more"),
        ({"rank": 4, "every": True}, "every = True"),
        ({"rank": 4, "rate": -1}, "rate = -1: must be a number, 0 or more"),
        ({"rank": 4, "anchors": 2}, "anchors = 2: needs vocabulary"),
        ({"rank": 4, "tables": True}, "tables = True: needs vocabulary"),
        ({"rank": 4, "tables": 1, "vocabulary": 5}, "tables = 1: must be true or false"),
    ],
)
def test_mistakes_are_named(arguments, words):
    with pytest.raises(UsageError, match=words):
        tw.parallel.Projected(**arguments)


def test_a_boundary_says_what_it_cannot_take():
    with pytest.raises(UsageError, match="hidden states have 8 values"):
        tw.parallel.Projected(9).around(nn.Identity(), 0, 2, 8)
    with pytest.raises(UsageError, match="CompressedStages"):
        tw.parallel.Boundaries([])
    anchored = tw.parallel.Projected(2, anchors=1, vocabulary=5).around(nn.Identity(), 0, 2, 8)
    with pytest.raises(UsageError, match="tokens=ids"):
        anchored(torch.zeros(1, 8))
    tabled = tw.parallel.Projected(2, vocabulary=5, tables=True).around(nn.Identity(), 1, 2, 8)
    with pytest.raises(UsageError, match=r"^a boundary with tables needs .*tokens=ids.* on every rank$"):
        tabled(torch.zeros(1, 2))
    pair = tw.parallel.Projected(2).around(nn.Identity(), 0, 2, 8)
    pair.module = nn.RNN(8, 8)
    with pytest.raises(UsageError, match="one tensor, not tuple"):
        pair(torch.zeros(1, 8))
