"""Block-scaled quantisation to 2–8 bits, packed, in one pass.

    s_B = ⌈max_B|x| / qmax⌉ in 16 bits (scales.py),  qmax = 2^(b−1) − 1      one scale per block B
    q   = clamp(round(x · (1/s_B)), ±qmax)                                   an exact zero
    message = the codes q + qmax, packed (bits.py), padded to an even length; then the scales

`nearest` rounds half to even. `stochastic` takes ⌈t − u_i⌉, unbiased: with u_i from random.py, 23 bits of it.
`mse` replaces max|x| by c·max|x| with the c of four that least squared error asks for, and gives the code
that the symmetric grid leaves over, qmax + 1, to the side of the block's extreme (a negative scale where that is
negative). Errors are summed in integers, so that no order of summation can change a bit.
`full` is AQ-SGD's grid, all 2^b codes from −2^(b−1) on: s_B = ⌈max_B|x| / 2^(b−1)⌉, q = clamp(round(x/s_B), −2^(b−1),
qmax). Its scale is sent negative, so that the one code beyond qmax is the lowest, and decoding is the same.
float64 input keeps float64 scales (8 bytes).
"""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor

from thinwire.kernels import bits as bitpack
from thinwire.kernels import random, scales
from thinwire.kernels.dispatch import choose, choose_for, load

SHRINKS = {2: (0.8, 0.5, 0.4, 0.3), 3: (0.9, 0.75, 0.6, 0.45), 4: (1.0, 0.9, 0.8, 0.7)}  # c of the least-squares scale
FINE = (1.0, 0.95, 0.9, 0.85)  # with more bits
GRIDS = 1 << 9, 1 << 12  # resolution at which candidates are compared, of up to COARSE bits and of more
COARSE = 4
NEAREST, STOCHASTIC, LEAST_SQUARES, FULL = range(4)


class Mode(TypedDict):
    """How to round: `quantize`'s arguments, of which at most one is true."""

    stochastic: bool
    mse: bool
    full: bool


def mode_of(stochastic: bool, mse: bool, full: bool) -> int:
    """The kernels' number of a way to round."""
    if stochastic + mse + full > 1:
        raise ValueError("at most one of stochastic, mse and full")
    return STOCHASTIC if stochastic else LEAST_SQUARES if mse else FULL if full else NEAREST


def qmax(bits: int) -> int:
    """The largest code of the symmetric grid."""
    return (1 << (bits - 1)) - 1


def scale_bytes(dtype: torch.dtype) -> int:
    """Length of one scale, for values of that dtype."""
    return 8 if dtype == torch.float64 else 2


def codes_bytes(n: int, bits: int) -> int:
    """Length of n packed codes, padded to an even number."""
    return (bitpack.packed_bytes(n, bits) + 1) & ~1


