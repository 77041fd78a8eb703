"""One rule, and the numbers that make it each method of the literature.

    b = φ⊙h                                  what both ends agree to subtract (gate φ per block, 1 unless stated)
    u = s·x + η·e − b ;  d = C(u) ;  y = b + d
    e ← β(e + s·x − b − d_own) ;  h ← h + α(y − h)

e (residual) is private to the sender, h (shift, or mirror) is held at both ends; both are keyed. In a group
y = h̄ + mean d_i and h̄ ← h̄ + α·mean d_i. A state whose update uses only the message can be mirrored; one that
uses x is private. "Shifted Compression Framework" (UAI 2022) and methods named below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.base import Codec
from thinwire.errors import UsageError
from thinwire.kernels.random import derive
from thinwire.memory.store import PACKED, parse_capacity

STORES = ("native", "fp32", "bf16", *PACKED)


@dataclass(frozen=True)
class Memory:
    """The numbers of the rule, and how the mirror is kept. Use a named constructor below, or your own numbers.

    name: shown in messages. s: factor on x. eta: η, the weight with which the residual is added. beta: β, the share of
    the residual that is kept; None: no residual is kept. alpha: α, how far the shift moves; None: 1/(1 + ω) of the
    codec it meets. refresh: probability of h ← x, sent in full. fixed: a constant shift, one tensor or one per key.

    For mirrors keyed by sample: cold_start: a key's first message is coded by `cold` (None: full precision), not as a
    difference from zero. gate: choose φ ∈ {0, 1} per block (else φ = 1). store: what the mirror is rounded to between
    messages (native, fp32, bf16, int2 … int8). capacity: share of ids kept (float), or bytes (int, "2GB"), first come,
    first kept. path: a file instead of RAM. host: mirrors of CUDA tensors in pinned host memory.
    """

    name: str
    s: float = 1.0
    eta: float = 0.0
    beta: float | None = None
    alpha: float | None = 0.0
    refresh: float = 0.0
    fixed: Tensor | Mapping[str | int, Tensor] | None = None
    cold_start: bool = False
    cold: Codec | None = None
    gate: bool = False
    store: str = "native"
    capacity: float | int | str = 1.0
    path: str | None = None
    host: bool = False

    @property
    def mirrored(self) -> bool:
        """Is there a shift h that changes?"""
        return self.alpha is None or self.alpha > 0 or self.refresh > 0

    def alpha_for(self, codec: Codec | None, numel: int) -> float:
        """α, or DIANA's 1/(1 + ω) of this codec for `numel` values. None: a collective that has no codec."""
        if self.alpha is not None:
            return self.alpha
        omega = None if codec is None else codec.omega(numel)
        if omega is None:
            said = "this collective" if codec is None else codec
            raise UsageError(f"Diana() takes alpha from an unbiased codec; {said} has no ω: give alpha")
        return 1 / (1 + omega)

    def check(self, codec: Codec, numel: int) -> None:
        """α = 1 moves h to y; with an unbiased codec of ω ≥ 1 for `numel` values h diverges from x: UsageError."""
        omega = codec.omega(numel)
        if self.alpha == 1 and omega is not None and omega >= 1:
            raise UsageError(
                f"{self.name} moves its shift all the way (alpha 1), which diverges with ω = {omega:.3g} ≥ 1 "
                f"of {codec}: use a contractive codec, more bits, or Diana"
            )

    def base_shift(self, key: str | int, like: Tensor) -> Tensor | None:
        """The fixed shift of a key, if this memory has one; one of several in the dtype and on the device of `like`."""
        if self.fixed is None or isinstance(self.fixed, Tensor):
            return self.fixed
        if key not in self.fixed:
            raise KeyError(f"{self.name} has no shift for key {key!r}")
        return self.fixed[key].to(like)

    def refreshes(self, seed: int) -> bool:
        """Is h ← x with this message? Drawn from the message's seed, so that both ends come to the same answer."""
        return self.refresh > 0 and derive("refresh", seed) < self.refresh * 2**63

    # --- the rule itself; tensors may be one key's or a row per worker. `own` is d_own.

    def outgoing(self, x: Tensor, e: Tensor | None, b: Tensor | None) -> Tensor:
        """u = s·x + η·e − b."""
        u = x if self.s == 1 else self.s * x
        if e is not None and self.eta:
            u = u + (e if self.eta == 1 else self.eta * e)
        return u if b is None else u - b

    def residual(self, x: Tensor, e: Tensor | None, b: Tensor | None, own: Tensor) -> Tensor:
        """e ← β(e + s·x − b − d_own)."""
        left = (x if self.s == 1 else self.s * x) - own
        left = left if e is None else e + left
        left = left if b is None else left - b
        return left if self.beta == 1 else (self.beta or 0.0) * left

    def shifted(self, h: Tensor, step: Tensor, alpha: float) -> Tensor:
        """h ← h + α·d, with d = `step` (without a gate y − h is d)."""
        return h + (step if alpha == 1 else alpha * step)

    def next_shift(self, h: Tensor | None, d: Tensor, codec: Codec | None, refreshed: Tensor | None) -> Tensor | None:
        """h after a message that carried d; None: it stays as it is.

        h: before it, None for zero. codec: gives α where none is set. refreshed: the new h of a refresh, else None.
        """
        if refreshed is not None:
            return refreshed
        if not self.mirrored or self.refresh:
            return None
        return self.shifted(torch.zeros_like(d) if h is None else h, d, self.alpha_for(codec, d.numel()))


