"""The Triton kernels of selection and indices give the same bits as the plain-torch reference."""

from __future__ import annotations

import importlib

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from inputs import tensor
from kernels_gpu_support import DEVICE, DTYPES, both, few, floats, interpreted, same, shifted, some  # noqa: F401

from thinwire.kernels import delta, indices, levels, quantize, select, tiles

pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow):RuntimeWarning")


@few(12)
@given(floats.filter(lambda x: x.numel() > 0), st.floats(0, 1))
@example(torch.tensor([1.0, 1 + 2.0**-23] * 5), 0.3)  # two values whose last bit differs
def test_select(x, share):
    k = max(1, round(share * x.numel()))
    assert same(*both(lambda to, impl: select.histogram(to(x), impl)))
    kth = both(lambda to, impl: select.kth_magnitude(to(x), k, impl))
    assert same(*kth)
    tops = both(lambda to, impl: select.top(to(x), k, impl))
    assert all(same(*pair) for pair in zip(*tops))
    for cap in (k // 2, k + 5):
        found = both(lambda to, impl, cap=cap: select.select(to(x), float(kth[0]), cap, impl))
        assert all(same(*pair) for pair in zip(*found))
        padded = both(lambda to, impl, cap=cap: into(to(x), kth[0], cap, impl))
        assert all(same(*pair) for pair in zip(*padded))
    assert same(*both(lambda to, impl: select.scatter_add(to(x), to(tops[0][0]), to(tops[0][1]), impl)))


@pytest.mark.parametrize("kind", ["normal", "sorted", "ties", "nan"])
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_top_by_way_of_a_sample(monkeypatch, dtype, kind):
    """Where the sample's threshold lets enough pass, and where it does not: in sorted values it sees the smallest of
    each run."""
    gpu = importlib.import_module("thinwire.kernels.gpu.select")
    x = tensor("student", (3000,), dtype, 3)
    x = {"sorted": lambda: x.abs().sort().values, "ties": x.round, "nan": x.clone, "normal": x.clone}[kind]()
    if kind == "nan":
        x[[7, 900]] = torch.tensor([float("nan"), float("inf")], dtype=dtype)
    expected = [y.to("cpu") for y in gpu.top(x.to(DEVICE), 40)]
    monkeypatch.setattr(gpu, "LARGE", 1)
    monkeypatch.setattr(gpu, "EVERY", 4)
    monkeypatch.setattr(gpu, "RUN", 64)
    assert all(same(*pair) for pair in zip(expected, gpu.top(x.to(DEVICE), 40)))
    if kind != "nan":
        assert all(same(*pair) for pair in zip(expected, select.top(x, 40, "reference")))
        assert same(select.kth_magnitude(x, 40, "reference"), gpu.kth_magnitude(x.to(DEVICE), 40))


def test_small_tensors_load_what_large_ones_need(monkeypatch):
    gpu, launch = (importlib.import_module(f"thinwire.kernels.gpu.{name}") for name in ("select", "launch"))
    x = tensor("student", (700,), torch.float32, 5).to(DEVICE)
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(launch, "new_kernels", "expect")
    gpu.top(x, 9), gpu.kth_magnitude(x, 9)
    monkeypatch.setattr(launch, "new_kernels", "refuse")
    monkeypatch.setattr(gpu, "LARGE", 1)
    gpu.top(x, 9), gpu.kth_magnitude(x, 9)


@few(8)
@given(floats.filter(lambda x: x.numel() > 0), st.integers(1, 5), st.floats(0, 1))
def test_top_rows(x, rows, share):
    x = torch.stack([x.roll(i) for i in range(rows)])
    k = max(1, round(share * x.shape[1]))
    assert same(*both(lambda to, impl: tiles.top_rows(to(x), k, impl)))


@few(8)
@given(floats.filter(lambda x: x.numel() > 0), st.sampled_from([8, 24, 128]))
def test_two_means(x, block):
    assert all(same(*pair) for pair in zip(*both(lambda to, impl: levels.two_means(to(x), block, impl))))


def into(x, threshold, cap, impl):
    """select_into memory that holds something else."""
    index = torch.full((cap,), 7, dtype=torch.int64, device=x.device)
    values = torch.full((cap,), 7, dtype=x.dtype, device=x.device)
    return select.select_into(x, threshold, index, values, impl), index, values


def test_select_beyond_a_tile_and_a_group():
    """Entries in the first, a middle and the last tile, ties across them; counts of more than one group of tiles."""
    gpu = importlib.import_module("thinwire.kernels.gpu.select")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "TILE", 1024)
        patch.setattr(gpu, "GROUP", 2)
        patch.setattr(gpu, "SIZE", 256)
        x = tensor("student", (6 * 1024 + 5,), torch.float32, 3)
        x[::977] = 50.0
        for k in (3, 40):
            tops = both(lambda to, impl, k=k: select.top(to(x), k, impl))
            assert all(same(*pair) for pair in zip(*tops))
        assert all(same(*pair) for pair in zip(*both(lambda to, impl: into(to(x), 1.5, 2000, impl))))


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_select_where_some_segments_are_too_short(dtype):
    """Entries crowd in some tiles, so that their programs select anew; caps before, inside and after the crowd; NaN and
    infinity; memory that is not aligned."""
    gpu = importlib.import_module("thinwire.kernels.gpu.compact")
    x = tensor("gaussian", (9 * 1024 + 3,), dtype, 4) * 0.3
    x[3000:5000] += 2.0
    x[3500], x[4000], x[9 * 1024 + 2] = float("nan"), float("inf"), -5.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "TILES", 2)
        for cap in (5, 700, 4000):
            assert all(same(*pair) for pair in zip(*both(lambda to, impl, cap=cap: into(to(x), 1.0, cap, impl))))
        moved = into(shifted(x, 1), 1.0, 4000, "gpu")
        assert all(same(*pair) for pair in zip(into(x, 1.0, 4000, "reference"), moved))


