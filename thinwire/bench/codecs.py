"""`thinwire bench codecs`: encode and decode speed beside the alternatives, as ratios measured in one run.

Every candidate does the same work on the same tensor: quantise 64 MiB of float32 with its scales, all cores.
Repeats are interleaved (one of each, again and again) and medians compared, so that a busy machine slows all alike.
"Allocating" is the public call, which makes its own output; "in place" writes into a buffer made before.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs import Codec, Quantize, Rotated, ScaledSign, TopK
from thinwire.kernels import quantize as kernel
from thinwire.kernels import select
from thinwire.terminal import progress, table, write_json


@dataclass(frozen=True)
class Candidate:
    """One implementation of one task, ready to be called again and again."""

    name: str
    task: str
    call: Callable[[], Any]
    nbytes: int  # of the uncompressed tensor: the GB/s are of these


def run(args: argparse.Namespace) -> int:
    """Measure all candidates as `args` says and print the tables; the exit status."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(args.mib * 2**18, generator=g)
    candidates = [*_copies(x), *_ours(x), *_eager(x), *_piquant(x), *_bitsandbytes(x), *_hivemind(x), *_selection(x)]
    seconds = measure(candidates, args.repeats)
    rows: list[dict[str, Any]] = [
        {"task": c.task, "name": c.name, "ms": 1e3 * seconds[i], "gb_per_s": c.nbytes / seconds[i] / 1e9}
        for i, c in enumerate(candidates)
    ]
    table(
        f"{args.mib} MiB of float32, {torch.get_num_threads()} threads, medians of {args.repeats} interleaved repeats",
        ["task", "implementation", "ms", "GB/s of input"],
        [[r["task"], r["name"], round(r["ms"], 2), round(r["gb_per_s"], 2)] for r in rows],
    )
    compared = ratios({(r["task"], r["name"]): r["ms"] for r in rows})
    table("Ratios", ["what", "times as fast"], [[r["what"], f"{r['ratio']:.2f}×"] for r in compared])
    write_json(args.json, {"mib": args.mib, "cores": os.cpu_count(), "rows": rows, "ratios": compared})
    return 0


def measure(candidates: list[Candidate], repeats: int) -> list[float]:
    """Median seconds of each of `candidates` over `repeats`, interleaved, after one warm-up."""
    for c in candidates:
        c.call()
    times: list[list[float]] = [[] for _ in candidates]
    with progress("bench codecs", repeats * len(candidates)) as advance:
        for _ in range(repeats):
            for i, c in enumerate(candidates):
                start = time.perf_counter()
                c.call()
                times[i].append(time.perf_counter() - start)
                advance(f"{c.task}, {c.name}", 1)
    return [statistics.median(t) for t in times]


def ratios(ms: dict[tuple[str, str], float]) -> list[dict[str, Any]]:
    """How many times as fast as each alternative that is installed. `ms`: milliseconds by (task, implementation)."""
    pairs = [
        ("4-bit encode", "thinwire", "pi-quant"),
        ("4-bit decode", "thinwire", "pi-quant"),
        ("4-bit decode, in place", "thinwire", "pi-quant"),
        ("8-bit encode", "thinwire", "pi-quant"),
        ("8-bit encode", "thinwire", "bitsandbytes"),
        ("8-bit encode", "thinwire", "hivemind blockwise"),
        ("8-bit decode", "thinwire", "pi-quant"),
        ("4-bit encode", "thinwire", "torch eager"),
        ("4-bit encode", "thinwire, stochastic", "thinwire"),
        ("select 1 %", "thinwire, threshold", "torch.topk"),
        ("select 1 %", "thinwire, exact", "torch.topk"),
    ]
    return [
        {"what": f"{task}: {ours} beside {other}", "ratio": ms[task, other] / ms[task, ours]}
        for task, ours, other in pairs
        if (task, ours) in ms and (task, other) in ms
    ]


def _copies(x: Tensor) -> list[Candidate]:
    return [Candidate("memcpy", "copy", partial(torch.empty_like(x).copy_, x), x.nbytes)]


def _ours(x: Tensor) -> list[Candidate]:
    out = []
    for bits in (2, 3, 4, 8):  # 3: the preset max
        codec = Quantize(bits)
        variants = {
            "thinwire": codec,
            "thinwire, stochastic": Quantize(bits, rounding="stochastic"),
            "thinwire, least squares": Quantize(bits, scale="mse"),
        }
        out += [Candidate(name, f"{bits}-bit encode", partial(c.encode, x), x.nbytes) for name, c in variants.items()]
        decode = partial(codec.decode, codec.encode(x), x.shape, x.dtype)
        out.append(Candidate("thinwire", f"{bits}-bit decode", decode, x.nbytes))
    others: dict[str, Codec] = {"sign": ScaledSign(), "rotated 4-bit": Rotated(Quantize(4)), "top 1 %": TopK(0.01)}
    out += [Candidate("thinwire", f"{name} encode", partial(c.encode, x), x.nbytes) for name, c in others.items()]
    return out + _ours_in_place(x)


