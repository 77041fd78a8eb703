"""The Triton kernels give the same bits as the plain-torch reference, on a card or by Triton's interpreter.

The interpreter runs the same source with numpy. What may differ on a card (the compiler's arithmetic, races),
benchmarks/card/gpu.py checks there. There each variant takes a second to compile: `some` picks a few.
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

from thinwire.codecs import frame
from thinwire.kernels import bits, checksum, delta, hadamard, indices, quantize, scales, select, sign, ternary
from thinwire.kernels import random as rng

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPS = ("bits", "checksum", "delta", "hadamard", "indices", "quantize", "seal", "select", "sign", "ternary")


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
    """The interpreter; and torch fills fresh memory with 255 or NaN, so that a byte not written is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    with interpreter():
        yield
    torch.use_deterministic_algorithms(False)


pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow):RuntimeWarning")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MODES = ({}, {"stochastic": True}, {"mse": True})


def some(every, few):
    """A strategy: every one of these by the interpreter, a few of them on a card."""
    return st.sampled_from(every if DEVICE == "cpu" else few)


sizes = st.one_of(st.sampled_from([0, 1, 7, 8, 127, 128, 129, 4096, 4100]), st.integers(0, 1500))
modes = st.sampled_from(MODES)
floats = st.builds(
    lambda kind, n, dtype, seed: tensor(kind, (n,), dtype, seed),
    st.sampled_from(DISTRIBUTIONS), sizes, some(DTYPES, DTYPES[:2]), st.integers(0, 999),
)  # fmt: skip


def few(examples):
    """The interpreter takes tens of milliseconds a kernel, a card a second for a variant that is new."""
    return settings(max_examples=examples, deadline=None)


def both(function):
    """[function(to, impl)] of the reference on the CPU and of Triton on the card; `to` brings a tensor there.

    Not of the reference on the card: torch divides by a number there by multiplying with its reciprocal.
    """
    return [function(lambda x: x.clone(), "reference"), function(lambda x: x.to(DEVICE, copy=True), "gpu")]


def same(a, b):
    """Bitwise equality, but any NaN equals any other: cards and processors make different ones."""
    as_int = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    a, b = a.cpu(), b.cpu()
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    equal = a.view(as_int[a.element_size()]) == b.view(as_int[b.element_size()])
    return bool((equal | (a.isnan() & b.isnan())).all())


