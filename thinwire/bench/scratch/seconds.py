"""Seconds of the yardstick's step, from the bytes of a row: by the line through its two published measurements.

Protocol NanoGPT: 8 stages of width 1024, 524,288 tokens per step, links of 200 Mb/s and 50 ms. Published: dense bf16,
4,096 bytes per token both ways, 100.475 s; a fixed subspace, 644 bytes, 19.889 s. So a step takes 4.85 s, computing and
latency, and 0.0233 s per byte per token, 1.11 times what 200 Mb/s take for both directions one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from thinwire.bench.scratch.rows import Row, configured
from thinwire.codecs import frame as framing
from thinwire.codecs import make
from thinwire.codecs.transform_book import Book

PUBLISHED = {"dense bf16": (4096.0, 100.475), "fixed subspace": (644.0, 19.889)}  # bytes per token, seconds
PUBLISHED_RATIO = 181_487 / 293_889  # T of the fixed subspace over T of dense
(_MANY, _LONG), (_FEW, _SHORT) = PUBLISHED.values()
PER_BYTE = (_LONG - _SHORT) / (_MANY - _FEW)
FIXED = _LONG - PER_BYTE * _MANY


@dataclass(frozen=True)
class Yardstick:
    """The size of its step. vocabulary: for anchors."""

    width: int = 1024
    tokens: int = 524_288
    microbatches: int = 64
    latency: float = 0.05
    vocabulary: int = 50_304


def message_bytes(row: Row, size: Yardstick) -> float:
    """Of one micro-batch, both ways; the mean over a run whose bits change."""
    shape = size.tokens // size.microbatches, row.rank(size.width)
    ways = row.codec, row.back or row.codec
    begins = [(0.0, *(way.get("bits") for way in ways)), *row.phases]
    ends = [*(phase[0] for phase in row.phases), 1.0]
    total = 0.0
    for (share, *bits), end in zip(begins, ends):
        total += (end - (share or 0.0)) * sum(_bytes(way, number, shape) for way, number in zip(ways, bits))
    return total


def _bytes(way: Mapping[str, Any], bits: float | None, shape: tuple[int, int]) -> float:
    """Of one message; bits: instead of the codec's own, where it has any."""
    given = configured(way)
    return framing.BYTES + make(**{**given, **({} if bits is None else {"bits": bits})}).nbytes(shape, torch.float32)


def boundary_bytes(row: Row, size: Yardstick) -> int:
    """Of what a learned boundary sends of itself in a step, one way: gradients, or new values, in float32."""
    if row.rate == 0:
        return 0
    return framing.BYTES + 4 * (size.width * row.rank(size.width) + row.anchors * (size.vocabulary + size.width))


def book_bytes(row: Row, size: Yardstick) -> float:
    """Of the books of transforms, per step on average, both ways."""
    every = [way.get("every", 0) for way in (row.codec, row.back or row.codec)]
    return sum((framing.BYTES + Book.nbytes(size.width)) / steps for steps in every if steps)


def bytes_per_token(row: Row, size: Yardstick) -> float:
    """Both ways over one boundary, a learned boundary's own parameters, or books, included."""
    own = 2 * boundary_bytes(row, size) + book_bytes(row, size)
    return (message_bytes(row, size) * size.microbatches + own) / size.tokens


def seconds_per_step(row: Row, size: Yardstick) -> float:
    """Of a step; a learned boundary's two messages have a latency each, after everything else."""
    return FIXED + PER_BYTE * bytes_per_token(row, size) + (2 * size.latency if row.rate else 0.0)
