"""Five trits a byte in Triton: packing gathers five codes, unpacking finds each code's byte and digit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from thinwire.kernels.gpu.launch import TILE, launch
from thinwire.kernels.ternary import trit_bytes


@triton.jit(do_not_specialize=["n"])
def _pack(codes, out, n, TILE: tl.constexpr):
    byte = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.int32)
    for j in tl.static_range(5):
        digit = tl.load(codes + byte * 5 + (4 - j), mask=byte * 5 + (4 - j) < n, other=0).to(tl.int32)
        total = total * 3 + digit
    tl.store(out + byte, total.to(tl.uint8), mask=byte * 5 < n)


@triton.jit
def _digits(wire, local, left, FULL: tl.constexpr):
    """The codes at places `local` of a stream that begins at `wire`."""
    byte = local // 5
    digit = local - byte * 5
    value = (tl.load(wire + byte) if FULL else tl.load(wire + byte, mask=local < left, other=0)).to(tl.int32)
    # ⌊v / 3^d⌋ as a product with ⌈2^16 / 3^d⌉: exact for v < 243
    factor = tl.where(digit == 1, 21846, tl.where(digit == 2, 7282, tl.where(digit == 3, 2428, 810)))
    value = tl.where(digit == 0, value, (value * factor) >> 16)
    return (value - 3 * ((value * 21846) >> 16)).to(tl.uint8)


@triton.jit(do_not_specialize=["n"])
def _unpack(wire, out, n, TILE: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * (5 * TILE)  # a whole number of bytes
    left = tl.minimum(n - start, 5 * TILE).to(tl.int32)
    wire += start // 5
    out += start
    for part in tl.static_range(5):
        local = part * TILE + tl.arange(0, TILE)
        if left == 5 * TILE:
            tl.store(out + local, _digits(wire, local, left, True))
        else:
            tl.store(out + local, _digits(wire, local, left, False), mask=local < left)


def pack_trits(codes):
    """`pack_trits` of kernels/ternary.py, by Triton."""
    out = torch.empty(trit_bytes(codes.numel()), dtype=torch.uint8, device=codes.device)
    launch(_pack, triton.cdiv(out.numel(), TILE), codes, out, codes.numel(), TILE=TILE)
    return out


def unpack_trits(wire, n):
    """`unpack_trits` of kernels/ternary.py, by Triton."""
    out = torch.empty(n, dtype=torch.uint8, device=wire.device)
    launch(_unpack, triton.cdiv(n, 5 * TILE), wire, out, n, TILE=TILE)
    return out