def quantized_bytes(n: int, bits: int, block: int, dtype: torch.dtype) -> int:
    """Exact length of the message of n values."""
    return codes_bytes(n, bits) + -(-n // block) * scale_bytes(dtype)


def quantize(
    x: Tensor, bits: int, block: int, *, stochastic: bool = False, mse: bool = False, full: bool = False, seed: int = 0,
    out: Tensor | None = None, finite: Tensor | None = None, impl: str | None = None,
) -> Tensor:  # fmt: skip
    """x: float[n], contiguous → uint8[quantized_bytes]. A block with NaN or Inf carries scales.NONFINITE.

    At most one of stochastic, mse and full.

    `out`, from an address that is a multiple of four, receives the message: on CUDA without an allocation. `finite`: of
    `flag_for`, false after the kernel where a block is not finite.
    """
    impl = choose(x, impl)
    if impl == "gpu":
        return load(impl, "quantize").quantize(x, bits, block, mode_of(stochastic, mse, full), seed, out, finite)
    if out is not None:
        return out.copy_(quantize(x, bits, block, stochastic=stochastic, mse=mse, full=full, seed=seed, impl=impl))
    if impl != "reference":
        return load(impl, "quantize").quantize(x, bits, block, mode_of(stochastic, mse, full), seed)
    blocks = as_blocks(x.to(arithmetic(x.dtype)), block)
    scale, tail = choose_scales(blocks, bits, mse, x.dtype, full)
    noise = random.uniform(blocks.numel(), seed, x.device) if stochastic else None
    codes = round_codes(blocks, scale, bits, spare_level(blocks, x.dtype, mse, full), noise)
    return assemble(codes.reshape(-1)[: x.numel()], tail, bits)


def dequantize(
    wire: Tensor, n: int, bits: int, block: int, dtype: torch.dtype, *, onto: Tensor | None = None,
    out: Tensor | None = None, impl: str | None = None,
) -> Tensor:  # fmt: skip
    """The n values of a message in `dtype`, in `out` if given; with `onto` (float[n]) they are added to it instead."""
    impl = choose_for(wire.device, dtype, impl)
    if impl == "gpu":
        return load(impl, "quantize").dequantize(wire, n, bits, block, dtype, onto, out)
    if out is not None and onto is None:
        return out.copy_(dequantize(wire, n, bits, block, dtype, impl=impl))
    if impl != "reference":
        return load(impl, "quantize").dequantize(wire, n, bits, block, dtype, onto)
    codes, scale = take_apart(wire, n, bits, block, dtype)
    values = (as_blocks(codes, block) * scale[:, None]).reshape(-1)[:n]
    if onto is None:
        return values.to(dtype)
    return onto.copy_((onto.to(values.dtype) + values).to(onto.dtype))


def flag_for(x: Tensor) -> Tensor | None:
    """0-d bool that is true, for kernels on a card to make false where x is not finite; elsewhere None."""
    return load("gpu", "scratch").true_flag(x) if choose(x) == "gpu" else None


def is_finite(wire: Tensor, n: int, bits: int, blocks: int, dtype: torch.dtype) -> Tensor:
    """A 0-d bool tensor: does no block of the message carry the non-finite mark? O(blocks), no host sync."""
    tail = wire[codes_bytes(n, bits) : codes_bytes(n, bits) + blocks * scale_bytes(dtype)]
    if dtype == torch.float64:
        return torch.isfinite(tail.clone().view(torch.float64)).all()
    pairs = tail.reshape(-1, 2)
    return ((pairs[:, 0] & pairs[:, 1]) != 255).all()


# --- the reference, step by step (the fused delta kernel's reference uses the same steps)


def choose_scales(
    blocks: Tensor, bits: int, mse: bool, dtype: torch.dtype, full: bool = False
) -> tuple[Tensor, Tensor]:
    """blocks: float[B, block] → (scale in the arithmetic dtype [B], its bytes)."""
    absmax = blocks.abs().amax(dim=1) if blocks.numel() else blocks.new_zeros(blocks.shape[0])
    absmax = torch.where(torch.isfinite(blocks).all(dim=1), absmax, torch.nan)
    negative = torch.full_like(absmax, full, dtype=torch.bool)
    steps = qmax(bits) + full  # from zero to the extreme
    roomy = spare_level(blocks, dtype, mse)
    if roomy is not None:
        negative = (blocks.amax(dim=1) < absmax) & roomy
        absmax = absmax * torch.where(roomy, best_shrink(blocks, absmax, negative, bits), 1)
    if dtype == torch.float64:
        return double_scales(absmax / steps, negative, steps)
    code = scales.encode_scale(absmax, steps, torch.finfo(dtype).max)
    code = torch.where(negative & (code > 0) & (code != scales.NONFINITE), code + scales.SIGN, code)
    return scales.decode_scale(code), scales.to_bytes(code)


def double_scales(v: Tensor, negative: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """float64 scales, also of 7 significant bits, rounded up unless steps·s would overflow."""
    mantissa, exponent = torch.frexp(v)
    up, down = (torch.ldexp(m / 128, exponent) for m in (torch.ceil(mantissa * 128), torch.floor(mantissa * 128)))
    scale = torch.where((up * steps).isinf() & v.isfinite(), down, up) * torch.where(negative, -1, 1)
    return scale, scale.contiguous().view(torch.uint8)


def best_shrink(blocks: Tensor, absmax: Tensor, negative: Tensor, bits: int) -> Tensor:
    """The c of `shrink_candidates` of least squared error per block, compared on an integer grid.

    On a card by float32, which is exact there: of up to COARSE bits no error passes 0.7 of the grid, and 128 such
    squares are below 2²⁴; of more bits the least error of 128 values is. A value half-way between two codes errs by as
    much with either, so it does not matter which way a product is rounded there.
    """
    lift, r = scales.reciprocal(torch.where(absmax > 0, absmax, torch.ones_like(absmax)))
    t = torch.round(((blocks * lift[:, None]) * (r * grid_of(bits))[:, None]).float()).nan_to_num(0)
    t = torch.where(negative[:, None], -t, t)
    best = torch.full_like(absmax, 2**62, dtype=torch.int64)
    shrink = torch.ones_like(absmax)
    for step, inverse, c in shrink_candidates(bits):
        q = torch.round(t * inverse).clamp(-qmax(bits), qmax(bits) + 1)
        error = (t.long() - q.long() * step).square().sum(dim=1)
        shrink = torch.where(error < best, c, shrink)
        best = torch.minimum(best, error)
    return shrink


def grid_of(bits: int) -> int:
    """As how many steps of the integer grid a block's largest magnitude counts."""
    return GRIDS[bits > COARSE]


def shrink_candidates(bits: int) -> list[tuple[int, float, float]]:
    """(integer step, its float32 reciprocal, c) of every candidate.

    Beside 16 of them, 1 to 0.25, four err by 1 to 7 % more on normal, heavy-tailed and uniform blocks of 128, and by
    up to a quarter where few values are not zero. Where all magnitudes are nearly equal errors are small, and up to
    twice as large (tests/test_codecs.py).
    """
    steps = [(round(grid_of(bits) * c / qmax(bits)), c) for c in SHRINKS.get(bits, FINE)]
    return [(step, float(torch.tensor(1.0) / step), c) for step, c in steps]


def spare_level(blocks: Tensor, dtype: torch.dtype, mse: bool, full: bool = False) -> Tensor | None:
    """bool[B]: which blocks use the level qmax + 1? Least squares not where it might lie beyond the dtype's limit."""
    if not blocks.numel() or not (mse or full):
        return None
    return blocks.abs().amax(dim=1) <= torch.finfo(dtype).max / (1 if full else 2)


def round_codes(blocks: Tensor, scale: Tensor, bits: int, spare: Tensor | None, uniform: Tensor | None) -> Tensor:
    """Signed integer codes, as float[B, block]; `spare` says which blocks have the level qmax + 1."""
    lift, r = scales.reciprocal(scale)
    t = (blocks * lift[:, None]) * r[:, None]
    if uniform is None:
        t = torch.round(t)
    else:
        u = torch.floor(uniform.double() * 2.0**23) * 2.0**-23
        t = torch.ceil(t.double() - u.reshape(t.shape)).to(t.dtype)  # exact wherever a whole number is near
    plain = t.clamp(-qmax(bits), qmax(bits))
    if spare is not None:
        plain = torch.where(spare[:, None], t.clamp(-qmax(bits), qmax(bits) + 1), plain)
    return plain.nan_to_num(0) + 0.0  # −0 becomes 0, as it arrives


def assemble(codes: Tensor, tail: Tensor, bits: int) -> Tensor:
    """Signed codes [n] and scale bytes → message."""
    packed = bitpack.pack((codes + qmax(bits)).to(torch.uint8), bits, "reference")
    pad = packed.new_zeros(codes_bytes(codes.numel(), bits) - packed.numel())
    return torch.cat((packed, pad, tail))


def take_apart(wire: Tensor, n: int, bits: int, block: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Message → (signed codes as float [n], scales [B])."""
    packed, tail = wire[: bitpack.packed_bytes(n, bits)], wire[codes_bytes(n, bits) :]
    scale = scale_values(tail, dtype)
    codes = bitpack.unpack(packed, n, bits, "reference").to(scale.dtype) - qmax(bits)
    return codes, scale


def scale_values(tail: Tensor, dtype: torch.dtype) -> Tensor:
    """Scale bytes at the end of a message → scales [B] in the arithmetic dtype."""
    return tail.clone().view(torch.float64) if dtype == torch.float64 else scales.decode_scale(scales.from_bytes(tail))


def as_blocks(x: Tensor, block: int) -> Tensor:
    """float[n] → float[blocks, block], the last one filled up with zeros."""
    count = -(-x.numel() // block)
    out = x.new_zeros(count * block)
    out[: x.numel()] = x
    return out.reshape(count, block)


def arithmetic(dtype: torch.dtype) -> torch.dtype:
    """What values of that dtype are computed in: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
