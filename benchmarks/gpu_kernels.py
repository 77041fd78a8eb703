"""The Triton kernels on a card: every one checked bit for bit against the reference, then timed.

    python3 benchmarks/gpu_kernels.py [--json PATH] [--only check|time]

Needs torch, triton and numpy only. Rates are the bytes that must move (inputs read once, outputs written
once) over the median time; "of copy" is that rate over a device-to-device copy in the same run. Exit status 1
if any kernel differs from the reference.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu_checks import BF16, BLOCK, F32, MSE, NEAREST, STOCHASTIC, check, check_huge

from thinwire.kernels import bits, checksum, delta, hadamard, indices, quantize, select, sign, ternary


def both(op: Callable, *args, **kwargs) -> tuple[Callable, ...]:
    """The op by Triton and in torch eager."""
    return tuple(lambda impl=impl: op(*args, **kwargs, impl=impl) for impl in ("gpu", "reference"))


def float_timings(x: Tensor) -> Iterator[tuple]:
    """(name, bytes that must move, kernel, the same in torch eager)."""
    n, size, k = x.numel(), x.element_size(), x.numel() // 100
    h, y = (x * 0.9).to(BF16), torch.empty_like(x, dtype=BF16)

    for b, mode in ((4, NEAREST), (4, STOCHASTIC), (4, MSE), (2, NEAREST), (3, NEAREST), (8, NEAREST)):
        wire = quantize.quantize(x, b, BLOCK, impl="gpu", **mode)
        name = f"{b} bits {next(iter(mode), 'nearest')}"
        yield f"quantize {name}", n * size + wire.numel(), *both(quantize.quantize, x, b, BLOCK, **mode)
        if not mode:
            args = (wire, n, b, BLOCK, x.dtype)
            yield f"dequantize {b} bits", n * size + wire.numel(), *both(quantize.dequantize, *args)
    for mode in (NEAREST, STOCHASTIC):
        args = (x, h, y, 4, BLOCK)
        wire = delta.encode_delta(*args, gate=True, impl="gpu", **mode)
        moved = n * (size + 4) + wire.numel()
        name = f"encode delta 4 bits {next(iter(mode), 'nearest')}"
        yield name, moved, *both(delta.encode_delta, *args, gate=True, **mode)
    yield "decode delta 4 bits", moved, *both(delta.decode_delta, wire, h, y, 4, BLOCK, x.dtype, gate=True)
    wire = sign.encode_sign(x, BLOCK, "gpu")
    yield "encode sign", n * size + wire.numel(), *both(sign.encode_sign, x, BLOCK)
    yield "decode sign", n * size + wire.numel(), *both(sign.decode_sign, wire, n, BLOCK, x.dtype)
    yield "hadamard", n * (size + 4), *both(hadamard.rotate, x, BLOCK, 1)
    yield "histogram", n * size, *both(select.histogram, x)
    index, values = select.top(x, k, "gpu")
    moved, limit = n * size + k * (8 + size), float(values.abs().min())
    yield "kth magnitude 1 %", n * size, both(select.kth_magnitude, x, k)[0], lambda: x.abs().topk(k)
    yield "top 1 %", moved, both(select.top, x, k)[0], lambda: x.abs().topk(k)
    yield "select 1 %", moved, *both(select.select, x, limit, k)
    yield "scatter add 1 %", k * (8 + 3 * size), *both(select.scatter_add, x, index, values)
    wire = indices.encode_indices(index, n, "gpu")
    yield "encode indices 1 %", k * 8 + wire.numel(), *both(indices.encode_indices, index, n)
    yield "decode indices 1 %", k * 8 + wire.numel(), *both(indices.decode_indices, wire, n, k)


def byte_timings(data: Tensor) -> Iterator[tuple]:
    n = data.numel()
    for b in (1, 4):
        codes, wire = data >> (8 - b), data[: n * b // 8]
        yield f"pack {b} bits", n + wire.numel(), *both(bits.pack, codes, b)
        yield f"unpack {b} bits", n + wire.numel(), *both(bits.unpack, wire, n, b)
    trits = data % 3
    wire = ternary.pack_trits(trits, "gpu")
    yield "pack trits", n + wire.numel(), *both(ternary.pack_trits, trits)
    yield "unpack trits", n + wire.numel(), *both(ternary.unpack_trits, wire, n)
    yield "checksum", n, *both(checksum.checksum, data)


def time_all(device: str, size: int = 1 << 28) -> list[dict]:
    """Inputs of 256 MiB: four times the L2 cache of an H200, which is flushed between calls besides."""
    from triton.testing import do_bench

    data = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    copy = 2 * size / do_bench(lambda: data.clone(), return_mode="median") / 1e6
    print(f"device-to-device copy: {copy:.0f} GB/s")
    print(f"{'kernel':32}{'dtype':>10}{'ms':>9}{'GB/s':>8}{'of copy':>9}{'eager ms':>10}{'faster':>8}")
    rows = []
    for dtype in (F32, BF16, torch.uint8):
        x = data if dtype == torch.uint8 else torch.randn(size // dtype.itemsize, device=device).to(dtype)
        for name, moved, kernel, eager in byte_timings(x) if dtype == torch.uint8 else float_timings(x):
            ms = do_bench(kernel, rep=50, return_mode="median")
            row = {"kernel": name, "dtype": str(dtype)[6:], "ms": ms, "GB/s": moved / ms / 1e6}
            row["of_copy"] = row["GB/s"] / copy
            row["eager_ms"] = do_bench(eager, warmup=1, rep=20, return_mode="median")
            rows.append(row)
            line = f"{name:32}{row['dtype']:>10}{ms:9.3f}{row['GB/s']:8.0f}{row['of_copy']:9.0%}"
            print(f"{line}{row['eager_ms']:10.2f}{row['eager_ms'] / ms:8.1f}", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--only", choices=("check", "time"), help="one half of it")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device", file=sys.stderr)
        return 2
    import triton

    start = time.time()
    report = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    print(" · ".join(report.values()))
    report["differ"] = [] if options.only == "time" else check("cuda") + check_huge("cuda")
    torch.cuda.empty_cache()
    report["rows"] = [] if options.only == "check" else time_all("cuda")
    report["seconds"] = round(time.time() - start)
    print(f"{report['seconds']} s")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if report["differ"] else 0


if __name__ == "__main__":
    sys.exit(main())
