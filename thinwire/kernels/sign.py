"""One bit a value and one scale a block: the scaled sign ‖x‖₁/B · sign(x), with sign(0) = +1.

The mean magnitude is summed in integers, on a grid of 2⁻²⁰ of the block's maximum: the same in every order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels import bits as bitpack
from thinwire.kernels import scales
from thinwire.kernels.dispatch import choose, choose_for, load
from thinwire.kernels.quantize import arithmetic, as_blocks, codes_bytes, scale_bytes, scale_values

GRID = 1 << 20


def sign_bytes(n: int, block: int, dtype: torch.dtype) -> int:
    """Exact length of the message of n values of that dtype."""
    return codes_bytes(n, 1) + -(-n // block) * scale_bytes(dtype)


def encode_sign(x: Tensor, block: int, impl: str | None = None, finite: Tensor | None = None) -> Tensor:
    """x: float[n] → uint8[sign_bytes]: the sign bits, padded to an even length, then the 16-bit scales. `finite`: as
    `quantize` takes it."""
    impl = choose(x, impl)
    if impl == "gpu":
        return load(impl, "sign").encode_sign(x, block, finite)
    if impl != "reference":
        return load(impl, "sign").encode_sign(x, block)
    blocks = as_blocks(x.to(arithmetic(x.dtype)), block)
    absmax = blocks.abs().amax(dim=1) if x.numel() else blocks.new_zeros(0)
    safe = torch.where(absmax > 0, absmax, 1.0)
    total = torch.round((blocks.abs() / safe[:, None]) * GRID).nan_to_num(0).long().sum(dim=1)
    count = torch.full_like(total, block)
    if x.numel() % block:
        count[-1] = x.numel() % block
    if x.dtype == torch.float64:
        mean = safe * (total.double() / (count.double() * GRID))
    else:
        mean = (safe.double() * total.double() / (count.double() * GRID)).float()
    mean = torch.where(torch.isfinite(blocks).all(dim=1), torch.where(absmax > 0, mean, 0.0), torch.nan)
    packed = bitpack.pack((x < 0).to(torch.uint8), 1, "reference")
    pad = packed.new_zeros(codes_bytes(x.numel(), 1) - packed.numel())
    if x.dtype == torch.float64:
        return torch.cat((packed, pad, mean.view(torch.uint8)))
    return torch.cat((packed, pad, scales.to_bytes(scales.nearest_scale(mean, torch.finfo(x.dtype).max))))


def decode_sign(wire: Tensor, n: int, block: int, dtype: torch.dtype, impl: str | None = None) -> Tensor:
    """The n values of a message, in `dtype`."""
    impl = choose_for(wire.device, dtype, impl)
    if impl != "reference":
        return load(impl, "sign").decode_sign(wire, n, block, dtype)
    negative = bitpack.unpack(wire[: bitpack.packed_bytes(n, 1)], n, 1, "reference")
    scale = scale_values(wire[codes_bytes(n, 1) :], dtype)
    return (as_blocks(1.0 - 2.0 * negative, block) * scale[:, None]).reshape(-1)[:n].to(dtype)
