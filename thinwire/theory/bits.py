"""What a step sends, in two units: bits as the paper counts them, and bits that our codec really sends.

Paper: a value costs 32 bits, indices and seeds nothing; levels cost 1 + ⌈log₂(s + 1)⌉. Real: 8·nbytes in
float32, so indices, norms and padding are counted. Both are per worker, on the uplink only.
"""

from __future__ import annotations

import math

import torch

from thinwire.codecs import Codec, Dither, Identity, Induced, Natural, NaturalDither, RandK, Ternary, TopK
from thinwire.theory.mixed import Mixed

UNITS = {
    "paper": "Mbit a worker sends, as the paper counts (32 per value, indices free)",
    "real": "Mbit a worker really sends (8 × the codec's bytes, float32)",
}


def paper_bits(codec: Codec, numel: int) -> float:
    """Bits of a message of `numel` values as in the papers' plots."""
    match codec:
        case Identity():
            return 32 * numel
        case TopK() | RandK():
            return 32 * codec.count(numel)
        case Natural():
            return 9 * numel
        case Dither() | NaturalDither():
            return 32 + numel * (1 + math.ceil(math.log2(codec.levels + 1)))
        case Ternary():
            return 32 + 1.6 * numel
        case Induced():
            return paper_bits(codec.biased, numel) + paper_bits(codec.unbiased, numel)
        case Mixed():
            return sum(paper_bits(one, numel) for one in codec.codecs) / len(codec.codecs)
    raise ValueError(f"no paper counts the bits of {codec}")


def real_bits(codec: Codec, numel: int) -> int:
    """Bits that our codec sends for `numel` float32 values."""
    return 8 * codec.nbytes((numel,), torch.float32)
