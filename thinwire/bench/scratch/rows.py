"""The rows of `thinwire bench scratch`: what crosses a boundary of a model that is trained from scratch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from thinwire.errors import UsageError

DENSE = "dense bf16"
BF16: Mapping[str, Any] = {"codec": "cast", "to": "bf16"}
TOKENS = 0.5  # rate of token means, where a row has them
NEXT = 0.1  # the same of gradients, by the token that comes next
PUBLISHED_SHARE = 160 / 1024  # of the width: the rank of the published fixed subspace


@dataclass(frozen=True)
class Row:
    """One way to cross boundaries.

    name: in tables. codec: both ways, as in a `[wire]` table. back: that of gradients, where it is another.
    share: of the width that crosses in a subspace; 1: everything, without one.
    rate: of the subspace, relative to the model's; 0: it stays as it begins. anchors: of tokens, beside it.
    tables: has every receiving stage a vector per token for what does not cross?
    tokens, next: rates of the token means that messages forward and back are coded against; 0: there are none.
    through: does the gradient pass through the scales of codes forward?
    phases: (share of the steps, bits forward, bits back): what holds from there on; bits of Transforms.
    """

    name: str
    codec: Mapping[str, Any] = field(default_factory=dict)
    share: float = 1.0
    rate: float = 0.0
    anchors: int = 0
    tables: bool = False
    back: Mapping[str, Any] = field(default_factory=dict)
    tokens: float = 0.0
    next: float = 0.0
    through: bool = False
    phases: Sequence[tuple[float, float, float]] = ()

    @property
    def messages(self) -> bool:
        """Can it be had with messages? Bits that change within a run, and the bound of all codes, cannot."""
        own = {name for way in (self.codec, self.back) for name in way}
        return not (self.phases or own.intersection(FORMULAS))

    @property
    def formulas(self) -> bool:
        """Can it be had without messages? Subspaces that learn cannot."""
        return not self.rate and not self.anchors

    def rank(self, width: int) -> int:
        """How many values of a hidden state of `width` cross."""
        return max(1, round(self.share * width))


def _direct(bits: int, scale: str = "absmax") -> Mapping[str, Any]:
    return {"codec": "quantize", "bits": bits, "scale": scale}


def _rotated(bits: int, scale: str = "absmax") -> Mapping[str, Any]:
    return {"codec": "rotated", "inner": _direct(bits, scale)}


FORMULAS = ("ideal",)  # what a way has beside what a `[wire]` table has


def _transform(bits: float, every: int = 0, ideal: bool = False) -> Mapping[str, Any]:
    return {"codec": "transform", "bits": bits, "every": every, **({"ideal": True} if ideal else {})}


def configured(way: Mapping[str, Any]) -> dict[str, Any]:
    """What a `[wire]` table has of it."""
    return {name: value for name, value in way.items() if name not in FORMULAS}


BITS = (8, 6, 4, 3)
FITTED = (  # bits forward, in a learnt basis, and back
    (8, 8), (6, 6), (4, 4), (3, 3), (2.5, 2.5), (3, 2), (2, 3), (2, 2), (2.5, 1.5), (3, 1), (2, 1.5),
    (1.5, 1.5), (1, 1), (0.5, 0.5),
)  # fmt: skip
ROWS = {
    row.name: row
    for row in (
        Row(DENSE, BF16),
        *(Row(f"direct {bits} bits", _direct(bits)) for bits in BITS),
        *(Row(f"rotated {bits} bits", _rotated(bits)) for bits in BITS),
        Row("fixed subspace bf16", BF16, PUBLISHED_SHARE),
        Row("learned d/4 at 8 bits", _rotated(8), 0.25, 0.1),
        Row("learned d/4 at 4 bits", _rotated(4), 0.25, 0.1),
        Row("learned d/4 + anchors at 4 bits", _rotated(4), 0.25, 0.1, 16),
        Row("learned d/2 at 4 bits", _rotated(4), 0.5, 0.1),
        Row("learned d/2 + anchors at 4 bits", _rotated(4), 0.5, 0.1, 16),
        Row("learned d/4 + anchors at 8 bits", _rotated(8), 0.25, 0.1, 16),
        Row("rotated 3 bits mse", _rotated(3, "mse")),
        Row("rotated 2 bits mse", _rotated(2, "mse")),
        Row("rotated 4 bits mse", _rotated(4, "mse")),
        *(Row(f"tokens + rotated {bits} bits mse", _rotated(bits, "mse"), tokens=TOKENS) for bits in (4, 3, 2)),
        *(
            Row(f"tokens + normal {f} back {b}", _transform(f), back=_transform(b), tokens=TOKENS)
            for f, b in ((4, 4), (3, 3), (3, 2), (2, 2))
        ),
        *(
            Row(f"tokens + rotated {f} mse back {b}", _rotated(f, "mse"), back=_transform(b), tokens=TOKENS)
            for f, b in ((4, 3), (4, 2), (3, 3), (3, 2))
        ),
        Row("rotated 3 mse back 4", _rotated(3, "mse"), back=_rotated(4)),
        Row("rotated 4 back 3 mse", _rotated(4), back=_rotated(3, "mse")),
        Row("learned d/2 at 3 bits mse", _rotated(3, "mse"), 0.5, 0.1),
        *(Row(f"rotated normal {bits} bits", _transform(bits)) for bits in (4, 3, 2)),
        Row("basis 2 back 2", _transform(2, 100), back=_transform(2)),
        Row("fp32", {"codec": "identity"}),
        Row("bf16 back 2", BF16, back=_transform(2)),
        Row("tokens + basis 2 back bf16", _transform(2, 100), back=BF16, tokens=TOKENS),
        *(Row(f"ideal {bits} bits", _transform(bits, ideal=True)) for bits in (4, 3, 2, 1)),
        *(
            Row(f"tokens + basis {f} back {b}", _transform(f, 100), back=_transform(b), tokens=TOKENS)
            for f, b in FITTED
        ),
    )
}


NAME = re.compile(
    r"(?P<ideal>ideal )?tokens(?P<both> both ways)? \+ (?P<kind>basis|normal) (?P<bits>[\d.]+ back [\d.]+)"
    r"( every (?P<every>\d+))?(?P<through> through)?( of (?P<share>[\d.]+))?"
    r"(?P<phases>(, [\d.]+ back [\d.]+ from [\d.]+)*)"
)
TABLES = re.compile(r"bf16 of (?P<share>[\d.]+)")


def row_of(name: str) -> Row:
    """The row of a name: one of ROWS, or one like "tokens both ways + normal 2 back 2 through of 0.5".

    normal: rotated at random; basis: forward in a learnt one, with a book in `every` so many steps, otherwise 100.
    both ways: gradients are coded against means too. through: the gradient passes through the scales of codes.
    of: that share of the width crosses, and every receiving stage has a table of tokens. ideal: as the best codes of so
    many bits would err. After a comma: bits forward, bits back, and the share of the steps from which they hold.
    "bf16 of 0.5" is such a share in bfloat16; "bf16 of 1": dense, and tables.
    """
    if name in ROWS:
        return ROWS[name]
    if found := TABLES.fullmatch(name):
        return Row(name, BF16, float(found["share"]), tables=True)
    found = NAME.fullmatch(name)
    if found is None:
        raise UsageError(f"{name!r} is no row; rows are {', '.join(ROWS)}")
    every, ideal = int(found["every"] or 100) if found["kind"] == "basis" else 0, bool(found["ideal"])
    forward, back = map(float, found["bits"].split(" back "))
    phases: list[Any] = []
    for phase in found["phases"].split(", ")[1:]:
        bits, share = phase.split(" from ")
        phases.append((float(share), *map(float, bits.split(" back "))))
    return Row(
        name, _transform(forward, every, ideal), float(found["share"] or 1), tables=bool(found["share"]),
        back=_transform(back, ideal=ideal), tokens=TOKENS, next=NEXT if found["both"] else 0.0,
        through=bool(found["through"]), phases=tuple(phases),
    )  # fmt: skip


QUICK = (DENSE, "direct 3 bits", "rotated 4 bits", "fixed subspace bf16", "learned d/4 at 4 bits")
