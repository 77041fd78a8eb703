"""How the Triton kernels are launched: on the tensors' own device, without fused multiply-adds.

`enable_fp_fusion=False` keeps a product and a sum two roundings, as on the CPU. The kernels divide with
`div_rn`: Triton's plain `/` on float32 is approximate on the card. Denormals are kept, never flushed to zero.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

TILE = 4096  # values a program handles: 32 a thread at four warps, enough loads in flight to fill the bus


def launch(kernel, programs, first, *args, warps=4, registers=None, **constants):
    """Run `programs` programs of `kernel(first, *args, **constants)`; `first` (a tensor) names the device.

    `registers` caps those of a thread at what the path of full tiles needs: the masked path, of the last tile
    only, would take twice as many and halve the programs that fit the chip at a time.
    """
    if not first.is_cuda and not isinstance(kernel, InterpretedFunction):
        raise ValueError(
            f"impl='gpu' was given a tensor on {first.device}: it needs CUDA tensors "
            "(or TRITON_INTERPRET=1 in the environment before triton is imported, for tests)"
        )
    for x in (first, *args):
        if isinstance(x, torch.Tensor) and not x.is_contiguous():
            raise ValueError("GPU kernels take contiguous tensors")
    if programs:
        with torch.cuda.device(first.device) if first.is_cuda else nullcontext():
            kernel[(programs,)](first, *args, **constants, num_warps=warps, maxnreg=registers, enable_fp_fusion=False)


def tiling(block, width, *, tile=TILE, warps=4, registers=None, least_rows=1):
    """SHAPE of a tile (tile.py), of `width` values a segment, and warps and registers as `launch` takes them.

    block: a multiple of 8. A tile is at least `least_rows` blocks; where that makes it larger than asked for, it gets
    more warps and no cap on registers.
    """
    if block % 8:
        raise ValueError(f"GPU kernels take blocks of a multiple of 8 values, not {block}")
    columns = triton.next_power_of_2(block)
    width = min(columns, width)
    rows = max(least_rows, tile // columns)
    larger = rows * columns // tile
    shape = (columns // width, rows, width)
    return {"SHAPE": shape, "warps": min(16, warps * larger), "registers": registers if larger == 1 else None}


def line(itemsize):
    """Values in 128 bytes, a cache line."""
    return 128 // itemsize


def signed(key):
    """A 32-bit key as a signed integer: Triton then gives the argument one type whatever its value."""
    return key - (1 << 32) if key >= 1 << 31 else key
