"""The contract of a codec: a tensor becomes a flat uint8 message of a size known beforehand, and comes back.

A codec is stateless, and frozen: whatever it needs travels in the message or follows from `seed`. To add one,
subclass Codec, implement `_encode`, `_decode`, `_nbytes` and the bounds you can prove, and list it in __init__.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.kernels import bits as bitpack
from thinwire.kernels.delta import gate_bytes, gate_flags
from thinwire.kernels.quantize import as_blocks

GATE_BLOCK = 128  # values that one gate bit decides for, in codecs without a block of their own
WORK = {torch.float8_e4m3fn: torch.bfloat16, torch.float8_e5m2: torch.bfloat16}


class Codec:
    """C: tensor → bytes → tensor.

    Common arguments: x: any floating dtype and shape. wire: a message, uint8[nbytes]. shape, dtype: of x. seed: of the
    message's random numbers, equal at both ends. h: a mirror, of x's shape. gate: choose per block whether to subtract
    it. out: where the new mirror goes (default: into h). into: where the message goes, uint8[nbytes] from an address
    that is a multiple of four.

    revision: of what its messages mean. Raise it where the same bytes stand for other values than before, or other
    bytes for the same: ends that differ in it are refused, and so is what was saved of such a link.
    """

    revision: ClassVar[int] = 1

    @property
    def never_syncs(self) -> bool:
        """Do encoding and decoding never read values on the host? Then nothing here waits for a card."""
        return False

    @property
    def warm_starts(self) -> bool:
        """Does `encode` do better with `prev`, the `right_factor` of the key's last message?"""
        return False

    @property
    def learns(self) -> bool:
        """Is it fitted to what a pipeline's boundary sends (memory/fitted.py)?"""
        return False

    @property
    def span(self) -> int | None:
        """How many values are coded on their own: a tensor cut at multiples of it is coded piece by piece. None: as a
        whole."""
        return None

    @property
    def gate_block(self) -> int:
        """How many values one gate bit decides for: the codec's block, or 128."""
        return getattr(self, "block", None) or GATE_BLOCK

    def for_shapes(self, shapes: Sequence[tuple[int, ...]]) -> Codec:
        """This codec for the flat concatenation of several tensors; the same, where shapes mean nothing to it."""
        return self

    def encode(self, x: Tensor, seed: int = 0, prev: Tensor | None = None) -> Tensor:
        """x → uint8[nbytes]. NaN or Inf: ValueError. prev: the `right_factor` of the key's last message, if any."""
        wire, finite = self.encode_flagged(x, seed)
        if not bool(finite):
            raise ValueError(f"cannot encode a {tuple(x.shape)} tensor: {describe_nonfinite(x)}")
        return wire

    def encode_flagged(self, x: Tensor, seed: int = 0, into: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(message, 0-d bool "all finite"), without raising and without a host sync: the caller tests the flag.

        Where the flag is false the message has its usual size and no usable content.
        """
        finite = is_finite(x)
        if not x.numel():
            return torch.empty(0, dtype=torch.uint8, device=x.device), finite
        x = x.to(work_dtype(x.dtype)).contiguous()
        if x.is_cuda or not bool(finite):  # on a GPU without reading the flag, which would stop the host
            x = torch.where(finite, x, 0)
        wire = self._encode(x, seed)
        return (wire if into is None else into.copy_(wire)), finite

    def decode(self, wire: Tensor, shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
        """The inverse, up to the codec's loss. A message of the wrong length or content: ValueError."""
        expected = self.nbytes(shape, dtype)
        if wire.dtype != torch.uint8 or wire.dim() != 1 or wire.numel() != expected:
            got = f"{wire.numel()} of {str(wire.dtype).removeprefix('torch.')}"
            raise ValueError(f"{self}: a {tuple(shape)} message has {expected} bytes of uint8, not {got}")
        if not math.prod(shape):
            return torch.zeros(tuple(shape), dtype=dtype, device=wire.device)
        return self._decode(wire, tuple(shape), work_dtype(dtype), seed).to(dtype).reshape(tuple(shape))

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Exactly how long the message of such a tensor is."""
        return self._nbytes(tuple(shape), work_dtype(dtype)) if math.prod(shape) else 0

    def omega(self, numel: int) -> float | None:
        """ω with E‖C(x) − x‖² ≤ ω‖x‖² and E C(x) = x, for tensors of `numel` values; None: biased or unbounded."""
        return None

    def delta(self, numel: int) -> float | None:
        """δ ∈ (0, 1] with E‖C(x) − x‖² ≤ (1 − δ)‖x‖²; None: no bound is known."""
        return None

    def right_factor(self, wire: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """What the key's next message starts from, cut from this one; None: nothing."""
        return None

    def rows(self, x: Tensor, seeds: Sequence[int] | Tensor) -> Tensor:
        """x: float[R, …], one seed per row → what the other end decodes, row by row. Simulates R workers."""
        return torch.stack([self.decode(self.encode(r, int(s)), r.shape, r.dtype, int(s)) for r, s in zip(x, seeds)])

    # --- against a mirror: subtract, encode, update it. Codecs with a fused kernel override these two.

    def nbytes_onto(self, shape: Sequence[int], dtype: torch.dtype, gate: bool = False) -> int:
        """Length of an `encode_onto` message: the gate's bitmap follows the codec's bytes."""
        return self.nbytes(shape, dtype) + (gate_bytes(math.prod(shape), self.gate_block) if gate else 0)

    def encode_onto(self, x: Tensor, h: Tensor, seed: int = 0, gate: bool = False, out: Tensor | None = None) -> Tensor:
        """Send x − φ⊙h and move the mirror h (or `out`) to what the receiver will have: y = φ⊙h + C(x − φ⊙h)."""
        wire, finite = self.encode_onto_flagged(x, h, seed, gate, out)
        if not bool(finite):
            raise ValueError(f"cannot encode a {tuple(x.shape)} tensor: {describe_nonfinite(x)}")
        return wire

    def encode_onto_flagged(
        self, x: Tensor, h: Tensor, seed: int = 0, gate: bool = False, out: Tensor | None = None,
        into: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """`encode_onto` with the flag of `encode_flagged`; where it is false the mirror's content is void."""
        out = h if out is None else out
        work = torch.promote_types(work_dtype(x.dtype), torch.float32)
        base, phi = self._gated(x.to(work), h.to(work), gate)
        wire, finite = self.encode_flagged((x.to(work) - base).to(x.dtype), seed)
        step = self.decode(wire, x.shape, x.dtype, seed)
        out.copy_(base + step)
        wire = torch.cat((wire, bitpack.pack(phi, 1))) if gate else wire
        return (wire if into is None else into.copy_(wire)), finite

    def decode_onto(
        self, wire: Tensor, h: Tensor, dtype: torch.dtype | None = None, seed: int = 0, gate: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The twin of `encode_onto`: y in `dtype` (default: h's), and the mirror h (or `out`) moved to it."""
        dtype, out = dtype or h.dtype, h if out is None else out
        self._check_onto(wire, h, dtype, gate)
        work = torch.promote_types(work_dtype(dtype), torch.float32)
        base, cut = h.to(work), self.nbytes(h.shape, dtype)
        if gate:
            blocks = -(-h.numel() // self.gate_block)
            phi = bitpack.unpack(wire[cut:], blocks, 1).bool().repeat_interleave(self.gate_block)
            base = torch.where(phi[: h.numel()].reshape(h.shape), base, 0)
        y = base + self.decode(wire[:cut], h.shape, dtype, seed)
        out.copy_(y)
        return y.to(dtype)

    def _check_onto(self, wire: Tensor, h: Tensor, dtype: torch.dtype, gate: bool) -> None:
        if wire.numel() != self.nbytes_onto(h.shape, dtype, gate):
            expected = self.nbytes_onto(h.shape, dtype, gate)
            raise ValueError(f"{self}: a {tuple(h.shape)} delta has {expected} bytes, not {wire.numel()}")

    def _gated(self, x: Tensor, h: Tensor, gate: bool) -> tuple[Tensor, Tensor]:
        """(φ⊙h, φ as uint8 per block)."""
        if not gate:
            return h, torch.empty(0, dtype=torch.uint8, device=x.device)
        flat = [as_blocks(t.reshape(-1), self.gate_block) for t in (x, h)]
        phi = gate_flags(*flat)
        base = torch.where(phi[:, None], flat[1], 0).reshape(-1)[: x.numel()].reshape(x.shape)
        return base, phi.to(torch.uint8)

    # --- what a codec implements: x contiguous, not empty, finite, in a work dtype (16, 32 or 64 bits)

    def _encode(self, x: Tensor, seed: int) -> Tensor:
        raise NotImplementedError

    def _decode(self, wire: Tensor, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
        raise NotImplementedError

    def _nbytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        raise NotImplementedError


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype a codec computes in: its own, but bfloat16 for the 8-bit floats, which torch cannot add."""
    if not dtype.is_floating_point:
        raise ValueError(f"codecs take floating dtypes, not {dtype}")
    return WORK.get(dtype, dtype)


def is_finite(x: Tensor) -> Tensor:
    """0-d bool, no host sync: one pass and no temporary, since minimum and maximum carry NaN and Inf."""
    if not x.numel():
        return torch.ones((), dtype=torch.bool, device=x.device)
    x = x.to(work_dtype(x.dtype))
    if x.is_cuda:
        return largest_is_finite(x)
    low, high = torch.aminmax(x)
    return torch.isfinite(low) & torch.isfinite(high)


def largest_is_finite(x: Tensor) -> Tensor:
    """`is_finite` in two launches; slower on a CPU."""
    return torch.linalg.vector_norm(x, math.inf) < math.inf


def describe_nonfinite(x: Tensor) -> str:
    """How many values of x are NaN or Inf and where the first is, for an error message. Waits for a card."""
    bad = ~torch.isfinite(x.to(work_dtype(x.dtype)).reshape(-1))
    count = int(bad.sum())
    if not count:
        return "its values do not fit the codec's range"
    return f"{count} of {x.numel()} values are NaN or Inf, the first at flat index {int(bad.nonzero()[0])}"


def raw_bytes(x: Tensor) -> Tensor:
    """The bytes of a tensor, uint8 and flat."""
    return x.contiguous().view(-1).view(torch.uint8)


def from_raw(wire: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse; the clone aligns a slice of a message."""
    return wire.clone().view(dtype)
