"""The Numba kernels give the same bits as the plain-torch reference, for every dtype, size and mode."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from inputs import DISTRIBUTIONS, tensor

from thinwire.kernels import bits, checksum, delta, hadamard, indices, quantize, random, scales, select, sign, ternary
from thinwire.kernels.cpu import quantize as cpu_quantize
from thinwire.kernels.levels import two_means
from thinwire.kernels.tiles import top_rows

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
sizes = st.one_of(st.sampled_from([0, 1, 7, 8, 127, 128, 129, 8192, 8200]), st.integers(0, 3000))
floats = st.builds(lambda k, n, d, s: tensor(k, (n,), d, s), st.sampled_from(DISTRIBUTIONS), sizes,
                   st.sampled_from(DTYPES), st.integers(0, 999))  # fmt: skip
MODES = ({}, {"stochastic": True}, {"mse": True}, {"full": True})
modes = st.sampled_from(MODES)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bitwise equality (NaN equals NaN of the same bits)."""
    as_int = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return a.dtype == b.dtype and torch.equal(a.view(as_int[a.element_size()]), b.view(as_int[b.element_size()]))


@given(floats, st.integers(2, 8), st.sampled_from([8, 64, 128, 256]), modes, st.integers(0, 2**60))
def test_quantize(x, b, block, mode, seed):
    wire = quantize.quantize(x, b, block, seed=seed, impl="reference", **mode)
    assert wire.numel() == quantize.quantized_bytes(x.numel(), b, block, x.dtype)
    assert same(wire, quantize.quantize(x, b, block, seed=seed, impl="cpu", **mode))
    outs = [quantize.dequantize(wire, x.numel(), b, block, x.dtype, impl=i) for i in ("reference", "cpu")]
    assert same(*outs)
    both = ("reference", "cpu")
    sums = [quantize.dequantize(wire, x.numel(), b, block, x.dtype, onto=x.clone(), impl=i) for i in both]
    assert same(*sums)


@given(floats, st.sampled_from(DTYPES), st.integers(2, 8), modes, st.booleans(), st.floats(0.0, 2.0))
def test_delta(x, mirror_dtype, b, mode, gate, drift):
    h = (x.float() + drift * tensor("gaussian", tuple(x.shape), torch.float32, 5)).to(mirror_dtype)
    wires, mirrors, received = [], [], []
    for impl in ("reference", "cpu"):
        sent, got = torch.empty_like(h), h.clone()
        wires.append(delta.encode_delta(x, h, sent, b, 128, gate=gate, seed=3, impl=impl, **mode))
        received.append(delta.decode_delta(wires[-1], got, got, b, 128, x.dtype, gate=gate, impl=impl))
        mirrors += [sent, got]
    assert wires[0].numel() == delta.delta_bytes(x.numel(), b, 128, x.dtype, gate)
    assert same(*wires) and same(*received)
    assert all(same(mirrors[0], other) for other in mirrors[1:])


