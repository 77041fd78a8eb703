"""Some entries of a vector, (index, value), as bytes: what sparse collectives send.

Values as they are (fp32), as bf16, or as int8 with a 16-bit scale per 64; indices as int32 (int64 past 2³¹) or coded
by Elias–Fano or a bitmap. The size follows from (n, k), so counts are all that has to be exchanged first.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, from_raw, raw_bytes
from thinwire.codecs.exact import Cast, Identity
from thinwire.codecs.quantize import Quantize
from thinwire.errors import InvalidExchange, UsageError
from thinwire.kernels import indices as coding

VALUES: dict[str, Codec] = {"fp32": Identity(), "bf16": Cast("bf16"), "int8": Quantize(8, block=64)}
INDICES = ("int32", "coded")


@dataclass(frozen=True)
class Entries:
    """How entries become bytes.

    values: "fp32" (as they are), "bf16" or "int8". indices: "int32" or "coded". later: leave checks of values and
    messages to `raise_if_damaged`, which reads them once for all of an exchange (to read on a card is to wait for it).
    """

    values: str = "fp32"
    indices: str = "int32"
    later: bool = False
    unread: list[tuple[str, Tensor]] = field(default_factory=list, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.values not in VALUES:
            raise UsageError(f"values must be one of {', '.join(VALUES)}, not {self.values!r}")
        if self.indices not in INDICES:
            raise UsageError(f"indices must be one of {', '.join(INDICES)}, not {self.indices!r}")

    @property
    def is_exact(self) -> bool:
        """Does decoding give back what was encoded?"""
        return self.values == "fp32"

    def nbytes(self, n: int, k: int, dtype: torch.dtype = torch.float32) -> int:
        """Exactly how long k entries of n values of that dtype are."""
        return VALUES[self.values].nbytes((k,), dtype) + self._index_bytes(n, k)

    def encode(self, index: Tensor, values: Tensor, n: int) -> Tensor:
        """index: int64[k] ascending below n, values: float[k] → uint8[nbytes]. NaN or Inf: InvalidExchange."""
        body, finite = VALUES[self.values].encode_flagged(values)
        self.check("cannot encode entries: values are NaN or Inf", finite)
        if self.indices == "coded":
            return torch.cat((body, coding.encode_indices(index, n)))
        return torch.cat((body, raw_bytes(index.to(_index_dtype(n)))))

    def decode(self, wire: Tensor, n: int, k: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """The inverse: (int64[k], float[k]). Wrong length: ValueError. An index outside: InvalidExchange."""
        if wire.numel() != self.nbytes(n, k, dtype):
            raise ValueError(f"{k} entries of {n} take {self.nbytes(n, k, dtype)} bytes, not {wire.numel()}")
        cut, values = VALUES[self.values].nbytes((k,), dtype), self.decode_values(wire, k, dtype)
        if not k:
            return torch.empty(0, dtype=torch.int64, device=wire.device), values
        if self.indices == "coded":
            index, good = coding.decode_flagged(wire[cut:], n, k)
        else:
            index, good = coding.checked(from_raw(wire[cut:], _index_dtype(n)).long(), n)
        self.check(f"index message is not {k} ascending indices below {n}", good)
        return index, values

    def decode_values(self, wire: Tensor, k: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """float[k]: the values alone, of a message of one's own, whose indices are known."""
        return VALUES[self.values].decode(wire[: VALUES[self.values].nbytes((k,), dtype)], (k,), dtype)

    def raise_if_damaged(self) -> None:
        """Read the checks that were left for later; the first that failed raises InvalidExchange."""
        unread = self.unread.copy()
        self.unread.clear()
        flags = torch.stack([flag for _, flag in unread]).tolist() if unread else []
        for (what, _), good in zip(unread, flags):
            if not good:
                raise InvalidExchange(what)

    def all_good(self) -> Tensor:
        """0-d bool, where messages are: the checks that were left for later, of one message at least, all of them. They
        are forgotten."""
        flags = [flag for _, flag in self.unread]
        self.unread.clear()
        return torch.stack(flags).all()

    def check(self, what: str, good: Tensor) -> None:
        """Raise InvalidExchange with that text unless `good`, 0-d; now, or with the checks left for later."""
        self.unread.append((what, good))
        if not self.later:
            self.raise_if_damaged()

    def _index_bytes(self, n: int, k: int) -> int:
        return coding.index_bytes(n, k) if self.indices == "coded" else k * _index_dtype(n).itemsize


def _index_dtype(n: int) -> torch.dtype:
    return torch.int32 if n < 2**31 else torch.int64