def noise(n, high, seed):
    return torch.randint(0, high, (n,), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


def shifted(x, offset):
    """A copy of x that begins `offset` elements into its storage: messages need not be aligned."""
    return torch.empty(x.numel() + offset, dtype=x.dtype, device=DEVICE)[offset:].copy_(x)


@few(25)
@given(floats, some(range(2, 9), [3, 8]), some([8, 96, 128, 1024], [96, 128]), modes, st.integers(0, 2**60))
@example(torch.ones(4104), 3, 4104, {}, 0)  # a full tile of 1539 bytes: the padding byte is in the next one
def test_quantize(x, b, block, mode, seed):
    wires = both(lambda to, impl: quantize.quantize(to(x), b, block, seed=seed, impl=impl, **mode))
    assert same(*wires)
    args = (x.numel(), b, block, x.dtype)
    assert same(*both(lambda to, impl: quantize.dequantize(to(wires[0]), *args, impl=impl)))
    assert same(*both(lambda to, impl: quantize.dequantize(to(wires[0]), *args, onto=to(x), impl=impl)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("b", range(2, 9))
def test_quantize_every_width(b, dtype):
    """A whole tile and a bit more, every mode (of the 16-bit dtypes, and on a card, one): both paths of the kernel;
    the message at an odd address."""
    x = tensor("student", (4096 + 77,), dtype, b)
    every = DEVICE == "cpu" and dtype == torch.float32
    for mode in MODES if every else (MODES[(b + DTYPES.index(dtype)) % 3],):
        wires = both(lambda to, impl, mode=mode: quantize.quantize(to(x), b, 128, seed=b, impl=impl, **mode))
        assert same(*wires), mode
        values = quantize.dequantize(wires[0], x.numel(), b, 128, dtype, impl="reference")
        moved = quantize.dequantize(shifted(wires[0], 1), x.numel(), b, 128, dtype, impl="gpu")
        assert same(values, moved), mode


@few(15)
@given(floats, some(DTYPES, [torch.bfloat16]), some(range(2, 9), [4]), modes, st.booleans(), st.floats(0, 2))
def test_delta(x, mirror_dtype, b, mode, gate, drift):
    h = (x.float() + drift * tensor("gaussian", tuple(x.shape), torch.float32, 5)).to(mirror_dtype)

    def ends(to, impl):
        sent, got = to(h), to(h)  # updated in place
        wire = delta.encode_delta(to(x), sent, sent, b, 128, gate=gate, seed=3, impl=impl, **mode)
        return wire, sent, got, delta.decode_delta(wire, got, got, b, 128, x.dtype, gate=gate, impl=impl)

    reference, card = both(ends)
    assert all(same(*pair) for pair in zip(reference, card))
    assert same(card[1], card[2]), "the mirrors of sender and receiver differ"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("mode", MODES)
def test_nonfinite_blocks(value, mode):
    x, h = tensor("gaussian", (400,), torch.float32, 1), torch.zeros(400)
    x[200] = value
    wires = both(lambda to, impl: quantize.quantize(to(x), 4, 128, impl=impl, **mode))
    assert same(*wires)
    assert same(*both(lambda to, impl: quantize.dequantize(to(wires[0]), 400, 4, 128, x.dtype, impl=impl)))
    assert same(*both(lambda to, impl: sign.encode_sign(to(x), 128, impl)))
    mode = {"gate": True, **mode}
    assert same(*both(lambda to, impl: delta.encode_delta(to(x), to(h), to(h), 4, 128, impl=impl, **mode)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_scales(dtype):
    """Every exponent of the dtype, its largest value and its smallest denormal, one a block."""
    info = torch.finfo(dtype)
    steps = torch.arange(-149, 128, dtype=torch.float64)
    tops = torch.cat((2.0**steps * 1.37, steps.new_tensor([info.max, info.max / 2, -info.max])))
    x = (tops[:, None] * torch.linspace(-1, 1, 8, dtype=torch.float64)).reshape(-1).clamp(-info.max, info.max)
    x = x.to(dtype)
    for b, mode in ((2, MODES[0]), (8, MODES[0]), (8, MODES[1]), (3, MODES[2])):
        wires = both(lambda to, impl, b=b, mode=mode: quantize.quantize(to(x), b, 8, impl=impl, **mode))
        args = (x.numel(), b, 8, dtype)
        assert same(*wires)
        assert same(*both(lambda to, i, args=args, w=wires[0]: quantize.dequantize(to(w), *args, impl=i)))
    wires = both(lambda to, impl: sign.encode_sign(to(x), 8, impl))
    assert same(*wires)
    assert same(*both(lambda to, impl: sign.decode_sign(to(wires[0]), x.numel(), 8, dtype, impl)))


def test_every_scale_code():
    """All 65,536 codes, also those that no encoder writes, through dequantize with blocks of eight ones."""
    codes = torch.arange(1 << 16, dtype=torch.int32)
    wire = torch.cat((torch.full((2 << 16,), 170, dtype=torch.uint8), scales.to_bytes(codes)))
    args = (8 << 16, 2, 8, torch.float32)
    gpu = importlib.import_module("thinwire.kernels.gpu.quantize")
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":  # few large programs: the interpreter's time goes by programs
            tiling = gpu.tiling
            patch.setattr(gpu, "tiling", lambda block, width, **_: tiling(block, width, tile=1 << 16))
        assert same(*both(lambda to, impl: quantize.dequantize(to(wire), *args, impl=impl)))


@few(25)
@given(sizes, st.integers(1, 8), st.integers(0, 99), st.integers(0, 3))
def test_bits(n, b, seed, offset):
    codes = noise(n, 2**b, seed)
    wires = both(lambda to, impl: bits.pack(to(codes), b, impl))
    assert same(*wires) and same(bits.unpack(shifted(wires[0], offset), n, b, "gpu"), codes)


@few(15)
@given(sizes, st.integers(0, 99))
@example(20481, 3)
def test_ternary(n, seed):
    codes = noise(n, 3, seed)
    wires = both(lambda to, impl: ternary.pack_trits(to(codes), impl))
    assert same(*wires) and same(ternary.unpack_trits(wires[1], n, "gpu"), codes)
    every = torch.arange(243, dtype=torch.uint8)
    assert same(*both(lambda to, impl: ternary.unpack_trits(to(every), 5 * 243, impl)))


@few(20)
@given(floats, some([8, 96, 128, 2048], [96, 128]))
@example(torch.tensor([129 / 128, 131 / 128]).repeat_interleave(8), 8)  # means halfway between two scales
def test_sign(x, block):
    wires = both(lambda to, impl: sign.encode_sign(to(x), block, impl))
    assert same(*wires)
    assert same(*both(lambda to, impl: sign.decode_sign(to(wires[0]), x.numel(), block, x.dtype, impl)))


@few(20)
@given(floats, some([8, 64, 128, 256], [8, 128]), st.integers(0, 2**60))
def test_hadamard(x, block, seed):
    for inverse in (False, True):
        assert same(*both(lambda to, impl, way=inverse: hadamard.rotate(to(x), block, seed, way, impl)))


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


@few(15)
@given(st.sampled_from([0, 1, 3, 4, 1000, 32768, 40001]), st.integers(0, 99), st.integers(0, 4))
def test_checksum(n, seed, offset):
    data = noise(n, 256, seed)
    assert int(checksum.checksum(data, "reference")) == int(checksum.checksum(shifted(data, offset), "gpu"))
    rows = noise(3 * n, 256, seed + 1).view(3, n)
    assert same(*both(lambda to, impl: checksum.checksums(to(rows), impl)))


@few(15)
@given(st.sampled_from([16, 17, 18, 1000, 32768 + 16, 40001]), st.integers(0, 99), st.sampled_from([None, True, False]))
def test_frames_are_sealed_and_inspected_alike(n, seed, finite):
    """And a frame that is damaged, in any header field or in the body, is seen."""
    header = frame.Header(seed % 2, seed * 700, 2**32 + 5 - seed, frame.key_hash(seed))
    flag = None if finite is None else torch.tensor(finite)
    sent = noise(n, 256, seed)
    frames = both(lambda to, impl: frame.seal(header, to(sent), None if flag is None else to(flag), impl))
    assert same(*frames)
    for at in (None, *range(16), n - 1):
        got = frames[0].clone()
        if at is not None:
            got[at] ^= 1 << (seed + at) % 8
        said = both(lambda to, impl, got=got: torch.stack(frame.inspect(to(got), header, impl)[:2]))
        assert same(*said) and bool(said[0][0]) == (at is None), at
    assert bool(said[1][1]) == (finite is not False)
    other = frame.Header(header.kind, header.count + 1, header.step, header.key)
    assert not any(frame.inspect(got, other, impl)[0] for got, impl in zip(frames, ("reference", "gpu")))


def test_a_checksum_beyond_the_prime_is_refused():
    """The same residue, written as another number: a body is made whose checksum is 2."""
    header, sent = frame.Header(1, 2, 3, 4), noise(64, 256, 1)
    sent[16:20] = 0
    stored = int(frame.seal(header, sent, impl="reference")[12:16].view(torch.int32)) % 2**32
    word = (2 - stored) * pow(checksum.weight(4), -1, checksum.PRIME) % checksum.PRIME
    sent[16:20] = torch.tensor(list(word.to_bytes(4, "little")), dtype=torch.uint8)
    frame.seal(header, sent, impl="reference")
    assert sent[12:16].tolist() == [2, 0, 0, 0]
    for value, good in ((2, True), (2 + checksum.PRIME, False)):
        sent[12:16] = torch.tensor(list(value.to_bytes(4, "little")), dtype=torch.uint8)
        assert [bool(said) for said in both(lambda to, impl: frame.inspect(to(sent), header, impl)[0])] == [good] * 2


def test_positions_beyond_32_bits_hash_as_in_the_reference():
    triton, tl = importlib.import_module("triton"), importlib.import_module("triton.language")
    launch = importlib.import_module("thinwire.kernels.gpu.launch")
    globals().update(tl=tl, hash32=importlib.import_module("thinwire.kernels.gpu.scalar").hash32)

    def kernel(out, start, k0, k1):
        tl.store(out + tl.arange(0, 8), hash32(start.to(tl.int64) + tl.arange(0, 8), k0, k1).to(tl.int64))  # noqa: F821

    out = torch.empty(8, dtype=torch.int64, device=DEVICE)
    for start in (0, 2**31 - 4, 2**32 - 4, 2**40 + 5):
        launch.launch(triton.jit(kernel), 1, out, start, *map(launch.signed, rng.split(12345)))
        assert same(out, rng.hash32(start + torch.arange(8), 12345))


def test_arguments_that_triton_compiles_for_are_of_different_kinds():
    """As Triton's own key has it: what it tells apart must be told apart, or a kernel would be run on other inputs."""
    jit = importlib.import_module("triton.runtime.jit")
    kind = importlib.import_module("thinwire.kernels.gpu.launch").kind
    base = importlib.import_module("triton.backends.compiler").BaseBackend
    held = torch.zeros(64)
    tensors = [held, held[4:], held[1:], held[2:], held.bfloat16(), held.bfloat16()[1:], held.bool(), held.byte()]
    integers = [0, 1, 2, 15, 16, 32, -1, -16, 2**31 - 1, 2**31, -(2**31), 2**32, 2**62, 2**63, 2**63 + 16]
    groups = {}
    for x in (*tensors, *integers, 0.0, 1.0, True, False, None):
        groups.setdefault(kind(x), set()).add(jit.native_specialize_impl(base, x, False, True, True))
    assert all(len(found) == 1 for found in groups.values()), groups
    assert len(groups) > 12


class Traced:
    """Stands for a Triton kernel with two constants: notes what was compiled, and with what it was called again."""

    arg_names = ("x", "n", "WIDE", "TALL")

    def __init__(self):
        self.compiled, self.calls = 0, []

    def __getitem__(self, grid):
        def compile_(*args, **named):
            self.compiled += 1
            number = self.compiled
            return type(
                "Compiled", (), {"__getitem__": lambda _, at: lambda *a: self.calls.append((number, at, a[1:]))}
            )()

        return compile_


class Held:
    """A tensor on a card, as far as a launch looks."""

    def __init__(self, card):
        self.get_device = lambda: card


def test_a_handle_is_used_again_for_its_own_kind_only():
    """Every change of kernel, card, options, constants or arguments compiles; then each calls its own, constants in the
    kernel's order."""
    run, cards = importlib.import_module("thinwire.kernels.gpu.launch")._run, [Held(0), Held(1)]
    kernel, other = Traced(), Traced()
    usual, sizes = {"num_warps": 4, "maxnreg": None}, {"TALL": 8, "WIDE": 7}
    ways = [
        (kernel, 3, (cards[0], 5), sizes, usual), (kernel, 3, (cards[1], 5), sizes, usual),
        (kernel, 3, (cards[0], 16), sizes, usual), (kernel, 3, (cards[0], 5), {**sizes, "TALL": 9}, usual),
        (kernel, 3, (cards[0], 5), sizes, {**usual, "num_warps": 8}),
        (kernel, 3, (cards[0], 5), sizes, {**usual, "maxnreg": 32}), (other, 3, (cards[0], 5), sizes, usual),
    ]  # fmt: skip
    for _ in range(2):
        for way in ways:
            run(*way)
    assert (kernel.compiled, other.compiled) == (6, 1)
    expected = [(i + 1, (3, 1, 1), (a[1], c["WIDE"], c["TALL"])) for i, (_, _, a, c, _) in enumerate(ways[:6])]
    assert kernel.calls == expected and other.calls == [(1, (3, 1, 1), (5, 7, 8))]


def test_cpu_tensors_without_the_interpreter_get_a_clear_error():
    code = (
        "import torch; from thinwire.kernels import bits\n"
        "try: bits.pack(torch.zeros(8, dtype=torch.uint8), 4, 'gpu')\n"
        "except ValueError as error: print(error)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert "needs CUDA tensors" in done.stdout, done.stderr
