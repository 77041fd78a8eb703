"""The largest of every row in Triton: a program per row, which holds it in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from thinwire.kernels.gpu.launch import launch
from thinwire.kernels.gpu.scalar import MAGNITUDE, bits_of, widen

PER_WARP = 512  # values


@triton.jit(do_not_specialize=["length", "k"])
def _top(x, index, length, k, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, SIZE)
    inside = place < length
    bits = bits_of(widen(tl.load(x + row * length + place, mask=inside, other=0.0))) & MAGNITUDE
    bits = tl.where(inside, bits, -1)
    edge = 0
    for step in range(31):
        trial = edge | (1 << (30 - step))
        enough = tl.sum((bits >= trial).to(tl.int32)) >= k
        edge = tl.where(enough, trial, edge)
    above = (bits > edge).to(tl.int32)
    ties = (bits == edge).to(tl.int32)
    room = k - tl.sum(above)
    keep = above + ties * (tl.cumsum(ties) <= room).to(tl.int32)
    tl.store(index + row * k + tl.cumsum(keep) - 1, place.to(tl.int64), mask=keep > 0)


def top_rows(x, k):
    """`top_rows` of kernels/tiles.py, by Triton."""
    rows, length = x.shape
    index = torch.empty(rows, k, dtype=torch.int64, device=x.device)
    size = triton.next_power_of_2(length)
    launch(_top, rows, x, index, length, k, SIZE=size, warps=max(1, min(16, size // PER_WARP)))
    return index
