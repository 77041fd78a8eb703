"""Bytes on the wire, computed by the codecs themselves: the planner has no size formula of its own.

A message is a frame (codecs/frame.py) around the codec's bytes; wire off, it is the bare fp32 tensor.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from functools import cache
from typing import Any, Protocol

from thinwire.planner import network
from thinwire.planner.model import Shape, values
from thinwire.planner.network import Cost
from thinwire.planner.settings import Setting, Wire
from thinwire.registry import plain_name

FP32 = 4


class Codec(Protocol):
    """What the planner needs of a codec: the bytes of a coded tensor, and of one coded against an earlier one."""

    def nbytes(self, shape: Shape, dtype: Any) -> int: ...

    def nbytes_onto(self, shape: Shape, dtype: Any, gate: bool = False) -> int: ...

    def for_shapes(self, shapes: list[Shape]) -> Codec: ...


def build(table: Mapping[str, Any]) -> Codec:
    """The codec that a table names: {"codec": "quantize", "bits": 4} is Quantize(bits=4)."""
    codec: Codec = importlib.import_module("thinwire.codecs").make(**table)
    return codec


def coded(codec: Codec, shape: Shape) -> int:
    """Bytes of a coded float32 tensor of this shape."""
    return codec.nbytes(shape, _fp32())


@cache
def _fp32() -> Any:
    return importlib.import_module("torch").float32


def message_bytes(setting: Setting | None, shape: Shape, cold: bool = False) -> int:
    """Bytes of a pipeline message of this shape, its first dimension the samples; `cold`: on their first visit.

    Delta memory is kept by sample: every row is coded by itself, and a bitmap says which are warm.
    """
    if setting is None:
        return FP32 * values(shape)
    frame = importlib.import_module("thinwire.codecs.frame")
    codec = build({"codec": setting.name, **setting.args})
    if not setting.delta:
        return int(frame.BYTES + coded(codec, shape))
    if cold:
        row = coded(build(setting.cold), shape[1:]) if setting.cold else FP32 * values(shape[1:])
    else:
        row = codec.nbytes_onto(shape[1:], _fp32(), setting.gate)
    return int(frame.BYTES + frame.bitmap_bytes(shape[0]) + shape[0] * row)


def reduction(setting: Setting | None, shapes: list[Shape], ranks: int, inside: int = 1) -> tuple[Cost, Cost]:
    """The cost (inside a site, across sites) of one unit of gradients, parameters flattened together, over `ranks`.

    `inside` of them share a site; only the hierarchical collective makes use of it.
    """
    n = sum(map(values, shapes))
    if setting is None or setting.name == "dense":
        return Cost(), network.dense_ring(FP32 * n, ranks)
    if setting.name == "hierarchical":
        rest = dict(setting.args.get("across", {"collective": "dense"}))
        across = Setting(plain_name(rest.pop("collective")), rest)
        return network.hierarchical(n, inside, lambda n: reduction(across, [(math.ceil(n),)], ranks // inside)[1])
    if setting.name == "alternatinglowrank":
        return Cost(), _alternating(setting, shapes, ranks)
    if setting.name == "lowrank":
        return Cost(), _low_rank(setting.args["rank"], setting.args.get("shrink", 0), shapes, ranks)
    if "density" in setting.args:
        return Cost(), _sparse(setting, n, ranks)
    table = {"codec": "quantize", "bits": setting.args["bits"]} if "bits" in setting.args else setting.args["codec"]
    if setting.name == "gather" or setting.args.get("hops") == 1:
        return Cost(), network.gather(coded(build(table).for_shapes(shapes), (n,)), ranks)
    return Cost(), network.two_hop(coded(build(table), (n,)), ranks)


def rows_bytes(codec: Codec | None, rows: int, width: int) -> int:
    """Bytes of so many rows of a tied embedding on their way down, as changes, and of their gradients on their way up.

    codec: of both; None: they are exact.
    """
    frame: int = importlib.import_module("thinwire.codecs.frame").BYTES
    if codec is None:
        return 2 * (frame + FP32 * rows * width)
    return 2 * frame + codec.nbytes_onto((rows, width), _fp32()) + coded(codec, (rows, width))


def rows_pay(wire: Wire, rows: int, vocabulary: int, width: int, replicas: int) -> bool:
    """Does a tied embedding by rows take fewer bytes than fused, of those that a step waits for one after another?

    By rows: gradients up, the owners' reduction over replicas, rows down. Fused: one reduction over both ends of all
    replicas. rows: how many a replica's batch uses.
    """
    table: list[Shape] = [(vocabulary, width)]
    codec = build(wire.rows_codec) if wire.rows_codec else None
    owners = sum(reduction(wire.embedding, table, replicas), Cost())
    fused = sum(reduction(wire.embedding, table, 2 * replicas), Cost())
    return rows_bytes(codec, rows, width) + owners.nbytes < fused.nbytes


def _sparse(setting: Setting, n: int, ranks: int) -> Cost:
    """By the entry: k coded ones over their number. Ok-Topk's owners are taken as balanced."""
    k = max(1, round(setting.args["density"] * n))
    entries = importlib.import_module("thinwire.codecs.entries").Entries
    coding = entries(setting.args.get("values", "fp32"), setting.args.get("indices", "coded"))
    entry = coding.nbytes(n, k, _fp32()) / k
    match setting.name:
        case "oktopk":
            return network.ok_topk(k, ranks, entry, balanced=True)
        case "topkdsa":
            return network.topk_dsa(n, k, ranks, entry, FP32)
        case "gtopk":
            return network.gtopk(k, ranks, entry)
        case _:
            return network.topk_allgather(k, ranks, entry)


def _alternating(setting: Setting, shapes: list[Shape], ranks: int) -> Cost:
    """One factor, the mean of the left and the right one, through the collective of factors."""
    lefts, rights, whole = _factor_values(setting.args["rank"], setting.args.get("shrink", 0), shapes)
    rest = dict(setting.args.get("factors", {"collective": "dense"}))
    factors = Setting(plain_name(rest.pop("collective")), rest)
    return reduction(factors, [((lefts + rights) // 2 + whole,)], ranks)[1]


def _low_rank(rank: int, shrink: float, shapes: list[Shape], ranks: int) -> Cost:
    """Matrices (first dimension × the others) as two factors, each reduced by a ring; what would not shrink, whole."""
    left, right, whole = _factor_values(rank, shrink, shapes)
    return network.low_rank(FP32 * left, FP32 * right, ranks) + network.dense_ring(FP32 * whole, ranks)


def _factor_values(rank: int, shrink: float, shapes: list[Shape]) -> tuple[int, int, int]:
    """Values of all left factors, of all right ones, and of what travels whole."""
    left = right = whole = 0
    for shape in shapes:
        rows, columns = shape[0], values(shape[1:])
        r = min(rank, rows, columns)
        if shrink and rows + columns:
            r = min(r, int(rows * columns / (shrink * (rows + columns))))
        if len(shape) < 2 or r < 1 or r * (rows + columns) >= rows * columns:
            whole += values(shape)
        else:
            left, right = left + r * rows, right + r * columns
    return left, right, whole