def test_kernels_agree_on_nan_and_at_the_limit():
    """Blocks with NaN or Inf, and blocks at the dtype's largest value, in every mode."""
    for dtype in DTYPES:
        x = tensor("gaussian", (640,), dtype, 4)
        x[5], x[130], x[256:384] = torch.nan, torch.inf, torch.finfo(dtype).max
        x[384:512] = -torch.finfo(dtype).max / 3
        h = tensor("gaussian", (640,), dtype, 5)
        for b in (2, 4, 8):
            for mode in MODES:
                wires = [quantize.quantize(x, b, 128, impl=i, **mode) for i in ("reference", "cpu")]
                assert same(*wires)
                y = quantize.dequantize(wires[0], 640, b, 128, dtype)
                assert y[256:].isfinite().all()
                for gate in (False, True):
                    outs = [torch.empty_like(h) for _ in range(2)]
                    wires = [delta.encode_delta(x, h, o, b, 128, gate=gate, impl=i, **mode)
                             for o, i in zip(outs, ("reference", "cpu"))]  # fmt: skip
                    assert same(*wires) and same(outs[0][256:], outs[1][256:])
        found = [select.select(x, 1.0, 640, i) for i in ("reference", "cpu")]
        assert torch.equal(found[0][0], found[1][0]) and 5 not in found[0][0] and 130 in found[0][0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_nonfinite_blocks_are_marked(value, impl):
    x = torch.randn(400)
    x[200] = value
    for mode in MODES:
        wire = quantize.quantize(x, 4, 128, impl=impl, **mode)
        assert not quantize.is_finite(wire, 400, 4, 4, x.dtype)
        y = quantize.dequantize(wire, 400, 4, 128, x.dtype, impl=impl)
        assert y[128:256].isnan().all() and y[:128].isfinite().all() and y[256:].isfinite().all()


@given(st.floats(2.0**-149, 3.4028234663852886e38, width=32), st.sampled_from([1.0, 7.0, 127.0]))
@example(2.0**-149, 127.0)
@example(3.4028234663852886e38, 1.0)
@example(3.4028234663852886e38, 7.0)
def test_scale_has_no_floor_and_never_overflows(absmax, qmax):
    """absmax/qmax ≤ s ≤ (1 + 2⁻⁶)·absmax/qmax, down to the smallest denormal; qmax·s is always a float32."""
    fmax = torch.finfo(torch.float32).max
    s = float(scales.decode_scale(scales.encode_scale(torch.tensor([absmax]), qmax, fmax)))
    assert torch.tensor(s * qmax, dtype=torch.float32).isfinite()
    wanted = absmax / qmax
    assert s <= wanted * (1 + 2.0**-6) + 2.0**-149
    assert s >= wanted * (1 - 2.0**-23) - 2.0**-149 or s * qmax * (1 + 2.0**-6) > fmax


@given(sizes, st.integers(1, 8), st.integers(0, 99))
def test_bits(n, b, seed):
    codes = torch.randint(0, 2**b, (n,), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    wire = bits.pack(codes, b, "reference")
    assert wire.numel() == bits.packed_bytes(n, b) and same(wire, bits.pack(codes, b, "cpu"))
    assert all(same(bits.unpack(wire, n, b, impl), codes) for impl in ("reference", "cpu"))


@given(sizes, st.integers(0, 99))
def test_ternary(n, seed):
    codes = torch.randint(0, 3, (n,), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    wire = ternary.pack_trits(codes, "reference")
    assert wire.numel() == ternary.trit_bytes(n) and same(wire, ternary.pack_trits(codes, "cpu"))
    assert all(same(ternary.unpack_trits(wire, n, impl), codes) for impl in ("reference", "cpu"))


@given(floats, st.sampled_from([8, 128]))
def test_sign(x, block):
    wire = sign.encode_sign(x, block, "reference")
    assert wire.numel() == sign.sign_bytes(x.numel(), block, x.dtype) and same(wire, sign.encode_sign(x, block, "cpu"))
    assert same(*(sign.decode_sign(wire, x.numel(), block, x.dtype, impl) for impl in ("reference", "cpu")))


@given(floats, st.sampled_from([8, 128, 256]), st.integers(0, 2**60))
def test_hadamard_is_an_isometry(x, block, seed):
    turned = hadamard.rotate(x, block, seed, impl="reference")
    assert same(turned, hadamard.rotate(x, block, seed, impl="cpu"))
    assert torch.allclose(turned.double().norm(), x.double().norm(), rtol=1e-5)
    back = [hadamard.rotate(turned, block, seed, inverse=True, impl=impl) for impl in ("reference", "cpu")]
    assert same(*back)
    assert torch.allclose(back[0], x.float(), rtol=1e-4, atol=1e-5 * float(x.float().abs().max()) if x.numel() else 0)


@given(floats.filter(lambda x: x.numel() > 0), st.integers(1, 4), st.floats(0, 1))
def test_top_rows(x, rows, share):
    """As many of every row, the largest, ties by index."""
    x = torch.stack([x.roll(i) for i in range(rows)])
    k = max(1, round(share * x.shape[1]))
    index = top_rows(x, k, "reference")
    assert torch.equal(index, top_rows(x, k, "cpu"))
    for row, chosen in zip(x, index):
        assert torch.equal(select.top(row, k, "reference")[0], chosen)


@given(floats.filter(lambda x: x.numel() > 0), st.sampled_from([8, 24, 512]))
def test_two_means(x, block):
    """No other cut of a block's sorted magnitudes in two has less squared error than the means that were found."""
    low, high = two_means(x, block, "reference")
    assert all(same(*pair) for pair in zip((low, high), two_means(x, block, "cpu")))
    for part, one, two in zip(x.double().abs().split(block), low.double(), high.double()):
        found = torch.minimum((part - one).square(), (part - two).square()).sum()
        order = part.sort().values
        cuts = [(order[:i], order[i:]) for i in range(1, part.numel())] or [(order, order)]
        least = min(float((a - a.mean()).square().sum() + (b - b.mean()).square().sum()) for a, b in cuts)
        assert float(found) <= least * (1 + 1e-6) + 1e-12 * float(part.square().sum())


@given(floats.filter(lambda x: x.numel() > 0), st.floats(0, 1))
def test_select(x, share):
    k = max(1, round(share * x.numel()))
    assert torch.equal(select.histogram(x, "reference"), select.histogram(x, "cpu"))
    kth = [select.kth_magnitude(x, k, impl) for impl in ("reference", "cpu")]
    assert kth[0] == kth[1]
    tops = [select.top(x, k, impl) for impl in ("reference", "cpu")]
    assert torch.equal(tops[0][0], tops[1][0]) and same(tops[0][1], tops[1][1]) and tops[0][0].numel() == k
    assert torch.equal(tops[0][1].float().abs().sort().values, x.float().abs().sort().values[-k:])
    for threshold in (kth[0], 0.7, 0.1, float(kth[0]) * 1.01):
        found = [select.select(x, threshold, k + 5, impl) for impl in ("reference", "cpu")]
        assert torch.equal(found[0][0], found[1][0]) and same(found[0][1], found[1][1])
    sums = [select.scatter_add(x.clone(), *tops[0], impl) for impl in ("reference", "cpu")]
    assert same(*sums)


def test_threshold_from_histogram_keeps_at_least_k():
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(1))
    threshold = select.threshold_from(select.histogram(x), 1000)
    count = int((x.abs() >= threshold).sum())
    assert 1000 <= count <= 1300  # eight bins an octave


@given(st.integers(1, 5000), st.floats(0, 1), st.integers(0, 99))
def test_indices(n, share, seed):
    k = round(share * n)
    index = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:k].sort().values
    wire = indices.encode_indices(index, n, "reference")
    assert wire.numel() == indices.index_bytes(n, k) and same(wire, indices.encode_indices(index, n, "cpu"))
    assert all(torch.equal(indices.decode_indices(wire, n, k, impl), index) for impl in ("reference", "cpu"))


def test_index_cost_at_one_percent():
    assert indices.index_bytes(10**7, 10**5) * 8 / 10**5 == pytest.approx(8.56, abs=0.01)


@given(st.integers(2, 400), st.data())
def test_damaged_indices_are_refused_or_valid(n, data):
    k = data.draw(st.integers(1, n - 1))
    size = indices.index_bytes(n, k)
    wire = torch.tensor(data.draw(st.lists(st.integers(0, 255), min_size=size, max_size=size)), dtype=torch.uint8)
    results = []
    for impl in ("reference", "cpu"):
        try:
            index = indices.decode_indices(wire, n, k, impl)
            assert index.numel() == k and int(index.max()) < n and bool((index[1:] > index[:-1]).all())
            results.append(index.tolist())
        except ValueError:
            results.append(None)
    assert results[0] == results[1]


@given(st.integers(0, 5000), st.integers(0, 99), st.integers(0, 7))
def test_checksum(n, seed, offset):
    data = torch.randint(0, 256, (n + offset,), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    data = data[offset:]
    value = checksum.checksum(data, "reference")
    assert value == checksum.checksum(data, "cpu") and 0 <= value < checksum.PRIME
    if n:
        damaged = data.clone()
        damaged[seed % n] ^= 1 << (seed % 8)
        assert checksum.checksum(damaged) != value
        assert checksum.checksum(data[:-1]) != value


@given(st.integers(0, 5), st.integers(0, 70_000), st.integers(0, 99))
def test_checksums_of_rows(rows, n, seed):
    data = torch.randint(0, 256, (rows, n), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    each = [int(checksum.checksum(row, "reference")) for row in data]
    assert checksum.checksums(data).tolist() == each == checksum.checksums(data, "reference").tolist()


def test_checksum_finds_every_flipped_bit():
    data = torch.randint(0, 256, (67,), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    good = int(checksum.checksum(data))
    for bit in range(67 * 8):
        data[bit // 8] ^= 1 << (bit % 8)
        assert int(checksum.checksum(data)) != good
        data[bit // 8] ^= 1 << (bit % 8)


@given(st.integers(1, 400), st.data(), st.lists(st.integers(0, 2**62), min_size=1, max_size=4))
def test_random_rows_and_samples(n, data, seeds):
    k, like = data.draw(st.integers(1, n)), torch.empty(0)
    drawn = random.sample_rows(n, k, seeds, like)
    assert torch.equal(drawn, random.sample_rows(n, k, seeds, like, "reference"))
    assert all(row.unique().numel() == k and int(row.max()) < n for row in drawn)
    assert torch.equal(random.uniform_rows(n, seeds, like), random.uniform_rows(n, seeds, like, "reference"))


@pytest.mark.parametrize(("n", "k"), [(5, 2), (80, 24), (1000, 10)])
def test_samples_are_uniform_singly_and_in_pairs(n, k):
    """Inclusion probabilities k/n, and k(k−1)/(n(n−1)) for the pairs (0, j): RandK's ω needs the first."""
    draws = 20_000
    seeds = torch.arange(draws)
    hit = torch.zeros(draws, n).scatter_(1, random.sample_rows(n, k, seeds, torch.empty(0)), 1.0)
    p = k / n
    assert (hit.mean(0) - p).abs().max() < 5 * (p * (1 - p) / draws) ** 0.5
    pair = p * (k - 1) / (n - 1)
    assert ((hit * hit[:, :1]).mean(0)[1:] - pair).abs().max() < 5.5 * (pair / draws) ** 0.5


def test_uniforms_have_the_moments_of_independent_streams():
    u = random.uniform_rows(50_000, [0, 1, 2, 1 << 32], torch.empty(0)).double() - 0.5
    assert u.mean(1).abs().max() < 5 * (1 / 12 / 50_000) ** 0.5
    assert (u.square().mean(1) - 1 / 12).abs().max() < 0.002
    correlation = (u @ u.T) / 50_000 * 12
    assert (correlation - torch.eye(4)).abs().max() < 0.025
    assert ((u[:, 1:] * u[:, :-1]).mean(1) * 12).abs().max() < 0.025


def test_kernels_run_from_many_threads_at_once():
    """A communication thread and autograd call kernels together: the thread layer must allow it."""
    x = tensor("gaussian", (300_000,), torch.float32, 0)
    expected = quantize.quantize(x, 4, 128, impl="reference")
    with ThreadPoolExecutor(4) as pool:
        wires = list(pool.map(lambda _: quantize.quantize(x, 4, 128), range(40)))
    assert all(torch.equal(wire, expected) for wire in wires)


def test_serial_and_parallel_versions_are_kept_apart():
    """Numba's cache goes by name: under one name the parallel version would be served the serial code."""
    for kernel in (cpu_quantize._quantize_nearest, cpu_quantize._dequantize):
        assert kernel.many.targetoptions["parallel"] and not kernel.one.targetoptions.get("parallel")
        assert kernel.many._cache._impl.filename_base != kernel.one._cache._impl.filename_base


def test_a_child_forked_late_still_works():
    """OpenMP would end a child of a process whose threads it started: there the serial version runs."""
    code = """
import os, torch
from thinwire.kernels import quantize as kernel
x = torch.ones(200_000)  # made here: torch's own parallel loops hang in such a child
wire = kernel.quantize(x, 4, 128)
pid = os.fork()
if pid == 0:
    os._exit(7 if (kernel.quantize(x, 4, 128).numpy() == wire.numpy()).all() else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 7


def test_encoding_allocates_little_beyond_its_output():
    """Peak memory while encoding 256 MB: the 34 MB message and O(blocks), not another copy of the input."""
    code = """
import resource, torch
from thinwire.codecs import Quantize
codec, x = Quantize(4), torch.ones(64_000_000)
codec.encode(x[:200_000])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
wire = codec.encode(x)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 - wire.numel())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) < 24e6


def test_compiled_kernels_find_another_folder(monkeypatch, tmp_path):
    """A read-only install: the cache goes to the user's folder, then to a temporary one."""
    from thinwire.kernels.cpu import compile as compiling

    first = compiling._cache_directory()
    real = tempfile.TemporaryFile
    refused = str(Path(first).parent)

    def picky(dir):
        if str(dir).startswith(refused):
            raise PermissionError("read-only")
        return real(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", picky)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert compiling._cache_directory().startswith(str(tmp_path / ".cache" / "thinwire"))


@pytest.mark.huge
def test_more_than_two_billion_values():
    """64-bit index arithmetic: 2³¹ + 1000 bfloat16 values (4.3 GB), the last block checked against a small run."""
    n = 2**31 + 1000
    x = torch.zeros(n, dtype=torch.bfloat16)
    tail = tensor("gaussian", (1128,), torch.bfloat16, 1)
    x[-tail.numel() :] = tail  # n is 1000 past a block's start, so these are the last whole block and the rest
    wire = quantize.quantize(x, 2, 128)
    y = quantize.dequantize(wire, n, 2, 128, x.dtype)
    small = quantize.dequantize(quantize.quantize(tail, 2, 128), tail.numel(), 2, 128, tail.dtype)
    assert same(y[-tail.numel() :], small) and not y[: -tail.numel()].any()
    index, values = select.top(x, 100)
    assert int(index.min()) >= 2**31 - 200 and torch.equal(x[index], values)
    coded = indices.encode_indices(index, n)
    assert torch.equal(indices.decode_indices(coded, n, 100), index)
