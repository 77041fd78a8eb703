"""Ways to launch the kernels, timed beside a copy in one run, and what the host spends on public calls.

    python3 benchmarks/card/gpu_tune.py --out FOLDER [--budget SECONDS] [--parallel N] [--only NAME ...] [--quick]
    python3 benchmarks/card/gpu_tune.py --out FOLDER --table

First N processes compile every way and compare it with the plain-torch reference, bit for bit; then one process times
them, the library's own first. Each finished row is a line of FOLDER/tune.jsonl, written at once; rows that are there
are not made again. --table prints the best of each, and the host's part, from that file. --quick: the comparison only,
by Triton's interpreter (TRITON_INTERPRET=1 in the environment) on a CPU,
of a few ways.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from gpu_tune_ways import Way, is_few, ways
from torch import Tensor

from thinwire.codecs import frame
from thinwire.kernels import checksum, delta, indices, quantize, select, sign
from thinwire.kernels.gpu import delta as gpu_delta
from thinwire.kernels.gpu import quantize as gpu_quantize
from thinwire.kernels.gpu import sign as gpu_sign

BLOCK = 128
BF16 = torch.bfloat16
SIZE = 1 << 30  # bytes of the input that is timed
SMALL = 3 * 16384 + 1000  # values that are compared
MODES = {"nearest": {}, "stochastic": {"stochastic": True}, "mse": {"mse": True}}


@contextmanager
def patched(way: Way) -> Iterator[None]:
    kept = [(module, name, getattr(module, name)) for module, name, _ in way.patches]
    for module, name, value in way.patches:
        setattr(module, name, value)
    for module in (gpu_quantize, gpu_sign, gpu_delta):
        module._encode_plan.cache_clear()
    try:
        yield
    finally:
        for module, name, value in kept:
            setattr(module, name, value)


def operation(kernel: str, x: Tensor, impl: str) -> tuple[int, Callable[[], Any]]:
    """(bytes that must move, the call) for an input x."""
    n, size, k = x.numel(), x.element_size(), max(x.numel() // 100, 1)
    if kernel.startswith("quantize"):
        bits, mode = int(kernel.split()[1]), MODES[kernel.split()[-1]]
        wire = torch.empty(quantize.quantized_bytes(n, bits, BLOCK, x.dtype), dtype=torch.uint8, device=x.device)
        return n * size + wire.numel(), lambda: quantize.quantize(x, bits, BLOCK, **mode, seed=7, out=wire, impl=impl)
    if kernel == "encode sign":
        return n * size + sign.sign_bytes(n, BLOCK, x.dtype), lambda: sign.encode_sign(x, BLOCK, impl)
    if kernel.startswith("encode delta"):
        h, new = (x * 0.9).to(BF16), torch.empty_like(x, dtype=BF16)
        moved = n * (size + 4) + delta.delta_bytes(n, 3, BLOCK, x.dtype, True)
        return moved, lambda: (delta.encode_delta(x, h, new, 3, BLOCK, gate=True, impl=impl), new)
    if kernel == "checksum":
        return n, lambda: checksum.checksum(x, impl)
    if kernel == "inspect":
        held = frame.Header(0, 1, 2, 3)
        sealed = frame.seal(held, x.clone(), impl=impl)
        return n, lambda: torch.stack(frame.inspect(sealed, held, impl)[:2])
    if kernel == "histogram":
        return n * size, lambda: select.histogram(x, impl)
    if kernel.startswith("kth"):
        return n * size, lambda: select.kth_magnitude(x, k, impl)
    if kernel.startswith("top"):
        return n * size + k * (8 + size), lambda: select.top(x, k, impl)
    index = torch.arange(k, device=x.device) * (n // k) + torch.arange(k, device=x.device) % 7
    if kernel.startswith("scatter"):
        values, out = x[:k].clone(), x.clone()
        return k * (8 + 3 * size), lambda: select.scatter_add(out, index, values, impl)
    wire = indices.encode_indices(index, n, impl)
    return k * 8 + wire.numel(), lambda: indices.decode_flagged(wire, n, k, impl)[0]


def example(way: Way, size: int, device: str) -> Tensor:
    """Normal values, or bytes; size: in values. The same on every device."""
    generator = torch.Generator().manual_seed(size)
    if way.dtype == torch.uint8:
        return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).to(device)
    return torch.randn(size, generator=generator).to(way.dtype).to(device)


def parts(result: Any) -> list[Tensor]:
    return [x.cpu() for x in (result if isinstance(result, tuple) else (result,))]


def compare(way: Way, device: str) -> dict:
    """Does it give the reference's bits? Compiles it, too."""
    began, row = (
        time.monotonic(),
        {"section": "equal", "kernel": way.kernel, "how": way.how, "dtype": str(way.dtype)[6:]},
    )
    try:
        x = example(way, SMALL, "cpu")
        with patched(way):
            for _ in range(2):  # compiled; by its handle
                got = parts(operation(way.kernel, x.to(device), "gpu")[1]())
        expected = parts(operation(way.kernel, x, "reference")[1]())
        row["equal"] = all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    except Exception as error:
        row |= {
            "equal": False,
            "error": f"{type(error).__name__}: {error}"[:300],
            "trace": traceback.format_exc()[-600:],
        }
    return row | {"seconds": time.monotonic() - began}


