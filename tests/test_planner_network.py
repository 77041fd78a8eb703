"""Closed forms, exactly (in fractions), and the network of links and sites."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import UsageError
from thinwire.planner import network
from thinwire.planner.hops import choose_hops
from thinwire.planner.network import Cost, LinkSpeed, Network

ranks = st.integers(1, 1024)
sizes = st.integers(1, 10**9).map(Fraction)


@given(sizes, ranks)
def test_dense_ring(n: Fraction, p: int) -> None:
    assert network.dense_ring(n, p) == Cost(2 * n * (p - 1) / p, 2 * (p - 1))


@given(sizes, ranks)
def test_embedding_fused_and_separate(v: Fraction, d: int) -> None:
    assert network.embedding_separate(v, d).nbytes == v * (3 * d - 2) / d
    assert network.embedding_fused(v, d).nbytes == v * (2 * d - 1) / d


def test_fused_embedding_saves_thirty_percent_at_four_and_a_third_in_the_limit() -> None:
    saved = {
        d: 1 - network.embedding_fused(Fraction(1), d).nbytes / network.embedding_separate(Fraction(1), d).nbytes
        for d in (1, 4, 10**6)
    }
    assert saved[1] == 0 and saved[4] == Fraction(3, 10) and abs(saved[10**6] - Fraction(1, 3)) < 1e-6


@given(sizes, st.integers(1, 10).map(lambda e: 2**e))
def test_ok_topk_volumes(k: Fraction, p: int) -> None:
    """In words, an entry being two."""
    assert network.ok_topk_split(k, p, 2).nbytes == 2 * k * (p - 1) / p
    assert network.ok_topk(k, p, 2).nbytes == 6 * k * (p - 1) / p
    assert network.ok_topk(k, p, 2, balanced=True).nbytes == 4 * k * (p - 1) / p
    assert network.ok_topk_worst(k, p, 2).nbytes == 2 * k + 4 * k * (p - 1) / p
    assert network.ok_topk(k, p, 2).messages == 2 * p + 2 * (p.bit_length() - 1)


@given(sizes, st.integers(1, 10).map(lambda e: 2**e))
def test_sparse_baselines(k: Fraction, p: int) -> None:
    n = 100 * k
    assert network.topk_allgather(k, p, 2).nbytes == 2 * k * (p - 1)
    assert network.gtopk(k, p, 2) == Cost(4 * k * (p.bit_length() - 1), 2 * (p.bit_length() - 1))
    assert network.topk_dsa(n, k, p, 2, 1, filled=k).nbytes == 4 * k * (p - 1) / p
    assert network.topk_dsa(n, k, p, 2, 1, filled=n).nbytes == (2 * k + n) * (p - 1) / p
    assert k <= network.union(n, k, p) * (1 + 1e-9) and network.union(n, k, p) <= n


@given(sizes, ranks)
def test_two_hop_low_rank_and_gather(b: Fraction, p: int) -> None:
    assert network.two_hop(b, p).nbytes == 2 * b * (p - 1) / p
    assert network.low_rank(b, 3 * b, p).nbytes == 8 * b * (p - 1) / p
    assert network.gather(b, p) == Cost(b * (p - 1), p - 1)


@pytest.mark.parametrize("p", [2, 4, 8])
def test_hierarchical_sends_a_share_across(p: int) -> None:
    inside, across = network.hierarchical(Fraction(800), p, lambda share: network.dense_ring(4 * share, 2))
    assert inside == network.dense_ring(Fraction(3200), p)
    assert across.nbytes == Fraction(3200, p)


def test_alone_nothing_is_sent() -> None:
    forms = [
        network.dense_ring(8, 1), network.gather(8, 1), network.two_hop(8, 1), network.ok_topk(8, 1, 2),
        network.topk_dsa(8, 1, 1, 2, 1), network.gtopk(8, 1, 2), network.low_rank(8, 8, 1),
    ]  # fmt: skip
    assert all(form == Cost() for form in forms)


def test_seconds() -> None:
    link = LinkSpeed(rate=8e6, latency=0.5)
    assert Cost(1e6, 4).seconds(link) == 1.0 + 2.0
    assert (network.two_hop(1e6, 2) + Cost(0, 3)).seconds(link) == 1.0 + 0.5 + 1.5  # one hop between two
    assert network.two_hop(1e6, 4).latencies == 2 and network.gather(1e6, 8).latencies == 1
    assert LinkSpeed().occupied(1e12) == 0.0


def test_sites_and_ports() -> None:
    slow, fast = LinkSpeed(1e8, 0.01), LinkSpeed(1e10)
    net = Network(slow, fast, site_ranks=2)
    assert net.link(0, 1) is fast and net.link(1, 2) is slow
    assert net.slowest([0, 1]) is fast and net.slowest([0, 2]) is slow
    assert net.port(0, 2) == net.port(0, 1) != net.port(1, 2)
    shared = Network(slow, fast, site_ranks=2, shared_uplink=True)
    assert shared.port(0, 2) == shared.port(1, 3) != shared.port(0, 1)
    half = Network(LinkSpeed(1e8, full_duplex=False))
    assert half.port(0, 1) == half.port(1, 0) != half.port(1, 2)


@pytest.mark.parametrize("rate, latency", [(0.0, 0.0), (-1e6, 0.0), (1e6, -0.1), (float("nan"), 0.0)])
def test_impossible_links(rate: float, latency: float) -> None:
    with pytest.raises(UsageError):
        LinkSpeed(rate, latency)


@given(p=st.integers(2, 64), nbytes=st.floats(1, 1e9), rate=st.floats(1e5, 1e10), latency=st.floats(0, 0.5))
def test_hops_are_those_that_take_less_time(p, nbytes, rate, latency):
    link = LinkSpeed(rate, latency)
    seconds = {1: network.gather(nbytes, p).seconds(link), 2: network.two_hop(nbytes, p).seconds(link)}
    assert seconds[choose_hops(p, nbytes, link)] == min(seconds.values())
    assert choose_hops(2, nbytes, link) == 1


def test_hops_of_four_members():
    """8·b·3·(1 − 2/4)/rate against one latency: at 100 Mb/s and 50 ms up to 417 kB go in one hop."""
    link = LinkSpeed(1e8, 0.05)
    assert [choose_hops(4, nbytes, link) for nbytes in (400e3, 430e3)] == [1, 2]
    assert choose_hops(4, 1e3, LinkSpeed(1e8, 0.0)) == 2
