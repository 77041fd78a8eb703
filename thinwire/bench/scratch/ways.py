"""Both ways over every boundary of a row: its codes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from thinwire.bench.scratch.codes import Code, FittedCode, TransformCode
from thinwire.bench.scratch.rows import Row, configured
from thinwire.codecs import Transform, make


def codes_of(row: Row, boundaries: int, width: int, vocabulary: int, device: torch.device) -> list[tuple[Code, Code]]:
    """Of every boundary that forward, and that of gradients. width: of the model."""
    out = []
    for _ in range(boundaries):
        there = code_of(row.codec, row.rank(width), vocabulary, row.tokens, device, row.through)
        back = code_of(row.back or row.codec, row.rank(width), 1 + vocabulary, row.next, device)
        out.append((there, back))
    return out


def code_of(
    way: Mapping[str, Any], width: int, vocabulary: int, tokens: float, device: torch.device, through: bool = False
) -> Code:
    """The code of one direction, as a `[wire]` table has it, and flags of TransformCode.

    through: is what was coded asked for, besides what arrives?
    """
    codec = make(**configured(way))
    code = Code(codec)
    if isinstance(codec, Transform):
        code = TransformCode(codec, width, vocabulary, tokens, device, bool(way.get("ideal")))
    elif tokens or through:
        code = FittedCode(codec, width, vocabulary, tokens, device)
    code.keeps = through
    return code
