"""What communication costs: links, sites, and the closed form of every collective.

A message of b bytes on a link takes 8b/rate seconds of the sender's port and arrives `latency` later.
A collective is counted by the bytes one rank sends and the messages it sends one after another; its time is
8·bytes/rate + messages·latency. P ranks; n values, k of them picked; an entry is an (index, value) pair.
Sources: ring all-reduce (Patarasuk and Yuan 2009), Ok-Topk (arXiv 2201.07598) and its baselines TopkA,
TopkDSA and gTopk, PowerSGD (1905.13727), Optimus-CC (2301.09830) for the tied embedding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from thinwire.errors import UsageError


@dataclass(frozen=True)
class LinkSpeed:
    """`rate` in bits per second (None: unlimited), `latency` in seconds one way."""

    rate: float | None = None
    latency: float = 0.0
    full_duplex: bool = True

    def __post_init__(self) -> None:
        if self.rate is not None and not self.rate > 0:
            raise UsageError(f"rate {self.rate}: must be more than 0 bit/s")
        if not self.latency >= 0:
            raise UsageError(f"latency {self.latency}: must be 0 s or more")

    def occupied(self, nbytes: float) -> float:
        """Seconds of port time."""
        return 0.0 if self.rate is None else 8 * nbytes / self.rate


@dataclass(frozen=True)
class Network:
    """Sites of `site_ranks` consecutive ranks (0: every rank is its own site), and the links inside and across them."""

    across: LinkSpeed
    inside: LinkSpeed = LinkSpeed()
    site_ranks: int = 0
    shared_uplink: bool = False  # one port for all that leaves a site, instead of one per rank

    def site(self, rank: int) -> int:
        return rank // self.site_ranks if self.site_ranks else rank

    def link(self, a: int, b: int) -> LinkSpeed:
        return self.inside if self.site(a) == self.site(b) else self.across

    def slowest(self, ranks: list[int]) -> LinkSpeed:
        """The link that a ring over these ranks waits for."""
        return self.inside if len({self.site(r) for r in ranks}) == 1 else self.across

    def port(self, a: int, b: int) -> Hashable:
        """What a message from a to b holds: the sender's port, its site's uplink, or a half-duplex pair."""
        link, apart = self.link(a, b), self.site(a) != self.site(b)
        ends = (self.site(a), self.site(b)) if self.shared_uplink and apart else (a, b)
        if not link.full_duplex:
            return (apart, frozenset(ends))
        return (apart and self.shared_uplink, ends[0])


@dataclass(frozen=True)
class Cost:
    """Per rank: bytes sent, messages sent, and latencies that pass one after another, as many as messages where it is
    not said: messages to several ranks at once share one."""

    nbytes: float = 0.0
    messages: float = 0.0
    rounds: float | None = field(default=None, compare=False)

    @property
    def latencies(self) -> float:
        return self.messages if self.rounds is None else self.rounds

    def __add__(self, other: Cost) -> Cost:
        rounds = self.latencies + other.latencies
        return Cost(self.nbytes + other.nbytes, self.messages + other.messages, rounds)

    def seconds(self, link: LinkSpeed) -> float:
        return link.occupied(self.nbytes) + self.latencies * link.latency


def dense_ring(nbytes: float, p: int) -> Cost:
    """Reduce-scatter and all-gather around a ring: 2n(P−1)/P in 2(P−1) messages. Two ranks swap what they have."""
    return Cost(2 * nbytes * (p - 1) / p, 2 * (p - 1), 1 if p == 2 else None)


def gather(nbytes: float, p: int) -> Cost:
    """Every rank's own message to every other at once: b(P−1) in P−1 messages and one latency."""
    return Cost(nbytes * (p - 1), p - 1, min(p - 1, 1))


def topk_allgather(k: float, p: int, entry: float) -> Cost:
    """TopkA: 2k(P−1) words."""
    return gather(k * entry, p)


def two_hop(nbytes: float, p: int) -> Cost:
    """Quantised: pieces to their owners, summed, coded again, gathered: 2b(P−1)/P, b the coded tensor. Each hop goes
    to all at once; two ranks send each other everything, in one."""
    return Cost(2 * nbytes * (p - 1) / p, 2 * (p - 1), min(p - 1, 2))


def ok_topk_split(k: float, p: int, entry: float) -> Cost:
    """Split and reduce: each region's picked entries to its owner, 2k(P−1)/P words in P−1 messages."""
    return Cost(k * entry * (p - 1) / p, p - 1)


def ok_topk(k: float, p: int, entry: float, balanced: bool = False) -> Cost:
    """Ok-Topk: split and reduce, then all-gather of the global top k.

    The paper's bound: 2k(P−1)/P + 4k(P−1)/P = 6k(P−1)/P words in 2P + 2 log₂P messages, the second term
    for k entries that all had to be moved once to balance the owners. `balanced`: the owners hold equal
    shares already, so the all-gather is 2k(P−1)/P and the total 4k(P−1)/P.
    """
    if p == 1:
        return Cost()
    gathered = k * entry * (p - 1) / p * (1 if balanced else 2)
    return Cost(ok_topk_split(k, p, entry).nbytes + gathered, 2 * p + 2 * math.log2(p))


def ok_topk_worst(k: float, p: int, entry: float) -> Cost:
    """Under adversarial skew a rank has nothing in its own region and sends all: 2k + 4k(P−1)/P words."""
    return Cost(k * entry + 2 * k * entry * (p - 1) / p, 2 * p + 2 * math.log2(p))


def union(n: float, k: float, p: int) -> float:
    """Expected distinct indices when P ranks pick k of n independently: n(1 − (1 − k/n)^P)."""
    return n * (1 - (1 - k / n) ** p) if n else 0.0


def topk_dsa(n: float, k: float, p: int, entry: float, word: float, filled: float | None = None) -> Cost:
    """SparCML: static regions, split and reduce, then all-gather of `filled` sums (default: expected union).

    From 4k(P−1)/P words, same support everywhere, to (2k+n)(P−1)/P, once sparse is larger than dense.
    """
    sums = union(n, k, p) if filled is None else filled
    gathered = min(sums * entry, n * word)
    return Cost((k * entry + gathered) * (p - 1) / p, 0 if p == 1 else p + 2 * math.log2(p))


def gtopk(k: float, p: int, entry: float) -> Cost:
    """Merge up a binary tree, re-picking k at each node, broadcast: 4k log₂P words in 2 log₂P messages."""
    depth = math.ceil(math.log2(p))
    return Cost(2 * k * entry * depth, 2 * depth)


def low_rank(left: float, right: float, p: int) -> Cost:
    """PowerSGD: ring all-reduce of the left factors, then of the right ones (bytes of r·rows, r·columns)."""
    return dense_ring(left, p) + dense_ring(right, p)


def hierarchical(n: float, inside: int, across: Callable[[float], Cost], word: float = 4) -> tuple[Cost, Cost]:
    """(inside, across): dense ring inside a site, around which each rank takes n/inside values across."""
    return dense_ring(word * n, inside), across(n / inside)


def embedding_separate(nbytes: float, d: int) -> Cost:
    """Tied embedding on first and last stage: all-reduce over D on each, then over the two: V(3D−2)/D."""
    return dense_ring(nbytes, d) + dense_ring(nbytes, 2)


def embedding_fused(nbytes: float, d: int) -> Cost:
    """One all-reduce over the 2D ranks instead: V(2D−1)/D. Exact; divide by D."""
    return dense_ring(nbytes, 2 * d)
