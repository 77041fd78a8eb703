"""The Triton kernels give the same bits as the plain-torch reference, on a card or by Triton's interpreter."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from inputs import tensor
from kernels_gpu_support import (  # noqa: F401
    DEVICE,
    DTYPES,
    MODES,
    both,
    few,
    floats,
    interpreted,
    modes,
    nearly_tied,
    noise,
    same,
    shifted,
    sizes,
    some,
)

from thinwire.codecs import frame
from thinwire.kernels import bits, checksum, delta, hadamard, quantize, scales, sign, ternary
from thinwire.kernels import random as rng

pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow):RuntimeWarning")


@few(25)
@given(floats, some(range(2, 9), [3, 8]), some([8, 96, 128, 1024], [96, 128]), modes, st.integers(0, 2**60))
@example(torch.ones(4104), 3, 4104, {}, 0)  # a full tile of 1539 bytes: the padding byte is in the next one
@example(nearly_tied(), 2, 2048, {"mse": True}, 0)
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
    for mode in MODES if every else (MODES[(b + DTYPES.index(dtype)) % len(MODES)],):
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
    for b, mode in ((2, MODES[0]), (8, MODES[0]), (8, MODES[1]), (3, MODES[2]), (2, MODES[3])):
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
    """As Triton's own key has it: what it tells apart must be told apart, or a kernel would be run on other inputs.
    Values of integers it does not: see test_precompile_gpu.py."""
    jit = importlib.import_module("triton.runtime.jit")
    kind = importlib.import_module("thinwire.kernels.gpu.launch").kind
    base = importlib.import_module("triton.backends.compiler").BaseBackend
    held = torch.zeros(64)
    tensors = [held, held[4:], held[1:], held[2:], held.bfloat16(), held.bfloat16()[1:], held.bool(), held.byte()]
    integers = [0, 1, 2, 15, 16, 32, -1, -16, 2**31 - 1, 2**31, -(2**31), 2**32, 2**62, 2**63, 2**63 + 16]
    groups = {}
    for x in (*tensors, *integers, 0.0, 1.0, True, False, None):
        by_value = type(x) is not int
        groups.setdefault(kind(x), set()).add(jit.native_specialize_impl(base, x, False, by_value, True))
    assert all(len(found) == 1 for found in groups.values()), groups
    assert len(groups) > 9


class Traced:
    """Stands for a Triton kernel with two constants: notes what was compiled, and with what it was called again."""

    arg_names = ("x", "n", "WIDE", "TALL")

    def __init__(self):
        self.compiled, self.calls = 0, []

    def __getitem__(self, grid):
        def compile_(*args, **named):
            self.compiled += 1
            number = self.compiled

            def call(*given):
                self.calls.append((number, given[:3], given[3], given[10:]))  # what lies between is Triton's

            return SimpleNamespace(run=call, function=None, packed_metadata=None)

        return compile_


class Held:
    """A tensor on a card, as far as a launch looks."""

    def __init__(self, card):
        self.get_device = lambda: card


def test_a_handle_is_used_again_for_its_own_kind_only(monkeypatch):
    """Every change of kernel, card, options, constants or arguments compiles; then each calls its own, constants in the
    kernel's order."""
    launch, cards = importlib.import_module("thinwire.kernels.gpu.launch"), [Held(0), Held(1)]
    streams = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda card: 70 + card))
    monkeypatch.setattr(launch, "driver", streams)
    kernel, other = Traced(), Traced()
    sizes = {"TALL": 8, "WIDE": 7}
    ways = [
        (kernel, 3, (cards[0], 5), sizes, 4, None), (kernel, 3, (cards[1], 5), sizes, 4, None),
        (kernel, 3, (cards[0], 1 << 31), sizes, 4, None), (kernel, 3, (cards[0], 5), {**sizes, "TALL": 9}, 4, None),
        (kernel, 3, (cards[0], 5), sizes, 8, None), (kernel, 3, (cards[0], 5), sizes, 4, 32),
        (other, 3, (cards[0], 5), sizes, 4, None),
    ]  # fmt: skip
    for _ in range(2):
        for way in ways:
            launch._run(*way)
    assert (kernel.compiled, other.compiled) == (6, 1)
    streams = [70, 71, 70, 70, 70, 70]
    expected = [
        (i + 1, (3, 1, 1), streams[i], (a[1], c["WIDE"], c["TALL"])) for i, (_, _, a, c, *_) in enumerate(ways[:6])
    ]
    assert kernel.calls == expected and other.calls == [(1, (3, 1, 1), 70, (5, 7, 8))]


def test_cpu_tensors_without_the_interpreter_get_a_clear_error():
    code = (
        "import torch; from thinwire.kernels import bits\n"
        "try: bits.pack(torch.zeros(8, dtype=torch.uint8), 4, 'gpu')\n"
        "except ValueError as error: print(error)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert "needs CUDA tensors" in done.stdout, done.stderr
