"""Flows: how a message is cut, what is refused, and that the bits arrive over real flows between ranks."""

from __future__ import annotations

from unittest import mock

import flow_cases
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from rank_cases import Case, Found, name_of, run_cases
from rank_launch import launch, needs_network, passed

from thinwire.collectives.flows import LEAST, Flows, pieces
from thinwire.collectives.groups import ALONE
from thinwire.errors import UsageError
from thinwire.lab import Network


@given(nbytes=st.integers(0, 10 * LEAST), count=st.integers(1, 8))
def test_pieces_are_the_message_in_order(nbytes: int, count: int) -> None:
    x = torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)
    cut = pieces(x, count)
    assert len(cut) <= count and torch.equal(torch.cat([*cut, x[:0]]), x)
    lengths = [len(piece) for piece in cut]
    assert len(cut) <= 1 or min(lengths) >= LEAST
    assert not cut or max(lengths) - min(lengths) <= 1
    assert len(cut) == min(count, max(1, nbytes // LEAST)) * (nbytes > 0)
    assert all(piece.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for piece in cut)


def test_what_is_not_contiguous_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        pieces(torch.zeros(10, dtype=torch.uint8)[::2], 2)


@pytest.mark.parametrize("streams", [0, 65, 1.5, True, "2"])
def test_a_wrong_number_is_one_line(streams: object) -> None:
    with pytest.raises(UsageError, match="allowed is a whole number from 1 to 64"):
        Flows(ALONE, streams)  # type: ignore[arg-type]


def test_alone_there_is_no_flow() -> None:
    assert Flows(ALONE, 4).groups == []


def test_nccl_is_refused_with_its_own_settings() -> None:
    with (
        mock.patch("thinwire.collectives.flows.world", return_value=(2, 0)),
        mock.patch("thinwire.collectives.flows.explicit", return_value=object()),
        mock.patch.object(dist, "get_backend", return_value="nccl"),
    ):
        with pytest.raises(UsageError, match="NCCL_SOCKET_NTHREADS and NCCL_NSOCKS_PERTHREAD") as said:
            Flows(None, 2)
        assert "\n" not in str(said.value)
        Flows(None, 1)  # one flow is what NCCL has anyway


@pytest.fixture(scope="module")
def ranks() -> list[Found]:
    with Network(hosts=3, preload=("torch", "thinwire.collectives.flows", "rank_cases")) as net:
        return launch(net, run_cases, flow_cases.CASES, timeout=60)


@pytest.mark.lab
@needs_network
@pytest.mark.timeout(80)
@pytest.mark.parametrize("case", flow_cases.CASES, ids=name_of)
def test_case(ranks: list[Found], case: Case) -> None:
    passed(ranks, case)
