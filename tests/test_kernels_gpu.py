"""The Triton kernels give the same bits as the plain-torch reference: on the card, or by Triton's interpreter.

The interpreter runs the same kernel source with numpy. What may differ on a card (the compiler's arithmetic, memory
races), benchmarks/gpu_kernels.py checks there.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from inputs import DISTRIBUTIONS, tensor

from thinwire.kernels import bits, checksum, delta, hadamard, indices, quantize, scales, select, sign, ternary

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPS = ("bits", "checksum", "delta", "hadamard", "indices", "quantize", "select", "sign", "ternary")


@contextlib.contextmanager
def interpreter():
    """TRITON_INTERPRET for as long as this file imports or runs kernels; on a card: nothing."""
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            patch.setenv("TRITON_INTERPRET", "1")
        yield


if DEVICE == "cpu" and "triton" in sys.modules:
    pytest.skip("triton was imported before the interpreter could be chosen", allow_module_level=True)
with interpreter():
    pytest.importorskip("triton")
    for op in OPS:
        importlib.import_module(f"thinwire.kernels.gpu.{op}")


@pytest.fixture(autouse=True, scope="module")
def interpreted():
    with interpreter():
        yield


pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow):RuntimeWarning")
BOTH = ("reference", "gpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MODES = ({}, {"stochastic": True}, {"mse": True})
sizes = st.one_of(st.sampled_from([0, 1, 7, 8, 127, 128, 129, 4096, 4100]), st.integers(0, 1500))
floats = st.builds(
    lambda kind, n, dtype, seed: tensor(kind, (n,), dtype, seed),
    st.sampled_from(DISTRIBUTIONS), sizes, st.sampled_from(DTYPES), st.integers(0, 999),
)  # fmt: skip


def few(examples):
    """The interpreter takes tens of milliseconds a kernel: fewer examples there."""
    return settings(max_examples=examples if DEVICE == "cpu" else 4 * examples)


def same(a, b):
    """Bitwise equality, but any NaN equals any other: cards and processors make different ones."""
    as_int = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    equal = a.view(as_int[a.element_size()]) == b.view(as_int[b.element_size()])
    return bool((equal | (a.isnan() & b.isnan())).all())


def noise(n, high, seed):
    return torch.randint(0, high, (n,), generator=torch.Generator().manual_seed(seed)).to(torch.uint8).to(DEVICE)


@few(40)
@given(floats, st.integers(2, 8), st.sampled_from([8, 96, 128, 1024]), st.sampled_from(MODES), st.integers(0, 2**60))
@example(torch.ones(8, device=DEVICE), 3, 8, {}, 0)  # one full block of three bytes: the padding byte stands alone
def test_quantize(x, b, block, mode, seed):
    wires = [quantize.quantize(x, b, block, seed=seed, impl=impl, **mode) for impl in BOTH]
    assert same(*wires)
    assert same(*(quantize.dequantize(wires[0], x.numel(), b, block, x.dtype, impl=impl) for impl in BOTH))
    sums = [quantize.dequantize(wires[0], x.numel(), b, block, x.dtype, onto=x.clone(), impl=i) for i in BOTH]
    assert same(*sums)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("b", range(2, 9))
def test_quantize_every_width(b, dtype):
    """A whole tile and a bit more, every mode: both paths of the kernel. The message at an odd address too."""
    x = tensor("student", (4096 + 77,), dtype, b).to(DEVICE)
    for mode in MODES:
        wires = [quantize.quantize(x, b, 128, seed=b, impl=impl, **mode) for impl in BOTH]
        assert same(*wires), mode
        moved = torch.empty(wires[0].numel() + 1, dtype=torch.uint8, device=DEVICE)[1:].copy_(wires[0])
        values = [quantize.dequantize(w, x.numel(), b, 128, dtype, impl=i) for w, i in zip((wires[0], moved), BOTH)]
        assert same(*values), mode


@few(25)
@given(floats, st.sampled_from(DTYPES), st.integers(2, 8), st.sampled_from(MODES), st.booleans(), st.floats(0, 2))
def test_delta(x, mirror_dtype, b, mode, gate, drift):
    h = (x.float() + drift * tensor("gaussian", tuple(x.shape), torch.float32, 5).to(DEVICE)).to(mirror_dtype)
    wires, sent, got, received = [], [], [], []
    for impl in BOTH:
        sent.append(h.clone())
        got.append(h.clone())
        wires.append(delta.encode_delta(x, sent[-1], sent[-1], b, 128, gate=gate, seed=3, impl=impl, **mode))
        received.append(delta.decode_delta(wires[0], got[-1], got[-1], b, 128, x.dtype, gate=gate, impl=impl))
    assert same(*wires) and same(*sent) and same(*got) and same(*received) and same(sent[1], got[1])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("mode", MODES)
def test_nonfinite_blocks(value, mode):
    x = tensor("gaussian", (400,), torch.float32, 1).to(DEVICE)
    x[200] = value
    wires = [quantize.quantize(x, 4, 128, impl=impl, **mode) for impl in BOTH]
    assert same(*wires) and same(*(quantize.dequantize(wires[0], 400, 4, 128, x.dtype, impl=i) for i in BOTH))
    assert same(*(sign.encode_sign(x, 128, impl) for impl in BOTH))
    mirrors = [torch.zeros(400, device=DEVICE) for _ in BOTH]
    deltas = [delta.encode_delta(x, m, m, 4, 128, gate=True, impl=i, **mode) for m, i in zip(mirrors, BOTH)]
    assert same(*deltas) and same(*mirrors)


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_scales(dtype):
    """Every exponent of the dtype, its largest value and its smallest denormal, one a block."""
    info = torch.finfo(dtype)
    steps = torch.arange(-149, 128, dtype=torch.float64)
    tops = torch.cat((2.0**steps * 1.37, torch.tensor([info.max, info.max / 2, -info.max], dtype=torch.float64)))
    x = (tops[:, None] * torch.linspace(-1, 1, 8, dtype=torch.float64)).reshape(-1).clamp(-info.max, info.max)
    x = x.to(dtype).to(DEVICE)
    for b, mode in ((2, MODES[0]), (8, MODES[0]), (8, MODES[1]), (3, MODES[2])):
        wires = [quantize.quantize(x, b, 8, impl=impl, **mode) for impl in BOTH]
        assert same(*wires) and same(*(quantize.dequantize(wires[0], x.numel(), b, 8, dtype, impl=i) for i in BOTH))
    wires = [sign.encode_sign(x, 8, impl) for impl in BOTH]
    assert same(*wires) and same(*(sign.decode_sign(wires[0], x.numel(), 8, dtype, impl) for impl in BOTH))


def test_every_scale_code():
    """All 65,536 codes, also those that no encoder writes, through dequantize with blocks of eight ones."""
    codes = torch.arange(1 << 16, dtype=torch.int32)
    for part in codes.chunk(4):
        wire = torch.cat((torch.full((part.numel() * 2,), 170, dtype=torch.uint8), scales.to_bytes(part))).to(DEVICE)
        n = part.numel() * 8
        assert same(*(quantize.dequantize(wire, n, 2, 8, torch.float32, impl=impl) for impl in BOTH))


@few(25)
@given(sizes, st.integers(1, 8), st.integers(0, 99), st.integers(0, 3))
def test_bits(n, b, seed, offset):
    codes = noise(n, 2**b, seed)
    wires = [bits.pack(codes, b, impl) for impl in BOTH]
    assert same(*wires)
    moved = torch.empty(wires[0].numel() + offset, dtype=torch.uint8, device=DEVICE)[offset:].copy_(wires[0])
    assert same(bits.unpack(moved, n, b, "gpu"), codes)


@few(15)
@given(sizes, st.integers(0, 99))
@example(20481, 3)
def test_ternary(n, seed):
    codes = noise(n, 3, seed)
    wires = [ternary.pack_trits(codes, impl) for impl in BOTH]
    assert same(*wires) and same(ternary.unpack_trits(wires[0], n, "gpu"), codes)


def test_ternary_every_byte():
    wire = torch.arange(243, dtype=torch.uint8, device=DEVICE)
    assert same(*(ternary.unpack_trits(wire, 5 * 243, impl) for impl in BOTH))


@few(20)
@given(floats, st.sampled_from([8, 96, 128, 2048]))
def test_sign(x, block):
    wires = [sign.encode_sign(x, block, impl) for impl in BOTH]
    assert same(*wires) and same(*(sign.decode_sign(wires[0], x.numel(), block, x.dtype, i) for i in BOTH))


@few(20)
@given(floats, st.sampled_from([1, 8, 128, 256]), st.integers(0, 2**60))
def test_hadamard(x, block, seed):
    turned = [hadamard.rotate(x, block, seed, impl=impl) for impl in BOTH]
    assert same(*turned)
    assert same(*(hadamard.rotate(turned[0], block, seed, inverse=True, impl=impl) for impl in BOTH))


@few(25)
@given(floats.filter(lambda x: x.numel() > 0), st.floats(0, 1))
def test_select(x, share):
    k = max(1, round(share * x.numel()))
    assert torch.equal(*(select.histogram(x, impl) for impl in BOTH))
    kth = [select.kth_magnitude(x, k, impl) for impl in BOTH]
    assert same(*kth)
    tops = [select.top(x, k, impl) for impl in BOTH]
    assert torch.equal(tops[0][0], tops[1][0]) and same(tops[0][1], tops[1][1])
    for cap in (k // 2, k + 5):
        found = [select.select(x, kth[0], cap, impl) for impl in BOTH]
        assert torch.equal(found[0][0], found[1][0]) and same(found[0][1], found[1][1])
    assert same(*(select.scatter_add(x.clone(), *tops[0], impl) for impl in BOTH))


def test_select_thresholds_are_rounded_to_the_dtype_and_nan_is_left_out():
    x = torch.tensor([0.7, 0.1, 0.3, float("nan"), float("-inf"), 0.0, -0.0], device=DEVICE)
    for dtype in DTYPES:
        for threshold in (0.7, 0.3, 0.1, 0.0, -1.0):
            found = [select.select(x.to(dtype), threshold, 10, impl)[0] for impl in BOTH]
            assert torch.equal(*found), (dtype, threshold)


def test_scatter_add_rounds_like_the_reference_and_skips_what_lies_outside():
    values = tensor("gaussian", (50,), torch.float32, 1).to(DEVICE)
    index = torch.arange(0, 100, 2, device=DEVICE)
    start = tensor("gaussian", (100,), torch.bfloat16, 2).to(DEVICE)
    assert same(*(select.scatter_add(start.clone(), index, values, impl) for impl in BOTH))
    assert same(select.scatter_add(start.clone(), index + 1000, values, "gpu"), start)


@few(25)
@given(st.integers(1, 5000), st.floats(0, 1), st.integers(0, 99))
@example(2**20, 2.0**-19, 0)  # 19 low bits: two pieces of the encoder
@example(2**45, 3 / 2**45, 0)
def test_indices(n, share, seed):
    k = round(share * n)
    generator = torch.Generator().manual_seed(seed)
    index = torch.randperm(n, generator=generator)[:k] if n < 2**21 else torch.randint(n, (k,), generator=generator)
    index = index.sort().values.to(DEVICE)
    if indices.index_bytes(n, k) < 1 << 16:
        wires = [indices.encode_indices(index, n, impl) for impl in BOTH]
        assert same(*wires)
        assert torch.equal(indices.decode_indices(wires[0], n, k, "gpu"), index)


@few(20)
@given(st.integers(2, 200), st.data())
def test_damaged_indices_are_refused_alike(n, data):
    k = data.draw(st.integers(1, n - 1))
    size = indices.index_bytes(n, k)
    wire = torch.tensor(data.draw(st.lists(st.integers(0, 255), min_size=size, max_size=size)), dtype=torch.uint8)
    results = []
    for impl in BOTH:
        try:
            results.append(indices.decode_indices(wire.to(DEVICE), n, k, impl).tolist())
        except ValueError:
            results.append(None)
    assert results[0] == results[1]


@few(15)
@given(st.sampled_from([0, 1, 3, 4, 1000, 32768, 40001]), st.integers(0, 99), st.integers(0, 4))
def test_checksum(n, seed, offset):
    data = noise(n + offset, 256, seed)[offset:]
    assert checksum.checksum(data, "reference") == checksum.checksum(data, "gpu")


def test_positions_beyond_32_bits_hash_as_in_the_reference():
    """Kernels take positions of 64 bits; a tensor that long does not fit a test, the hash alone does."""
    from thinwire.kernels import random
    from thinwire.kernels.gpu.launch import launch, signed
    from thinwire.kernels.gpu.scalar import hash32

    triton, tl = importlib.import_module("triton"), importlib.import_module("triton.language")
    globals().update(tl=tl, hash32=hash32)

    def kernel(out, start, k0, k1):
        tl.store(out + tl.arange(0, 8), hash32(start.to(tl.int64) + tl.arange(0, 8), k0, k1).to(tl.int64))

    out = torch.empty(8, dtype=torch.int64, device=DEVICE)
    for start in (0, 2**31 - 4, 2**32 - 4, 2**40 + 5):
        launch(triton.jit(kernel), 1, out, start, *map(signed, random.split(12345)))
        assert torch.equal(out, random.hash32(start + torch.arange(8, device=DEVICE), 12345))


def test_cpu_tensors_without_the_interpreter_get_a_clear_error():
    code = (
        "import torch; from thinwire.kernels import bits\n"
        "try: bits.pack(torch.zeros(8, dtype=torch.uint8), 4, 'gpu')\n"
        "except ValueError as error: print(error)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert "needs CUDA tensors" in done.stdout, done.stderr
