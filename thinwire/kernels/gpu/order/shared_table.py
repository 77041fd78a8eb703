"""A table of counts in a program's shared memory, which Triton has no name for: added to by one instruction per value.

Triton 3.6 counts by ballots, whose number grows with the bins. The hardware adds ones of a whole warp to shared memory
at once, also where several meet in a bin. The interpreter has no shared memory: kernels keep another way for it.
"""

from __future__ import annotations

import triton
import triton.language as tl

BINS = tl.constexpr(2048)


@triton.jit
def new_table(THREADS: tl.constexpr):
    """The address of BINS zeros. THREADS: of a program; one call per kernel."""
    lanes = tl.arange(0, THREADS)
    reserve: tl.constexpr = "{ .shared .align 16 .b8 table[8192]; mov.u32 $0, table; }"
    table = tl.max(tl.inline_asm_elementwise(reserve, "=r,r", [lanes], tl.int32, is_pure=True, pack=1))
    clear: tl.constexpr = "st.shared.u32 [$1], 0; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(clear, "=r,r", [_places(table)], tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()
    return table


@triton.jit
def add_ones(table, bins):
    """table[bins] += 1."""
    add: tl.constexpr = "red.shared.add.u32 [$1], 1; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(add, "=r,r", [table + 4 * bins], tl.int32, is_pure=False, pack=1)


@triton.jit
def add_some(table, bins, mask):
    """table[bins] += 1 where `mask`."""
    place = tl.where(mask, table + 4 * bins, -1)
    add: tl.constexpr = "{ .reg .pred p; setp.ge.s32 p, $1, 0; @p red.shared.add.u32 [$1], 1; mov.u32 $0, 0; }"
    tl.inline_asm_elementwise(add, "=r,r", [place], tl.int32, is_pure=False, pack=1)


@triton.jit
def add_to_memory(table, counts, count):
    """counts[…] += the first `count` of the table, int64; once, at the kernel's end."""
    tl.debug_barrier()
    read: tl.constexpr = "ld.shared.u32 $0, [$1];"
    found = tl.inline_asm_elementwise(read, "=r,r", [_places(table)], tl.int32, is_pure=False, pack=1)
    bins = tl.arange(0, BINS)
    tl.atomic_add(counts + bins, found.to(tl.int64), mask=(found > 0) & (bins < count), sem="relaxed")


@triton.jit
def _places(table):
    return table + 4 * tl.arange(0, BINS)
