"""Section `kernels` of gpu.py: every Triton kernel timed beside a copy, torch eager and torch.compile.

Rates are the bytes that must move (inputs read once, outputs written once) over the median time; "of copy" is that
rate over a device-to-device copy in the same run. Eager and compiled are the plain-torch reference, or the torch
function that does the same. Inputs are 1 GiB: smaller ones measure the launch as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from gpu_checks import BF16, BLOCK, F32, MSE, NEAREST, STOCHASTIC
from torch import Tensor

from thinwire.kernels import bits, checksum, delta, hadamard, indices, quantize, select, sign, ternary

SIZE = 1 << 30  # bytes of input
GOALS = {  # share of the copy's rate
    "quantize 4 bits nearest": 0.95, "quantize 8 bits nearest": 0.95, "dequantize 4 bits": 0.9,
    "dequantize 8 bits": 0.9, "encode delta 4 bits nearest": 0.85, "select 1 %, padded": 0.6,
}  # fmt: skip
SETUP = "gpu" if torch.cuda.is_available() else "reference"  # makes the inputs
COMPILED = [name for name in GOALS if "select" not in name]  # torch.compile has no answer to sizes that data decide
LATER = (  # compiled too while there is time: it takes seconds each
    "decode delta 4 bits", "encode sign", "decode sign", "quantize 2 bits nearest", "dequantize 2 bits", "hadamard",
    "quantize 3 bits nearest", "dequantize 3 bits",
)  # fmt: skip


class Row(NamedTuple):
    name: str
    moved: int  # bytes that must move
    kernel: Callable
    eager: Callable


def both(op: Callable, *args, **kwargs) -> tuple[Callable, ...]:
    """The op by Triton and in torch eager. Memory to write to is given to the kernel only."""
    given = {key: kwargs.pop(key) for key in ("out", "wire", "y") if key in kwargs}
    return (lambda: op(*args, **kwargs, **given, impl="gpu")), (lambda: op(*args, **kwargs, impl="reference"))


def float_rows(x: Tensor) -> Iterator[Row]:
    n, size, k = x.numel(), x.element_size(), x.numel() // 100
    yield from code_rows(x)
    wire = sign.encode_sign(x, BLOCK, SETUP)
    yield Row("encode sign", n * size + wire.numel(), *both(sign.encode_sign, x, BLOCK))
    yield Row("decode sign", n * size + wire.numel(), *both(sign.decode_sign, wire, n, BLOCK, x.dtype))
    yield Row("hadamard", n * (size + 4), *both(hadamard.rotate, x, BLOCK, 1))
    yield Row("histogram", n * size, *both(select.histogram, x))
    index, values = select.top(x, k, SETUP)
    moved, limit = n * size + k * (8 + size), values.abs().min()
    yield Row("kth magnitude 1 %", n * size, both(select.kth_magnitude, x, k)[0], lambda: x.abs().topk(k))
    yield Row("top 1 %", moved, both(select.top, x, k)[0], lambda: x.abs().topk(k))
    room = torch.empty_like(index), torch.empty_like(values)
    yield Row("select 1 %, padded", moved, *both(select.select_into, x, limit, *room))
    yield Row("select 1 %", moved, *both(select.select, x, limit, k))
    yield Row("scatter add 1 %", k * (8 + 3 * size), *both(select.scatter_add, x.clone(), index, values))
    wire = indices.encode_indices(index, n, SETUP)
    yield Row("encode indices 1 %", k * 8 + wire.numel(), *both(indices.encode_indices, index, n))
    yield Row("decode indices 1 %", k * 8 + wire.numel(), *both(indices.decode_indices, wire, n, k))


def code_rows(x: Tensor) -> Iterator[Row]:
    """Quantisation and the fused delta, into memory that is there."""
    n, size = x.numel(), x.element_size()
    for b, mode in ((4, NEAREST), (8, NEAREST), (2, NEAREST), (3, NEAREST), (4, STOCHASTIC), (4, MSE)):
        wire, back = quantize.quantize(x, b, BLOCK, impl=SETUP, **mode), torch.empty_like(x)
        moved, name = n * size + wire.numel(), f"{b} bits {next(iter(mode), 'nearest')}"
        yield Row(f"quantize {name}", moved, *both(quantize.quantize, x, b, BLOCK, out=wire, **mode))
        if not mode:
            args = (wire, n, b, BLOCK, x.dtype)
            yield Row(f"dequantize {b} bits", moved, *both(quantize.dequantize, *args, out=back))
    h, new = (x * 0.9).to(BF16), torch.empty_like(x, dtype=BF16)
    for mode in (NEAREST, STOCHASTIC):
        args = (x, h, new, 4, BLOCK)
        wire = delta.encode_delta(*args, gate=True, impl=SETUP, **mode)
        moved, name = n * (size + 4) + wire.numel(), f"encode delta 4 bits {next(iter(mode), 'nearest')}"
        yield Row(name, moved, *both(delta.encode_delta, *args, gate=True, wire=wire, **mode))
    args = (wire, h, new, 4, BLOCK, x.dtype)
    yield Row("decode delta 4 bits", moved, *both(delta.decode_delta, *args, gate=True, y=back))


def byte_rows(data: Tensor) -> Iterator[Row]:
    n = data.numel()
    for b in (1, 4):
        codes, wire = data >> (8 - b), data[: n * b // 8]
        yield Row(f"pack {b} bits", n + wire.numel(), *both(bits.pack, codes, b))
        yield Row(f"unpack {b} bits", n + wire.numel(), *both(bits.unpack, wire, n, b))
    trits = data % 3
    wire = ternary.pack_trits(trits, SETUP)
    yield Row("pack trits", n + wire.numel(), *both(ternary.pack_trits, trits))
    yield Row("unpack trits", n + wire.numel(), *both(ternary.unpack_trits, wire, n))
    yield Row("checksum", n, *both(checksum.checksum, data))


def rows(device: str, size: int = SIZE) -> Iterator[tuple[str, Row]]:
    """(dtype, row) of everything that is timed."""
    for dtype in (F32, BF16):
        x = torch.empty(size // dtype.itemsize, device=device).normal_().to(dtype)
        for row in float_rows(x):
            yield str(dtype)[6:], row
    for row in byte_rows(torch.randint(0, 256, (size // 4,), dtype=torch.uint8, device=device)):
        yield "uint8", row


def median(call: Callable, warmup: int = 5, rep: int = 50) -> float:
    """Milliseconds; the cache is flushed before each call."""
    from triton.testing import do_bench

    return do_bench(call, warmup=warmup, rep=rep, return_mode="median")


def once(call: Callable) -> float:
    """Milliseconds of the second call: for torch, whose calls take hundreds of them."""
    call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def time_all(device: str, match: str = "", seconds: float = 30.0) -> dict:
    """All rows whose name holds `match`; `seconds` for compiling LATER, in each dtype."""
    spent: dict[str, float] = {}
    data = torch.randint(0, 256, (SIZE,), dtype=torch.uint8, device=device)
    copy = 2 * SIZE / median(data.clone) / 1e6
    print(f"device-to-device copy: {copy:.0f} GB/s")
    print(f"{'kernel':30}{'dtype':>9}{'ms':>8}{'GB/s':>7}{'of copy':>9}{'goal':>6}{'eager ms':>10}{'compiled':>10}")
    table = []
    for dtype, row in rows(device):
        if match not in row.name:
            continue
        ms = median(row.kernel)
        line = {"kernel": row.name, "dtype": dtype, "ms": ms, "GB/s": row.moved / ms / 1e6}
        line["of_copy"], line["goal"] = line["GB/s"] / copy, GOALS.get(row.name)
        line["eager_ms"], line["compiled_ms"] = once(row.eager), None
        if row.name in COMPILED or (row.name in LATER and spent.get(dtype, 0.0) < seconds):
            began = time.monotonic()
            torch._dynamo.reset()  # else the eighth compilation of a lambda falls back to eager
            line["compiled_ms"] = once(torch.compile(row.eager))
            if row.name in LATER:
                spent[dtype] = spent.get(dtype, 0.0) + time.monotonic() - began
        table.append(line)
        goal = f"{line['goal']:.0%}" if line["goal"] else ""
        compiled = f"{line['compiled_ms']:.2f}" if line["compiled_ms"] else ""
        speed = f"{ms:8.3f}{line['GB/s']:7.0f}{line['of_copy']:9.1%}{goal:>6}"
        print(f"{row.name:30}{dtype:>9}{speed}{line['eager_ms']:10.2f}{compiled:>10}", flush=True)
        torch.cuda.empty_cache()
    return {"copy GB/s": copy, "rows": table}