def _ours_in_place(x: Tensor) -> list[Candidate]:
    """Decoding onto a buffer that exists, and the fused delta against a bfloat16 mirror."""
    wire, mirror, fresh = Quantize(4).encode(x), x.bfloat16(), x.bfloat16()
    add = partial(kernel.dequantize, wire, x.numel(), 4, 128, x.dtype, onto=torch.zeros_like(x))
    out = [Candidate("thinwire", "4-bit decode, in place", add, x.nbytes)]
    for bits in (3, 4):
        codec = Quantize(bits)
        change = codec.encode_onto(x, x.bfloat16(), gate=True)
        send = partial(codec.encode_onto, x, mirror, gate=True, out=fresh)
        receive = partial(codec.decode_onto, change, mirror, x.dtype, gate=True, out=fresh)
        out.append(Candidate("thinwire", f"{bits}-bit delta encode", send, x.nbytes))
        out.append(Candidate("thinwire", f"{bits}-bit delta decode", receive, x.nbytes))
    return out


def _eager(x: Tensor) -> list[Candidate]:
    wire = kernel.quantize(x, 4, 128, impl="reference")

    def encode() -> Tensor:
        blocks = x.view(-1, 128)
        scale = blocks.abs().amax(dim=1, keepdim=True) / 7
        codes = (torch.round(blocks / scale) + 7).to(torch.uint8).view(-1, 2)
        return codes[:, 0] | (codes[:, 1] << 4)

    def decode() -> Tensor:
        packed = wire[: x.numel() // 2]
        codes = torch.stack((packed & 15, packed >> 4), dim=1).to(torch.float32) - 7
        return (codes.view(-1, 128) * 0.1).view(-1)

    return [
        Candidate("torch eager", "4-bit encode", encode, x.nbytes),
        Candidate("torch eager", "4-bit decode", decode, x.nbytes),
    ]


def _piquant(x: Tensor) -> list[Candidate]:
    """pi-quant with as many threads as torch has, through its pointers: the public call's quantised dtypes are
    deprecated in torch. The allocation that the public call makes is made here too."""
    try:
        piquant = importlib.import_module("piquant")
    except ImportError:
        return []
    context, f32, n = piquant.Context(torch.get_num_threads()), piquant.DataType.F32, x.numel()

    def encode(bits: int, kind: Any) -> tuple[Tensor, float, int]:
        wire = torch.empty(n * bits // 8, dtype=torch.uint8)
        scale, zero = context.compute_quant_params_ptr_float32(x.data_ptr(), kind, n)
        context.quantize_ptr(x.data_ptr(), f32, wire.data_ptr(), kind, n, scale, zero, piquant.RoundMode.NEAREST)
        return wire, scale, zero

    def decode(message: tuple[Tensor, float, int], kind: Any, onto: Tensor | None = None) -> Tensor:
        wire, scale, zero = message
        out = torch.empty(n) if onto is None else onto
        how = piquant.ReduceOp.SET if onto is None else piquant.ReduceOp.ADD
        context.dequantize_ptr(wire.data_ptr(), kind, out.data_ptr(), f32, n, scale, zero, how)
        return out

    rows = []
    for bits, kind in ((4, piquant.DataType.UINT4), (8, piquant.DataType.UINT8)):
        message = encode(bits, kind)
        rows.append(Candidate("pi-quant", f"{bits}-bit encode", partial(encode, bits, kind), x.nbytes))
        rows.append(Candidate("pi-quant", f"{bits}-bit decode", partial(decode, message, kind), x.nbytes))
    add = partial(decode, encode(4, piquant.DataType.UINT4), piquant.DataType.UINT4, torch.zeros(n))
    return [*rows, Candidate("pi-quant", "4-bit decode, in place", add, x.nbytes)]


def _hivemind(x: Tensor) -> list[Candidate]:
    """hivemind's blockwise codec: bitsandbytes plus serialisation. Encoding only: hivemind 1.1.12 fails to decode with
    NumPy 2.4. Measured where hivemind is installed; it is no dependency of ours."""
    try:
        hivemind = importlib.import_module("hivemind.compression")
    except ImportError:
        return []
    codec, info = hivemind.BlockwiseQuantization(), hivemind.CompressionInfo.from_tensor(x)
    return [Candidate("hivemind blockwise", "8-bit encode", partial(codec.compress, x, info), x.nbytes)]


def _bitsandbytes(x: Tensor) -> list[Candidate]:
    """Blockwise int8, the quantiser people know."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it reports optional GPU parts that are absent
    try:
        functional = importlib.import_module("bitsandbytes.functional")
    except ImportError:
        return []
    packed, state = functional.quantize_blockwise(x)
    return [
        Candidate("bitsandbytes", "8-bit encode", lambda: functional.quantize_blockwise(x), x.nbytes),
        Candidate("bitsandbytes", "8-bit decode", lambda: functional.dequantize_blockwise(packed, state), x.nbytes),
    ]


def _selection(x: Tensor) -> list[Candidate]:
    k = x.numel() // 100
    threshold = select.kth_magnitude(x, k)
    return [
        Candidate("thinwire, threshold", "select 1 %", lambda: select.select(x, threshold, k), x.nbytes),
        Candidate("thinwire, exact", "select 1 %", lambda: select.top(x, k), x.nbytes),
        Candidate("torch.topk", "select 1 %", lambda: torch.topk(x.abs(), k), x.nbytes),
    ]
