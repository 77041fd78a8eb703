"""Both ways over every boundary of a row: its codes, and what is put around them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.bench.scratch.codes import Code, FittedCode, Tokens, TransformCode
from thinwire.bench.scratch.rows import FORMULAS, Row, configured
from thinwire.codecs import Cast, Transform, make

LEAST_BITS = 0.25


class KeptCode(Code):
    """Gradients whose errors are kept by token at the sending end, and sent with the token's next gradients.

        z = g + e(token)/n ;  y = C(z) ;  e(token) ← Σ (z − y)           n: how often the token is in this step

    Errors of a token's gradients then cancel over steps, instead of adding up. e stays where a token is not seen.
    """

    def __init__(self, code: Code, width: int, vocabulary: int, device: torch.device) -> None:
        super().__init__(code.codec)
        self.code = code
        self.table = torch.zeros(vocabulary, width, device=device)

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        ids, counts = tokens.ids.reshape(-1), tokens.counts.clamp_min(1)[:, None]
        z = x.reshape(-1, x.shape[-1]).float() + (self.table / counts)[ids]
        y = self.code(z.to(x.dtype), tokens)
        left = torch.zeros_like(self.table).index_add_(0, ids, z - y.float())
        self.table.copy_(torch.where(tokens.counts[:, None] > 0, left, self.table))
        return y.view(x.shape)

    def set_bits(self, bits: float) -> None:
        self.code.set_bits(bits)


class SubspaceCode(Code):
    """What an orthonormal basis of fewer dimensions, the same at all boundaries, leaves of values in bfloat16."""

    def __init__(self, basis: Tensor) -> None:
        super().__init__(Cast("bf16"))
        self.basis = basis

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        basis = self.basis.to(torch.bfloat16 if x.is_cuda else x.dtype)
        return ((x.to(basis.dtype) @ basis).bfloat16().to(basis.dtype) @ basis.T).to(x.dtype)


def codes_of(row: Row, boundaries: int, width: int, vocabulary: int, device: torch.device) -> list[tuple[Code, Code]]:
    """Of every boundary that forward, and that of gradients."""
    if row.share < 1:
        basis = torch.linalg.qr(torch.randn(width, row.rank(width)))[0].to(device)
        return [(SubspaceCode(basis), SubspaceCode(basis)) for _ in range(boundaries)]
    out = []
    for boundary in range(boundaries):
        ways = row.codec, row.back or row.codec
        there, back = (tilted(way, sign * tilt_of(row, boundary, boundaries)) for sign, way in zip((1, -1), ways))
        forward = code_of(there, width, vocabulary, row.tokens, device)
        backward = code_of(back, width, vocabulary, 0.0, device)
        out.append((forward, KeptCode(backward, width, vocabulary, device) if row.kept else backward))
    return out


def tilt_of(row: Row, boundary: int, boundaries: int) -> float:
    """Bits that a boundary has more forward, and fewer back: `row.tilt` at the first one, −`row.tilt` at the last."""
    return row.tilt * (1 - 2 * boundary / (boundaries - 1)) if boundaries > 1 else 0.0


def tilted(way: Mapping[str, Any], more: float) -> Mapping[str, Any]:
    """With so many bits more."""
    return {**way, "bits": max(LEAST_BITS, way["bits"] + more)} if more else way


def code_of(way: Mapping[str, Any], width: int, vocabulary: int, tokens: float, device: torch.device) -> Code:
    """The code of one direction, as a `[wire]` table has it, and flags of TransformCode."""
    codec = make(**configured(way))
    if isinstance(codec, Transform):
        flags = frozenset(name for name in FORMULAS if way.get(name))
        return TransformCode(codec, width, vocabulary, tokens, device, flags)
    return FittedCode(codec, width, vocabulary, tokens, device) if tokens else Code(codec)