def time_way(way: Way, x: Tensor) -> dict:
    """The median of single calls, milliseconds."""
    with patched(way):
        moved, call = operation(way.kernel, x, "gpu")
        took, replayed = median_ms(call), replay_ms(call)
        right = is_right(way.kernel, x, call()) if way.how == "own" else {}
    named = {"section": "time", "kernel": way.kernel, "how": way.how, "dtype": str(way.dtype)[6:]}
    return named | {"ms": took, "moved": moved} | replayed | right


def is_right(kernel: str, x: Tensor, result: Any) -> dict[str, bool]:
    """Of the whole input, what torch says on the card: of those kernels that work otherwise on small ones."""
    n, k = x.numel(), max(x.numel() // 100, 1)
    if kernel.startswith(("kth", "top")):
        largest = x.abs().topk(k).values
        if kernel.startswith("kth"):
            return {"right": bool(result == largest[-1])}
        index, values = result
        same = torch.equal(x[index], values) and torch.equal(values.abs().sort(descending=True).values, largest)
        return {"right": same and bool((index.diff() > 0).all())}
    if kernel.startswith("decode"):
        expected = torch.arange(k, device=x.device) * (n // k) + torch.arange(k, device=x.device) % 7
        return {"right": torch.equal(result, expected)}
    if kernel == "encode sign":
        codes = (x < 0).view(-1, 8).to(torch.uint8) << torch.arange(8, device=x.device, dtype=torch.uint8)
        return {"right": torch.equal(codes.sum(1, dtype=torch.uint8), result[: n // 8])}
    return {}


def replay_ms(call: Callable) -> dict[str, Any]:
    """Its kernels without the host's part, from a CUDA graph; or why it could not be captured."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError as error:
        return {"graph_error": str(error)[:200]}
    return {"graph_ms": median_ms(graph.replay)}


def median_ms(call: Callable, count: int = 11) -> float:
    for _ in range(3):
        call()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def host_rows() -> Iterator[dict]:
    """Microseconds of the host for a public call that nothing waits for, and for one that is waited for."""
    from gpu_tune_host import calls

    for name, size, call in calls():
        for _ in range(20):
            call()
        torch.cuda.synchronize()
        count = 200 if size < 1 << 26 else 60
        began = time.perf_counter()
        for _ in range(count):
            call()
        host = (time.perf_counter() - began) / count * 1e6
        torch.cuda.synchronize()
        waited = []
        for _ in range(20):
            began = time.perf_counter()
            call()
            torch.cuda.synchronize()
            waited.append((time.perf_counter() - began) * 1e6)
        yield {
            "section": "host", "call": name, "MiB": size >> 20, "host_us": host,
            "with_wait_us": statistics.median(waited), "events_us": 1e3 * median_ms(call),
        }  # fmt: skip


def _compare_one(number: int) -> dict:
    return compare(list(ways())[number], "cuda")


def compare_all(
    options: argparse.Namespace, write: Callable[[dict], None], left: list[int], compared: set, wrong: set, until: float
) -> None:
    """Ways by their number; `compared` and `wrong` get their names."""
    with multiprocessing.get_context("spawn").Pool(options.parallel) as pool:
        rows = pool.imap_unordered(_compare_one, left)
        for _ in left:
            try:
                row = rows.next(max(until - options.timing - time.monotonic(), 0.1))
            except multiprocessing.TimeoutError:  # what is not compiled by then is not timed
                break
            write(row)
            compared.add((row["kernel"], row["how"], row["dtype"]))
            if not row["equal"]:
                wrong.add((row["kernel"], row["how"], row["dtype"]))
        pool.terminate()
    print(f"compared {len(compared)} ways, {len(wrong)} differ", flush=True)


def measure(options: argparse.Namespace, write: Callable[[dict], None], done: set, until: float) -> None:
    every = [way for way in ways() if not options.only or any(text in way.kernel for text in options.only)]
    every = [way for way in every if not options.few or is_few(way)]
    every = [way for way in every if not options.own or way.how in ("own", "torch's")]
    names = {(way.kernel, way.how, str(way.dtype)[6:]) for way in every}
    keys = [(way.kernel, way.how, str(way.dtype)[6:]) for way in ways()]
    left = [i for i, key in enumerate(keys) if key in names and ("equal", *key) not in done]
    wrong, compared = set(), {key for key in keys if ("equal", *key) in done}  # done: without those that raised
    if not options.no_compare:
        compare_all(options, write, left, compared, wrong, until)
    if options.compare_only:
        return
    if ("host", "", "", "") not in done and not options.no_host:
        for row in host_rows():
            write(row)
    data = torch.randint(0, 256, (SIZE,), dtype=torch.uint8, device="cuda")
    there = torch.empty_like(data)
    copy = 2 * SIZE / median_ms(lambda: there.copy_(data)) / 1e6
    write({"section": "copy", "GB/s": copy})
    held: dict[torch.dtype, Tensor] = {torch.uint8: data[: SIZE // 4]}
    for way in every:
        key = (way.kernel, way.how, str(way.dtype)[6:])
        if ("time", *key) in done or key in wrong or key not in compared or time.monotonic() > until:
            continue
        if way.dtype not in held:
            held = {torch.uint8: held[torch.uint8]}
            held[way.dtype] = torch.empty(SIZE // way.dtype.itemsize, device="cuda").normal_().to(way.dtype)
        try:
            write(time_way(way, held[way.dtype]))
        except Exception as error:
            write(
                {"section": "time", "kernel": way.kernel, "how": way.how, "dtype": key[2], "error": repr(error)[:300]}
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=150.0)
    parser.add_argument("--timing", type=float, default=35.0, help="seconds of the budget left for timing")
    parser.add_argument("--parallel", type=int, default=14)
    parser.add_argument("--only", nargs="*", default=[], help="kernels whose name holds one of these")
    parser.add_argument("--few", action="store_true", help="the library's own way of each, and those still in question")
    parser.add_argument("--own", action="store_true", help="the library's own way of each, and torch's")
    parser.add_argument("--compare-only", action="store_true", help="compile and compare, time nothing")
    parser.add_argument("--no-compare", action="store_true", help="time what was compared before")
    parser.add_argument("--no-host", action="store_true", help="leave out what calls cost the host")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "tune.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if options.table:
        from gpu_tune_host import table

        print(table(rows))
        return 0
    done = {(r["section"], r.get("kernel", ""), r.get("how", ""), r.get("dtype", "")) for r in rows if "error" not in r}

    def write(row: dict) -> None:
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if not (row["section"] == "equal" and row["equal"]):
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)

    if options.quick:
        chosen = [w for w in ways() if (w.how == "own" or "tile 1024" in w.how) and "top" not in w.kernel]
        for way in chosen:
            row = compare(way, "cpu")
            print(way.kernel, way.how, row["dtype"], row["equal"], row.get("trace", ""), flush=True)
        return 0
    measure(options, write, done, time.monotonic() + options.budget)
    return 0


if __name__ == "__main__":
    sys.exit(main())