def Plain() -> Memory:
    """No memory: y = C(x). DCGD; a direct quantiser."""
    return Memory("Plain")


def FixedShift(h: Tensor | Mapping[str | int, Tensor]) -> Memory:
    """A constant shift known to both ends (DCGD-SHIFT). h: one tensor, or one per key."""
    return Memory("FixedShift", fixed=h)


def StarShift(h: Tensor | Mapping[str | int, Tensor]) -> Memory:
    """h = ∇f_i(x*), a tensor or one per key: exact convergence with any codec, in theory only (DCGD-STAR)."""
    return Memory("StarShift", fixed=h)


def Diana(alpha: float | None = None) -> Memory:
    """h ← h + α·d (DIANA). alpha: α in (0, 1]; None: 1/(1 + ω) of the codec."""
    return Memory("Diana", alpha=_unit("alpha", alpha))


def RandDiana(p: float) -> Memory:
    """h ← x with probability p in (0, 1], drawn alike at both ends; x then travels in full (Rand-DIANA)."""
    return Memory("RandDiana", refresh=_unit("p", p) or 0.0)


def EF21() -> Memory:
    """h ← h + C(x − h), for contractive C (EF21)."""
    return Memory("EF21", alpha=1.0)


def ErrorFeedback(decay: float = 1.0) -> Memory:
    """What a message left out is added to the next: EF14; keyed by boundary, Optimus-CC's lazy error propagation.

    decay: the share of the residual that is kept, in (0, 1].
    """
    return Memory("ErrorFeedback", eta=1.0, beta=_unit("decay", decay))


def EControl(eta: float) -> Memory:
    """EF21's shift, and a residual fed back with weight eta = η in (0, 1) (EControl)."""
    if not isinstance(eta, (int, float)) or not 0 < eta < 1:
        raise UsageError(f"eta must lie in (0, 1), not {eta!r}")
    return Memory("EControl", eta=eta, beta=1.0, alpha=1.0)


def Delta(
    store: str = "bf16", cold: Codec | None = None, capacity: float | int | str = 1.0, path: str | None = None,
    gate: bool = True, host: bool = False,
) -> Memory:  # fmt: skip
    """AQ-SGD: send the change of a sample's activation against what both ends remember of it.

    store: the mirror's dtype between messages of a sample: native, fp32, bf16, or int8, int7 … int2 (AQ-SGD's z-bit
    buffers). cold: the codec of a sample's first message; None: full precision. capacity: the share of sample ids kept,
    by hash of the id (nothing is evicted, so both ends agree without talking), or a size such as "2GB" (the first ids
    that fit). path: a file instead of RAM. gate: send a block's values instead of its change where they are smaller.
    host: mirrors of CUDA tensors are kept in pinned host memory.
    """
    if store not in STORES:
        raise UsageError(f"store must be one of {', '.join(STORES)}, not {store!r}")
    if cold is not None and not isinstance(cold, Codec):
        raise UsageError(f"cold must be a codec, or none for full precision, not {cold!r}")
    parse_capacity(capacity)
    if host and path is not None:
        raise UsageError(f"path = {path!r}: mirrors in a file are not in host memory: give path or host, not both")
    return Memory(
        "Delta", alpha=1.0, cold_start=True, cold=cold, gate=gate, store=store, capacity=capacity, path=path, host=host
    )


def _unit(name: str, value: float | None) -> float | None:
    if value is not None and (not isinstance(value, (int, float)) or not 0 < value <= 1):
        raise UsageError(f"{name} must lie in (0, 1], not {value!r}")
    return value
