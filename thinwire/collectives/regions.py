"""Regions of a vector and their owners: what TopkDSA and Ok-Topk share.

Every region has one owner who adds it up, so all members get the same bits.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from thinwire.codecs.entries import Entries
from thinwire.collectives.groups import Group, world
from thinwire.collectives.messages import BUCKET, Swap, gather, swap, upload
from thinwire.collectives.sums import large_unit, may_overflow
from thinwire.kernels import select

LARGE = 1 << 62  # added to a member's first count: its values are so large that a sum may leave the range
CROWDED = 2.0  # an owner with this many times the average hands entries to others before the all-gather

Picked = tuple[Tensor, Tensor]  # (int64[k] ascending, values[k])


def region_bounds(n: int, size: int) -> list[int]:
    """P + 1 boundaries of equal static regions."""
    return [n * j // size for j in range(size + 1)]


def edges_of(index: Tensor, bounds: list[int]) -> Tensor:
    """int64[P + 1]: where among ascending indices each region begins, and the last one ends."""
    return torch.searchsorted(index, upload(torch.tensor(bounds), index.device))


def cut(picked: Picked, bounds: list[int], edges: list[int]) -> list[Picked]:
    """Entries → per region (indices relative to its start, values). edges: what `edges_of` gives."""
    index, values = picked
    return [(index[a:b] - lo, values[a:b]) for a, b, lo in zip(edges, edges[1:], bounds)]


def join(parts: list[Picked]) -> Picked:
    """Entries of several parts, in their order, as one."""
    return torch.cat([i for i, _ in parts]), torch.cat([v for _, v in parts])


def zeros(n: int, like: Tensor) -> Tensor:
    """float[n] of like's dtype and device; on the CPU from numpy, which asks for huge pages: four times faster."""
    if not n or like.device.type != "cpu":
        return like.new_zeros(n)
    return torch.from_numpy(np.zeros(n * like.element_size(), np.uint8)).view(like.dtype)


def put(n: int, index: Tensor, values: Tensor) -> Tensor:
    """float[n], zero but for these entries."""
    return select.scatter_add(zeros(n, values), index, values)


def split_and_reduce(
    picked: Picked, bounds: list[int], shift: int, code: Entries, group: Group, rotates: bool = True,
    bucketed: bool = True,
) -> tuple[Tensor, int, Picked, float]:  # fmt: skip
    """(the sum over members of the region this member owns, which region that is, this member's entries as sent, the
    unit of both: 1, or on all members a power of two where the sums of anybody's values might leave their range).

    picked: this member's entries. bounds: the regions' P + 1 boundaries; region j belongs to member (j + shift) mod P.
    code: how entries become bytes. rotates, bucketed: False: without that part of steps 2 and 3.

    1. all-gather the P counts of every member; 2. each region's coded entries to its owner, in rotation; 3. the owner
    adds a bucket of messages while the next are in flight, always in the order of the rotation, so that a run repeats
    to the bit.
    """
    size, rank = world(group)
    lengths = [b - a for a, b in pairwise(bounds)]
    mine = (rank - shift) % size
    edges = edges_of(picked[0], bounds)
    announced = edges.diff()
    announced[0] += LARGE * may_overflow(picked[1], size)
    everybody = torch.stack(gather(announced, group))
    # all that is to be known here, for one wait where it is on a card
    *known, large = torch.cat((edges, everybody[:, mine] % LARGE, (everybody[:, :1] >= LARGE).any(0))).tolist()
    column = known[size + 1 :]
    unit = large_unit(size) if large else 1.0
    if large:
        picked = picked[0], picked[1] / unit
    parts = cut(picked, bounds, known[: size + 1])
    counts = [index.numel() for index, _ in parts]
    messages = [code.encode(*part, length) for part, length in zip(parts, lengths)]
    outgoing = [messages[(owner - shift) % size] for owner in range(size)]
    dtype = picked[1].dtype
    region = zeros(lengths[mine], picked[1])
    sizes = [code.nbytes(lengths[mine], c, dtype) for c in column]
    under_way = Swap(outgoing, sizes, group, rotates=rotates, bucket=BUCKET if bucketed else None)
    for sender, wire in under_way.arriving():
        select.scatter_add(region, *code.decode(wire, lengths[mine], column[sender], dtype))
    if code.is_exact:
        return region, mine, picked, unit
    values = torch.cat([code.decode_values(wire, c, dtype) for wire, c in zip(messages, counts)])
    return region, mine, (picked[0], values), unit


def balanced_gather(
    picked: Picked, counts: list[int], shift: int, n: int, code: Entries, group: Group, balances: bool = True
) -> Picked:
    """Every owner's entries to every member, ascending; crowded owners hand over contiguous shares first.

    picked: this member's entries of n values. counts: every member's. shift: region j belongs to member (j + shift) mod
    P. code: how entries become bytes. balances: False: nothing is handed over.
    """
    size, rank = world(group)
    owners = [(region + shift) % size for region in range(size)]
    if balances and max(counts) * size > CROWDED * sum(counts):
        picked, counts = _hand_over(picked, counts, owners, n, replace(code, values="fp32"), group)
    dtype = picked[1].dtype
    message = code.encode(*picked, n)
    arrived = swap([message] * size, [code.nbytes(n, c, dtype) for c in counts], group)
    own = picked if code.is_exact else (picked[0], code.decode_values(message, counts[rank], dtype))
    return join([
        own if owner == rank else code.decode(arrived[owner], n, counts[owner], dtype) for owner in owners
    ])  # fmt: skip


def _hand_over(
    picked: Picked, counts: list[int], owners: list[int], n: int, exact: Entries, group: Group
) -> tuple[Picked, list[int]]:
    """All entries, ascending, re-cut into P shares that differ by at most one; exact values, only what moves."""
    size, rank = world(group)
    index, values = picked
    starts = [0, *accumulate(counts[owner] for owner in owners)]
    shares = [starts[-1] * j // size for j in range(size + 1)]
    place = {owner: region for region, owner in enumerate(owners)}

    def overlap(owner: int, taker: int) -> tuple[int, int]:
        low = max(starts[place[owner]], shares[place[taker]])
        return low, max(low, min(starts[place[owner] + 1], shares[place[taker] + 1]))

    outgoing = []
    for taker in range(size):
        low, high = (edge - starts[place[rank]] for edge in overlap(rank, taker))
        outgoing.append(exact.encode(index[low:high], values[low:high], n))
    taken = [high - low for low, high in (overlap(owner, rank) for owner in range(size))]
    arrived = swap(outgoing, [exact.nbytes(n, c, values.dtype) for c in taken], group)
    parts = [exact.decode(arrived[owner], n, taken[owner], values.dtype) for owner in owners]
    return join(parts), [shares[place[j] + 1] - shares[place[j]] for j in range(size)]