@pytest.mark.parametrize("impl", ["reference", "gpu"])
def test_memory_given_is_used(impl):
    x, h = tensor("gaussian", (300,), torch.float32, 1).to(DEVICE), torch.zeros(300, device=DEVICE)
    wire = torch.empty(quantize.quantized_bytes(300, 4, 128, x.dtype), dtype=torch.uint8, device=DEVICE)
    back, again = torch.empty_like(x), torch.empty_like(wire)
    assert quantize.quantize(x, 4, 128, out=wire, impl=impl) is wire
    assert quantize.dequantize(wire, 300, 4, 128, x.dtype, out=back, impl=impl) is back
    assert delta.encode_delta(x, h, h.clone(), 4, 128, gate=False, wire=again, impl=impl) is again
    assert same(wire, again)
    assert delta.decode_delta(again, h, h, 4, 128, x.dtype, gate=False, y=back, impl=impl) is back


def test_misaligned_memory_is_refused():
    x = torch.ones(300, device=DEVICE)
    wire = torch.zeros(quantize.quantized_bytes(300, 4, 128, x.dtype), dtype=torch.uint8)
    with pytest.raises(ValueError, match="multiple of 4"):
        quantize.quantize(x, 4, 128, out=shifted(wire, 1), impl="gpu")


def test_select_thresholds_are_rounded_to_the_dtype_and_nan_is_left_out():
    x = torch.tensor([0.7, 0.1, 0.3, float("nan"), float("-inf"), 0.0, -0.0])
    for dtype in DTYPES:
        for threshold in (0.7, 0.3, 0.1, 0.0, -1.0):
            found = both(lambda to, impl, d=dtype, t=threshold: select.select(to(x.to(d)), t, 10, impl)[0])
            assert same(*found), (dtype, threshold)


def test_scatter_add_rounds_like_the_reference_and_skips_what_lies_outside():
    values, start = tensor("gaussian", (50,), torch.float32, 1), tensor("gaussian", (100,), torch.bfloat16, 2)
    index = torch.arange(0, 100, 2)
    assert same(*both(lambda to, impl: select.scatter_add(to(start), to(index), to(values), impl)))
    outside = (index + 1000).to(DEVICE)
    assert same(select.scatter_add(start.to(DEVICE, copy=True), outside, values.to(DEVICE), "gpu"), start)


@few(25)
@given(st.integers(1, 5000) if DEVICE == "cpu" else st.just(5000), st.floats(0, 1), st.integers(0, 99))
def test_indices(n, share, seed):
    k = round(share * n)
    index = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:k].sort().values
    check_indices(index, n)


@pytest.mark.parametrize("n", [2**20, 2**33, 2**44 + 7])
def test_far_apart_indices(n):
    """Up to 42 low bits an index: several pieces of the encoder, positions beyond 32 bits."""
    check_indices(torch.tensor([0, n // 3, n - 2, n - 1]), n)


def check_indices(index, n):
    wires = both(lambda to, impl: indices.encode_indices(to(index), n, impl))
    assert same(*wires)
    assert same(indices.decode_indices(wires[1], n, index.numel(), "gpu"), index)


@few(20)
@given(st.integers(2, 200), st.data())
def test_damaged_indices_are_refused_alike(n, data):
    k = data.draw(st.integers(1, n - 1))
    size = indices.index_bytes(n, k)
    wire = torch.tensor(list(data.draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8)

    def decoded(to, impl):
        try:
            return indices.decode_indices(to(wire), n, k, impl).tolist()
        except ValueError:
            return None

    reference, card = both(decoded)
    assert reference == card
    index, good = indices.decode_flagged(wire.to(DEVICE), n, k, "gpu")
    assert bool(good) == (reference is not None) and index.numel() == k and 0 <= index.min() <= index.max() < n


@few(20)
@given(st.lists(st.integers(-3, 40), min_size=1, max_size=30), st.integers(1, 40))
def test_indices_that_are_none_are_brought_inside(given_ones, n):
    index, good = indices.checked(torch.tensor(given_ones).to(DEVICE), n, "gpu")
    sane = all(0 <= i < n for i in given_ones) and given_ones == sorted(set(given_ones))
    assert bool(good) == sane and index.tolist() == [min(max(i, 0), n - 1) for i in given_ones]
