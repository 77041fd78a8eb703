"""Workers that compress differently: worker i has the codec C_i, so its own ω_i."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs import Codec


@dataclass(frozen=True)
class Mixed(Codec):
    """Row r of a simulation is worker r mod n, and coded by its codec.

    codecs: one per worker, all unbiased.
    """

    codecs: tuple[Codec, ...]

    def rows(self, x: Tensor, seeds: Sequence[int] | Tensor) -> Tensor:
        """As Codec.rows, of [runs · n, d]."""
        out = torch.empty_like(x)
        for worker, codec in enumerate(self.codecs):
            mine = slice(worker, None, len(self.codecs))
            out[mine] = codec.rows(x[mine], seeds[mine])
        return out

    def omega(self, numel: int) -> float | None:
        """The largest of the workers'."""
        return max(one.omega(numel) or 0.0 for one in self.codecs)

    def _nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """The mean over the workers."""
        return sum(one.nbytes(shape, dtype) for one in self.codecs) // len(self.codecs)
