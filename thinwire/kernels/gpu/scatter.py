"""Scatter-add in Triton, by additions in the L2 cache, which nothing waits for. Indices differ from each other."""

from __future__ import annotations

import triton
import triton.language as tl

from thinwire.kernels.gpu.launch import launch
from thinwire.kernels.gpu.scalar import INTERPRETED, narrow, widen

ADD, ADD_WARPS = 256, 4  # entries a program adds
TINY = tl.constexpr(2.0**-100)  # no denormal is as large as this one's last bit, nor the difference of it and another


@triton.jit(do_not_specialize=["n", "k"])
def _scatter_add(out, index, values, n, k, SIZE: tl.constexpr):
    """out[index] += values; an index outside is left out."""
    i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    place = tl.load(index + i, mask=i < k, other=-1)
    value = tl.load(values + i, mask=i < k, other=0)  # beside the index, not after it
    inside = (place >= 0) & (place < n)
    value = narrow(widen(value), out.dtype.element_ty)
    if INTERPRETED:
        _add_here(out + place, value, inside)
    elif out.dtype.element_ty == tl.float32:
        # that addition takes denormals for zeros: none can matter, or come out, where a value is not tiny
        tiny = tl.abs(value) < TINY
        tl.atomic_add(out + place, value, mask=inside & (tiny == 0), sem="relaxed")
        _add_here(out + place, value, inside & tiny)
    else:
        _add_half(out + place, value, inside, out.dtype.element_ty == tl.bfloat16)


@triton.jit
def _add_here(target, value, mask):
    """target[…] += value, by a load and a store."""
    total = widen(tl.load(target, mask=mask, other=0)) + widen(value)
    tl.store(target, narrow(total, target.dtype.element_ty), mask=mask)


@triton.jit
def _add_half(target, value, mask, BRAIN: tl.constexpr):
    """The same of 16-bit values, in the cache: the hardware adds to words, so −0 is added to the other half."""
    address, bits = target.to(tl.int64), value.to(tl.uint16, bitcast=True).to(tl.uint32)
    word = tl.where((address & 2) == 0, bits | 0x80000000, (bits << 16) | 0x8000)
    KIND: tl.constexpr = "bf16x2" if BRAIN else "f16x2"
    add: tl.constexpr = (
        "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p red.relaxed.gpu.global.add.noftz." + KIND + " [$1], $2;"
        " mov.u32 $0, 0; }"
    )
    arguments = [address & -4, word, mask.to(tl.int32)]
    tl.inline_asm_elementwise(add, "=r,l,r,r", arguments, tl.int32, is_pure=False, pack=1)


def scatter_add(out, index, values):
    """An index outside `out` is skipped: to raise would need a host synchronisation."""
    k = index.numel()
    launch(_scatter_add, triton.cdiv(k, ADD), out, index, values, out.numel(), k, SIZE=ADD, warps=ADD_WARPS)
    return out
