"""Bit-for-bit checks of the Triton kernels on a card, section `check` of gpu.py.

The reference runs on the CPU: on a card, torch divides by a number by multiplying with its reciprocal, which
is not the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from thinwire.codecs import frame
from thinwire.kernels import bits, checksum, delta, hadamard, indices, quantize, select, sign, ternary
from thinwire.kernels import random as rng

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
BLOCK = 128
NEAREST, STOCHASTIC, MSE = {}, {"stochastic": True, "seed": 99}, {"mse": True}
SIZES = (0, 1, 4096, 300_007)
HUGE = 2**31 + 1000  # values: 4.3 GB of bfloat16, positions beyond 32 bits signed
Case = tuple[str, Callable[[Callable[[Tensor], Tensor], str], object]]


def flat(result: object) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [t for part in result for t in flat(part)]


def mismatches(a: object, b: object) -> int:
    """Elements of the results that differ in a bit; any NaN equals any other."""
    wrong = 0
    for x, y in zip(flat(a), flat(b)):
        x, y = x.cpu(), y.cpu()
        if x.shape != y.shape or x.dtype != y.dtype:
            return max(x.numel(), y.numel(), 1)
        as_int = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
        wrong += int(((x.view(as_int) != y.view(as_int)) & ~(x.isnan() & y.isnan())).sum())
    return wrong


def inputs(n: int, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Values of every magnitude, denormals, ties and a block that is not finite."""
    g = torch.Generator().manual_seed(n)
    x = torch.randn(n, generator=g)
    yield "normal", x.to(dtype)
    yield (
        "wide",
        (x * torch.exp2(torch.randint(-40, 40, (n,), generator=g) * (0.2 if dtype == F16 else 1))).to(dtype),
    )
    yield "denormal", (x * (1e-6 if dtype == F16 else 1e-40)).to(dtype)
    yield "sparse", (x * (torch.rand(n, generator=g) < 0.03)).to(dtype)
    if n:
        yield "constant", torch.full((n,), -1.7).to(dtype)
        broken = x.to(dtype)
        broken[n // 2] = float("inf")
        yield "inf", broken


def quantize_case(x: Tensor, b: int, mode: dict) -> Case:
    def run(to, impl):
        wire = quantize.quantize(to(x), b, BLOCK, impl=impl, **mode)
        return wire, quantize.dequantize(wire, x.numel(), b, BLOCK, x.dtype, impl=impl)

    return f"quantize {b} bits {next(iter(mode), 'nearest')}", run


def delta_case(x: Tensor, mirror: torch.dtype, b: int, mode: dict, gate: bool) -> Case:
    def run(to, impl):
        sent, got = to((x.float() * 0.9).to(mirror)), to((x.float() * 0.9).to(mirror))
        wire = delta.encode_delta(to(x), sent, sent, b, BLOCK, gate=gate, impl=impl, **mode)
        return wire, sent, got, delta.decode_delta(wire, got, got, b, BLOCK, x.dtype, gate=gate, impl=impl)

    return f"delta {b} bits {next(iter(mode), 'nearest')} {str(mirror)[6:]} mirror", run


def float_cases(x: Tensor) -> Iterator[Case]:
    """The variants of the float kernels; not every combination, since each takes a second to compile."""
    n, k = x.numel(), max(1, x.numel() // 100)
    for b in range(2, 9) if x.dtype == F32 else (4,):
        yield quantize_case(x, b, NEAREST)
    if x.dtype != F16:
        yield quantize_case(x, 4, STOCHASTIC)
        yield quantize_case(x, 3, MSE)
        yield delta_case(x, BF16, 4, NEAREST, True)
    if x.dtype == BF16:
        yield delta_case(x, BF16, 8, STOCHASTIC, False)
        yield delta_case(x, BF16, 4, MSE, True)
    yield (
        "sign",
        lambda to, i: (w := sign.encode_sign(to(x), BLOCK, i), sign.decode_sign(w, n, BLOCK, x.dtype, i)),
    )
    yield "hadamard", lambda to, impl: hadamard.rotate(to(x), BLOCK, 7, False, impl)
    yield "histogram", lambda to, impl: select.histogram(to(x), impl)
    if n and x.isfinite().all():
        yield "top", lambda to, impl: select.top(to(x), k, impl)
        yield "kth magnitude", lambda to, impl: select.kth_magnitude(to(x), k, impl)
        yield "select", lambda to, impl: select.select(to(x), 0.5, 2 * k, impl)
        yield "select into", lambda to, impl: into(to(x), 0.5, 2 * k, impl)
        yield "select few into", lambda to, impl: into(to(x), 2.5, 2 * k, impl)
        place = torch.arange(k) * 3 % n
        yield "scatter add", lambda to, impl: select.scatter_add(to(x), to(place), to(x[:k]), impl)


def into(x: Tensor, threshold: float, cap: int, impl: str) -> tuple[Tensor, ...]:
    index, values = torch.full((cap,), 7, device=x.device), x.new_full((cap,), 7)
    return select.select_into(x, threshold, index, values, impl), index, values


def byte_cases(n: int) -> Iterator[Case]:
    g = torch.Generator().manual_seed(n)
    data = torch.randint(0, 256, (n,), generator=g).to(torch.uint8)
    for b in (1, 2, 3, 4, 8):
        codes = data >> (8 - b)
        yield (
            f"pack {b} bits",
            lambda to, i, c=codes, b=b: (w := bits.pack(to(c), b, i), bits.unpack(w, n, b, i)),
        )
    trits = data % 3
    yield "ternary", lambda to, i: (w := ternary.pack_trits(to(trits), i), ternary.unpack_trits(w, n, i))
    yield "checksum", lambda to, impl: [checksum.checksum(to(data)[k:], impl) for k in (0, 1)]
    if n >= frame.BYTES:
        header, finite = frame.Header(8, n, 5, frame.key_hash(n)), torch.tensor(n % 2 == 0)
        yield "frame", lambda to, i: (f := frame.seal(header, to(data), to(finite), i), frame.inspect(f, header, i))
    for k in sorted({0, n // 100, n // 2, n}):
        index = torch.randperm(n, generator=g)[:k].sort().values
        yield f"indices {k}", lambda to, i, x=index, k=k: (
            w := indices.encode_indices(to(x), n, i), indices.decode_indices(w, n, k, i)
        )  # fmt: skip


def cases(sizes: tuple[int, ...]) -> Iterator[tuple[str, Case]]:
    for n in sizes:
        for case in byte_cases(n):
            yield f"{n} bytes", case
        for dtype in (F32, BF16, F16):
            for kind, x in inputs(n, dtype):
                for case in float_cases(x):
                    yield f"{n} {str(dtype)[6:]} {kind}", case


def report(where: str, failures: list[str], count: int) -> list[str]:
    print(*("MISMATCH " + line for line in failures), sep="\n", end="\n" if failures else "")
    print(f"{where}: {count} comparisons with the reference, {len(failures)} differ", flush=True)
    return failures


def check(device: str, sizes: tuple[int, ...] = SIZES) -> list[str]:
    """Every case by the CPU's reference and on the card; a line for each that differs."""
    failures, count = [], 0
    for where, (name, run) in cases(sizes):
        count += 1
        try:
            want = run(lambda x: x.clone(), "reference")
            if wrong := mismatches(want, run(lambda x: x.to(device, copy=True), "gpu")):
                failures.append(f"{name}, {where}: {wrong} elements differ")
        except Exception as error:  # a kernel that does not compile must not hide the others
            failures.append(f"{name}, {where}: {type(error).__name__}: {str(error)[-300:]}")
    return report("every kernel", failures, count)


def check_huge(device: str, n: int = HUGE) -> list[str]:
    """More than 2³¹ values: the end of the tensor against the reference, the whole by counts on the card."""
    x = torch.empty(n, dtype=BF16, device=device).normal_(generator=torch.Generator(device).manual_seed(1))
    results = {**huge_codes(x), **huge_selection(x), "checksum": huge_checksum(x.view(torch.uint8))}
    wrong = {name: mismatches(*pair) for name, pair in results.items()}
    failures = [f"{name}: {count} elements differ" for name, count in wrong.items() if count]
    return report(f"{n} values", failures, len(results))


def huge_codes(x: Tensor) -> dict[str, tuple]:
    n, lo = x.numel(), (x.numel() - 100_000) // BLOCK * BLOCK
    tail, y = x[lo:].cpu(), torch.zeros_like(x)
    blocks = quantize.as_blocks(tail.float(), BLOCK)
    scale, _ = quantize.choose_scales(blocks, 4, False, BF16)
    noise = (rng.hash32(torch.arange(lo, lo + blocks.numel()), 5) >> 8).float() * 2.0**-24
    near, chance = (
        (quantize.round_codes(blocks, scale, 4, None, u) * scale[:, None]).reshape(-1)[: n - lo].to(BF16)
        for u in (None, noise)
    )
    delta.encode_delta(x, y, y, 4, BLOCK, gate=True, impl="gpu")
    wire = quantize.quantize(x, 4, BLOCK, stochastic=True, seed=5, impl="gpu")
    return {
        "delta": (near, y[lo:]),
        "quantize": (chance, quantize.dequantize(wire, n, 4, BLOCK, BF16, impl="gpu")[lo:]),
    }


def huge_selection(x: Tensor, k: int = 1_000_000) -> dict[str, tuple]:
    def count(test: Callable[[Tensor], Tensor], end: int) -> int:
        return sum(int(test(part.abs()).sum()) for part in x[:end].split(1 << 28))

    counts = sum(select.histogram(part, "reference") for part in x.split(1 << 28))
    index, values = select.top(x, k, "gpu")
    limit = values.abs().min()
    last_tie = int(index[values.abs() == limit].max())
    taken = count(lambda a: a > limit, x.numel()) + count(lambda a: a == limit, last_tie + 1)
    coded = indices.encode_indices(index, x.numel(), "gpu")
    return {
        "histogram": (counts, select.histogram(x, "gpu")),
        "top": (torch.tensor(k), torch.tensor(taken)),
        "top values": (x[index], values),
        "indices": (indices.encode_indices(index.cpu(), x.numel(), "reference"), coded),
        "indices back": (index, indices.decode_indices(coded, x.numel(), k, "gpu")),
    }


def huge_checksum(data: Tensor, step: int = 1 << 26) -> tuple[Tensor, Tensor]:
    words, total, p = data[: data.numel() // 4 * 4].view(torch.int32), data.numel(), checksum.PRIME
    for at in range(0, words.numel(), step):
        word = words[at : at + step].long() & rng.MASK32
        weight = 1 + rng.hash32(torch.arange(at, at + word.numel(), device=data.device), checksum.SEED) % (p - 1)
        total += int((((((word >> 16) * weight) % p << 16) + (word & 0xFFFF) * weight) % p).sum())
    return torch.tensor(total % p), checksum.checksum(data[: words.numel() * 4], "gpu")
