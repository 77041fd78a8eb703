"""In how many hops coded values are averaged: one rule, from members, bytes, rate and latency.

One hop: every member's b coded bytes to every other, b(P − 1) bytes and one latency. Two: chunks to their owners, means
back, 2b(P − 1)/P bytes and two latencies. Between two members both send as many bytes.
"""

from __future__ import annotations

from thinwire.planner.network import LinkSpeed, gather, two_hop


def choose_hops(members: int, nbytes: float, link: LinkSpeed) -> int:
    """1 or 2, whichever takes fewer seconds; 1 where they are equal, since it codes once only.

    members: that average. nbytes: of one member's values, coded, all that are exchanged together. link: between them.
    """
    whole = gather(nbytes, members).seconds(link)
    return 1 if whole <= two_hop(nbytes, members).seconds(link) else 2
