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


def launch(kernel, programs, first, *args, warps=4, **constants):
    """Run `programs` programs of `kernel(first, *args, **constants)`; `first` (a tensor) names the device."""
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
            kernel[(programs,)](first, *args, **constants, num_warps=warps, enable_fp_fusion=False)


def tiling(block, itemsize, least_rows=1, tile=TILE):
    """(SHAPE of a tile, see tile.py; warps) for blocks of `block` values, a multiple of 8, of `itemsize` bytes."""
    if block % 8:
        raise ValueError(f"GPU kernels take blocks of a multiple of 8 values, not {block}")
    columns = triton.next_power_of_2(block)
    width = min(columns, 128 // itemsize)
    rows = max(least_rows, tile // columns)
    return (columns // width, rows, width), min(16, max(4, rows * columns // 2048))


def signed(key):
    """A 32-bit key as a signed integer: Triton then gives the argument one type whatever its value."""
    return key - (1 << 32) if key >= 1 << 31 else key
