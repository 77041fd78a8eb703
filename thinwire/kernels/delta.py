"""The fused activation delta: subtract the mirror, quantise, pack and update the mirror in one pass.

    φ_B = [max_B|x − h| ≤ max_B|x|]      (gate=True; else 1)        one bit per block, at the end of the message
    u = x − φ·h ;  message = quantize(u) ;  y = φ·h + dequantize(message) ;  h ← y, in h's own dtype

The sender and the receiver run the same arithmetic in float32 and round to the mirror's dtype once, so their
mirrors are bitwise equal (AQ-SGD, NeurIPS 2022; the gate compares the norm that the block scale is made of).
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels import bits as bitpack
from thinwire.kernels import quantize as q
from thinwire.kernels import random
from thinwire.kernels.dispatch import choose, choose_for, load


def gate_bytes(n: int, block: int) -> int:
    """Length of the gate's bitmap for n values: a bit per block."""
    return bitpack.packed_bytes(-(-n // block), 1)


def delta_bytes(n: int, bits: int, block: int, dtype: torch.dtype, gate: bool) -> int:
    """Exact length of the message of n values of that dtype, with or without a gate."""
    return q.quantized_bytes(n, bits, block, dtype) + (gate_bytes(n, block) if gate else 0)


def encode_delta(
    x: Tensor, h: Tensor, out: Tensor, bits: int, block: int, *, gate: bool, stochastic: bool = False,
    mse: bool = False, full: bool = False, seed: int = 0, wire: Tensor | None = None,
    finite: Tensor | None = None, impl: str | None = None,
) -> Tensor:  # fmt: skip
    """x, h: float[n] → message uint8[delta_bytes]; `out` (float[n], may be h) receives the new mirror.

    `wire`, from an address that is a multiple of four, receives the message: on CUDA without an allocation. `finite`:
    as `quantize` takes it.
    """
    impl = choose(x, impl)
    mode = q.mode_of(stochastic, mse, full)
    if impl == "gpu":
        return load(impl, "delta").encode_delta(x, h, out, bits, block, gate, mode, seed, wire, finite)
    if wire is not None:
        how = q.Mode(stochastic=stochastic, mse=mse, full=full)
        return wire.copy_(encode_delta(x, h, out, bits, block, gate=gate, **how, seed=seed, impl=impl))
    if impl != "reference":
        return load(impl, "delta").encode_delta(x, h, out, bits, block, gate, mode, seed)
    work = q.arithmetic(x.dtype)
    values, mirror = q.as_blocks(x.to(work), block), q.as_blocks(h.to(work), block)
    phi = gate_flags(values, mirror) if gate else torch.ones_like(values[:, 0], dtype=torch.bool)
    base = torch.where(phi[:, None], mirror, 0)
    blocks = values - base
    scale, tail = q.choose_scales(blocks, bits, mse, x.dtype, full)
    noise = random.uniform(blocks.numel(), seed, x.device) if stochastic else None
    codes = q.round_codes(blocks, scale, bits, q.spare_level(blocks, x.dtype, mse, full), noise)
    out.copy_((base + codes * scale[:, None]).reshape(-1)[: x.numel()])
    coded = q.assemble(codes.reshape(-1)[: x.numel()], tail, bits)
    return torch.cat((coded, bitpack.pack(phi.to(torch.uint8), 1, "reference"))) if gate else coded


def decode_delta(
    wire: Tensor, h: Tensor, out: Tensor, bits: int, block: int, dtype: torch.dtype, *, gate: bool,
    y: Tensor | None = None, impl: str | None = None,
) -> Tensor:  # fmt: skip
    """The twin: message and h: float[n] → y in `dtype` [n], in `y` if given; `out` (may be h): the new mirror."""
    impl = choose_for(wire.device, dtype, impl)
    if impl == "gpu":
        return load(impl, "delta").decode_delta(wire, h, out, bits, block, dtype, gate, y)
    if y is not None:
        return y.copy_(decode_delta(wire, h, out, bits, block, dtype, gate=gate, impl=impl))
    if impl != "reference":
        return load(impl, "delta").decode_delta(wire, h, out, bits, block, dtype, gate)
    n, end = h.numel(), q.quantized_bytes(h.numel(), bits, block, dtype)
    codes, scale = q.take_apart(wire[:end], n, bits, block, dtype)
    mirror = q.as_blocks(h.to(scale.dtype), block)
    if gate:
        phi = bitpack.unpack(wire[end:], mirror.shape[0], 1, "reference").bool()
        mirror = torch.where(phi[:, None], mirror, 0)
    values = (mirror + q.as_blocks(codes, block) * scale[:, None]).reshape(-1)[:n]
    out.copy_(values)
    return values.to(dtype)


def gate_flags(values: Tensor, mirror: Tensor) -> Tensor:
    """bool[B]: is the delta no larger than the value, in the maximum norm of the block?"""
    if not values.numel():
        return values.new_zeros(values.shape[0], dtype=torch.bool)
    return (values - mirror).abs().amax(dim=1) <= values.abs().amax(dim=1)
