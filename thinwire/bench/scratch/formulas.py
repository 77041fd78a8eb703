"""The formulas of codecs: what is left of values, without messages.

On a card products are of bfloat16, and what `fused` marks is one kernel each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs import Cast, Codec, Identity, Quantize, Rotated
from thinwire.codecs.transform import FINER, OCTAVE, longer
from thinwire.kernels.quantize import FINE, SHRINKS, choose_scales, qmax, round_codes, spare_level
from thinwire.kernels.scales import decode_scale, encode_scale

TINY = torch.finfo(torch.float32).tiny
LARGEST = torch.finfo(torch.float32).max
COMPILED = {"cuda"}  # devices for which torch compiles formulas
Formula = Callable[..., Any]


def fused(formula: Formula) -> Formula:
    """A function of tensors that torch compiles where the first of them is on a card."""
    quick: list[Formula] = []

    @wraps(formula)
    def call(x: Tensor, *more: Any) -> Any:
        if x.device.type not in COMPILED:
            return formula(x, *more)
        if not quick:
            quick.append(torch.compile(formula, dynamic=False))
        return quick[0](x, *more)

    return call


def coded(x: Tensor, codec: Codec) -> Tensor:
    """What a codec without state leaves of x, with signs drawn anew."""
    if isinstance(codec, Identity):
        return x
    if isinstance(codec, Cast):
        return x.to(torch.bfloat16).to(x.dtype)
    if isinstance(codec, Rotated):
        signs = random_signs(x.reshape(-1, codec.block))
        return rotated(coded(rotated(x.reshape(-1, codec.block), signs), codec.inner), signs, back=True).view(x.shape)
    if isinstance(codec, Quantize) and codec.rounding == "nearest":
        blocks = x.reshape(-1, codec.block).float()
        mode = least_squares if codec.scale == "mse" else by_magnitude
        return mode(blocks, codec.bits, codec.scale == "full").view(x.shape).to(x.dtype)
    raise NotImplementedError(f"{codec}: has no formula here")


@fused
def by_magnitude(blocks: Tensor, bits: int, full: bool) -> Tensor:
    """What a Quantize leaves of blocks, float32[B, block], whose scales are their largest magnitudes'."""
    scale = choose_scales(blocks, bits, False, torch.float32, full)[0]
    return round_codes(blocks, scale, bits, spare_level(blocks, torch.float32, False, full), None) * scale[:, None]


@fused
def least_squares(blocks: Tensor, bits: int, full: bool = False) -> Tensor:
    """The same where scales are those of least squared error, compared in float32 instead of in integers."""
    most = qmax(bits)
    absmax = blocks.abs().amax(1, keepdim=True)
    sign = torch.where(blocks.amax(1, keepdim=True) < absmax, -1.0, 1.0)
    unit = blocks / absmax.clamp_min(TINY) * sign
    best = torch.full_like(absmax, LARGEST)
    shrink = torch.ones_like(absmax)
    for part in SHRINKS.get(bits, FINE):
        step = part / most
        error = (unit - (unit / step).round().clamp(-most, most + 1) * step).square().sum(1, keepdim=True)
        shrink = torch.where(error < best, part, shrink)
        best = torch.minimum(best, error)
    scale = decode_scale(encode_scale(absmax * shrink, most, LARGEST)) * sign
    inverse = torch.where(scale == 0, 0, 1 / scale)
    return (blocks * inverse).round().clamp(-most, most + 1) * scale


def random_signs(like: Tensor) -> Tensor:
    """±1 of every value."""
    return torch.randint(0, 2, like.shape, device=like.device, dtype=torch.int8).mul_(2).sub_(1)


def rotated(x: Tensor, signs: Tensor, back: bool = False) -> Tensor:
    """A Hadamard transform of rows after signs; back: undone."""
    x = x.to(work(x))
    matrix = hadamard_matrix(x.shape[-1], x.device).to(x.dtype)
    return (x @ matrix) * signs if back else (x * signs) @ matrix


def work(x: Tensor) -> torch.dtype:
    """Of products."""
    return torch.bfloat16 if x.is_cuda else torch.float32


@cache
def hadamard_matrix(size: int, device: torch.device) -> Tensor:
    """float32[size, size], orthonormal and symmetric."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return (matrix / size**0.5).to(device)


@fused
def beside_means(x: Tensor, means: Tensor | None) -> tuple[Tensor, Tensor]:
    """x beside the means of its tokens, and the scale of each row, in sixteenths of octaves."""
    rows = x.float() if means is None else x.float() - means
    rms = (rows.square().mean(1, keepdim=True)).sqrt().clamp_min(TINY)
    return rows.to(work(x)), torch.exp2(torch.round(OCTAVE * torch.log2(rms)) / OCTAVE)


@fused
def quantised(y: Tensor, scale: Tensor, classes: Tensor, steps: Tensor, gaps: Tensor, bits: Tensor) -> Tensor:
    """What to_codes and from_codes leave of rows in a learnt basis. y: float[N, d]. scale: [N, 1]. classes: int64[N],
    of each row. steps, gaps (these over 1 − E), bits: of each class, [c, d]."""
    unit = y.float() / scale
    return (_middles(unit, steps[classes], gaps[classes], bits[classes].float()) * scale).to(y.dtype)


@fused
def lengthened(y: Tensor, steps: Tensor, gaps: Tensor, bits: Tensor) -> Tensor:
    """The same of rotated rows, whose scales are such that what is left of a row has its length along it. steps, gaps,
    bits: [1, d]."""
    rms = y.float().square().mean(1, keepdim=True).sqrt().clamp_min(TINY)
    unit = y.float() / rms
    left = _middles(unit, steps, gaps, bits.float())
    return (left * torch.exp2(torch.round(FINER * torch.log2(rms * longer(unit, left))) / FINER)).to(y.dtype)


def _middles(unit: Tensor, step: Tensor, gap: Tensor, number: Tensor) -> Tensor:
    """Of values over their scale: what stands for their codes."""
    half = torch.exp2(number - 1).floor()
    codes = torch.floor(unit / step.clamp_min(TINY))
    codes = torch.minimum(torch.maximum(codes, -half), torch.exp2(number) - 1 - half)
    return torch.where(number > 0, (codes + 0.5) * gap, 0)


@fused
def blurred(y: Tensor, scale: Tensor, classes: Tensor, steps: Tensor, bits: Tensor) -> Tensor:
    """What the best code of normal values would leave: (1 − D)·y + √(D·(1 − D))·σ·noise, D = 4^(−bits). σ: steps.
    Over 1 − D it would not be a bound: of less than half a bit more errs than was there."""
    error = torch.exp2(-2 * bits[classes])
    noise = torch.randn(y.shape, device=y.device) * scale * steps[classes]
    return ((1 - error) * y.float() + (error * (1 - error)).sqrt() * noise).to(y.dtype)


def class_of(scale: Tensor, classes: int) -> Tensor:
    """int64[N]: the class of each row by its scale, [N, 1], as `in_order` cuts them."""
    rows = scale.view(-1)
    if classes == 1:
        return torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    ranks = torch.arange(len(rows), device=rows.device)
    return torch.empty_like(ranks).index_copy_(0, rows.argsort(stable=True), ranks) // (len(rows) // classes)
