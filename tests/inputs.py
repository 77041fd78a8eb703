"""Tensors to try things on: every dtype and shape, and the distributions that bounds must hold for."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from thinwire import codecs as c

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHAPES = ((), (0,), (1,), (7,), (128,), (129,), (3, 0), (5, 33), (2, 3, 65), (1000,))
DISTRIBUTIONS = ("gaussian", "laplace", "student", "onehot", "constant", "zero", "sparse", "tiny", "denormal")

CODECS: tuple[c.Codec, ...] = (
    c.Identity(), c.Cast("fp16"), c.Cast("bf16"), c.Cast("fp8"),
    *(c.Quantize(b) for b in range(2, 9)), c.Quantize(4, block=64), c.Quantize(4, rounding="stochastic"),
    c.Quantize(2, rounding="stochastic"), c.Quantize(8, rounding="stochastic"),
    c.Quantize(2, scale="full"), c.Quantize(4, scale="full"),
    c.Quantize(2, scale="mse"), c.Quantize(3, scale="mse"), c.Quantize(4, scale="mse"),
    c.ScaledSign(), c.ScaledSign(64), c.Natural(), c.Dither(4), c.Dither(4, "inf"),
    c.NaturalDither(4), c.NaturalDither(3, "inf"), c.Ternary(), c.TopK(0.1), c.TopK(0.5), c.TopK(1.0),
    c.RandK(0.1), c.RandK(0.5), c.LowRank(1), c.LowRank(4),
    c.Chain(c.TopK(0.2), c.Quantize(4)), c.Chain(c.RandK(0.3), c.Natural()),
    c.Chain(c.TopK(0.2), c.Natural()), c.Rotated(c.Quantize(3)), c.Rotated(c.TopK(0.2), 32),
    c.Centered(c.Quantize(3)), c.Centered(c.LowRank(1)), c.Centered(c.TopK(0.1)),
    c.Induced(c.TopK(0.3), c.RandK(0.3)), c.Induced(c.Quantize(3), c.Natural()),
    c.TileTopK(2, 4), c.TileTopK(8, 8, c.TwoLevels(16)), c.TwoLevels(), c.BinMeans(), c.PowerOfTwo(), c.PowerOfTwo(2),
    c.Transform(2), c.Transform(0.5), c.Transform(3.3),
)  # fmt: skip
UNBIASED = tuple(codec for codec in CODECS if codec.omega(100) is not None)
CONTRACTIVE = tuple(codec for codec in CODECS if codec.delta(100) is not None)


def tensor(kind: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    normal = torch.randn(shape, generator=g, dtype=torch.float64)
    uniform = torch.rand(shape, generator=g, dtype=torch.float64).clamp(1e-12, 1 - 1e-12)
    if kind == "laplace":
        x = -torch.sign(uniform - 0.5) * torch.log1p(-2 * (uniform - 0.5).abs())
    elif kind == "student":  # three degrees of freedom
        x = normal / torch.sqrt(torch.randn((3, *shape), generator=g, dtype=torch.float64).square().mean(0) + 1e-9)
    elif kind == "onehot":
        x = torch.zeros(shape, dtype=torch.float64)
        if x.numel():
            x.view(-1)[seed % x.numel()] = -3.0
    elif kind == "constant":
        x = torch.full(shape, -1.7, dtype=torch.float64)
    elif kind == "zero":
        x = torch.zeros(shape, dtype=torch.float64)
    elif kind == "sparse":
        x = normal * (uniform < 0.05)
    else:
        x = normal * {"gaussian": 1.0, "tiny": 1e-6, "denormal": 1e-40}[kind]
    return x.to(dtype)


inputs = st.builds(
    tensor, st.sampled_from(DISTRIBUTIONS), st.sampled_from(SHAPES), st.sampled_from(DTYPES), st.integers(0, 2**20)
)


def agree(a, b) -> bool:
    """The same products of operands that lie elsewhere in memory: BLAS promises no equal bits for that."""
    tolerance = 0.03 if b.dtype == torch.bfloat16 else 1e-5
    return a.dtype == b.dtype and float((a - b).detach().abs().max()) <= tolerance * float(b.detach().abs().max())
