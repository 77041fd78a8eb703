"""Every codec keeps its contract: exact sizes, provable bounds, no surprises on odd input."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from inputs import CODECS, CONTRACTIVE, DISTRIBUTIONS, DTYPES, SHAPES, UNBIASED, inputs, tensor

import thinwire as tw
from thinwire import codecs as c
from thinwire.codecs.entries import Entries
from thinwire.kernels.indices import index_bytes
from thinwire.kernels.quantize import qmax

BOUND_INPUTS = ("gaussian", "laplace", "student", "onehot", "sparse", "tiny")
DRAWS = 1500


def roundtrip(codec: c.Codec, x: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return codec.decode(codec.encode(x, seed), x.shape, x.dtype, seed)


@given(st.sampled_from(CODECS), inputs, st.integers(0, 2**60))
def test_size_shape_dtype(codec, x, seed):
    wire = codec.encode(x, seed)
    assert wire.dtype == torch.uint8 and wire.dim() == 1
    assert wire.numel() == codec.nbytes(x.shape, x.dtype)
    y = codec.decode(wire, x.shape, x.dtype, seed)
    assert y.shape == x.shape and y.dtype == x.dtype and y.isfinite().all()
    assert torch.equal(codec.encode(x, seed), wire)  # deterministic in (x, seed)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_every_dtype_and_shape_once(codec):
    for dtype in (*DTYPES, torch.float8_e4m3fn, torch.float8_e5m2):
        for shape in SHAPES:
            x = tensor("gaussian", shape, torch.float32, 3).to(dtype)
            y = roundtrip(codec, x, 9)
            assert y.shape == x.shape and y.dtype == dtype and y.float().isfinite().all()


@given(st.sampled_from(CONTRACTIVE), st.sampled_from(BOUND_INPUTS), st.integers(1, 700), st.integers(0, 999))
def test_contraction(codec, kind, n, seed):
    """E‖C(x) − x‖² ≤ (1 − δ)‖x‖²; where C is random (Chain with an unbiased inner codec) the mean of 40 draws."""
    x = tensor(kind, (n,), torch.float32, seed)
    draws = 40 if isinstance(codec, c.Chain) else 1
    errors = [float((roundtrip(codec, x, s).double() - x.double()).square().sum()) for s in range(draws)]
    bound = (1 - codec.delta(n)) * float(x.double().square().sum())
    assert sum(errors) / draws <= bound * (1.1 if draws > 1 else 1 + 1e-5) + 1e-30


@pytest.mark.parametrize(
    "kind", ["gaussian", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("laplace", "student", "onehot"))]
)
@pytest.mark.parametrize("codec", UNBIASED, ids=str)
def test_unbiased_and_variance(codec, kind):
    """The mean of many draws is x within its own standard error, and the mean squared error is at most ω‖x‖²."""
    x = tensor(kind, (100,), torch.float64, 7)
    draws = codec.rows(x.expand(DRAWS, -1), list(range(DRAWS))) if _has_rows(codec) else _draws(codec, x)
    error, norm = draws - x, float(x.square().sum())
    squared = error.square().sum(1)
    variance, spread = float(squared.mean()), float(squared.std()) / math.sqrt(len(draws))
    assert variance <= codec.omega(100) * norm + 4 * spread + 1e-12 * norm
    bias, standard = float(error.mean(0).norm()), math.sqrt(variance / len(draws))
    assert bias <= 1.6 * standard + 1e-7 * math.sqrt(norm)


def _has_rows(codec):
    return type(codec).rows is not c.Codec.rows


def _draws(codec, x):
    return torch.stack([roundtrip(codec, x, s) for s in range(DRAWS // 3)])


@pytest.mark.parametrize("bits", range(2, 9))
def test_variance_bound_is_nearly_reached(bits):
    """One extreme among equal small values: the worst case of ω. A bound ten times too large would prove nothing."""
    codec = c.Quantize(bits, rounding="stochastic")
    q = qmax(bits) ** 2
    t = (math.sqrt(q * q + 127 * q) - q) / 127  # small values at t steps
    x = torch.full((128,), t)
    x[0] = qmax(bits)
    errors = torch.stack([roundtrip(codec, x, s) - x for s in range(300)])
    measured = float(errors.square().sum(1).mean() / x.square().sum())
    assert 0.7 * codec.omega(128) <= measured <= codec.omega(128) * 1.05


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("std", [1.0, 1e-6, 1e-30, 1e-42, 1e30])
def test_nearest_is_within_half_a_step_at_any_magnitude(bits, std):
    """No absolute floor: a gradient of 10⁻³⁰ is coded as well as one of 1."""
    x = (tensor("gaussian", (1280,), torch.float64, bits) * std).float()
    y = roundtrip(c.Quantize(bits), x)
    step = x.double().view(-1, 128).abs().amax(1, keepdim=True) / qmax(bits) * (1 + 2.0**-6) + 2.0**-149
    assert ((y.double() - x.double()).view(-1, 128).abs() <= step / 2 * (1 + 1e-6) + 2.0**-149).all()


def test_least_squares_scale_helps_where_the_literature_says():
    """Relative error at 2 bits, block 128: the sheet's .37 Gaussian, .42 Laplace, .46 Student-t3."""
    for kind, expected in (("gaussian", 0.37), ("laplace", 0.42), ("student", 0.47)):
        x = tensor(kind, (2**17,), torch.float32, 0)
        error = float((roundtrip(c.Quantize(2, scale="mse"), x) - x).norm() / x.norm())
        plain = float((roundtrip(c.Quantize(2), x) - x).norm() / x.norm())
        assert error < plain and error == pytest.approx(expected, abs=0.035)


@pytest.mark.parametrize("bits", [2, 3, 4, 5])
@pytest.mark.parametrize("kind", ["gaussian", "student", "uniform", "alike", "few"])
def test_few_scales_are_nearly_as_good_as_sixteen(kind, bits):
    """Squared error beside that of the best of 16 scales per block, which are not rounded."""
    x = tensor("student" if kind == "student" else "gaussian", (4000, 128), torch.float32, bits)
    generator = torch.Generator().manual_seed(bits)
    if kind == "uniform":
        x = torch.rand(x.shape, generator=generator) - 0.5
    elif kind == "alike":
        x = x.sign() + 0.1 * x
    elif kind == "few":
        x = torch.where(torch.rand(x.shape, generator=generator) < 0.05, x, 0)
    extreme = x.gather(1, x.abs().argmax(1, keepdim=True))
    unit, most, best = x / torch.where(extreme == 0, 1, extreme), qmax(bits), torch.full((len(x),), torch.inf)
    for j in range(16):
        step = (1 - j / 20) / most
        best = torch.minimum(best, (unit - (unit / step).round().clamp(-most, most + 1) * step).square().sum(1))
    found = (roundtrip(c.Quantize(bits, scale="mse"), x.view(-1)).view_as(x) - x).square().sum()
    least, common = (best * extreme[:, 0].square()).sum(), kind in ("gaussian", "student", "uniform")
    assert found < 1.1 * least if common else found < 1.3 * least + 0.005 * x.square().sum()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_full_grid_is_aq_sgds(bits):
    """AQ-SGD's code, in its own lines: fp16-like scale max|x|, levels −2^(b−1) … 2^(b−1) − 1 of max|x|/2^(b−1) each."""
    x = tensor("laplace", (64, 128), torch.float32, bits)
    mantissa, exponent = torch.frexp(x.abs().amax(1, keepdim=True) / 2 ** (bits - 1))
    step = torch.ldexp(torch.ceil(mantissa * 128) / 128, exponent)  # a scale has 7 significant bits here
    published = torch.round(x / step).clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) * step
    assert torch.equal(roundtrip(c.Quantize(bits, scale="full"), x.view(-1)).view_as(x), published)


def test_two_bits_need_all_four_codes():
    """Relative error on a Gaussian: three levels, AQ-SGD's four (a block of 128, a channel of 1,024), ours."""
    x = tensor("gaussian", (2**18,), torch.float32, 0)
    for codec, expected in (
        (c.Quantize(2), 0.770), (c.Quantize(2, scale="full"), 0.434),
        (c.Quantize(2, block=1024, scale="full"), 0.507), (c.Quantize(2, scale="mse"), 0.370),
    ):  # fmt: skip
        error = float((roundtrip(codec, x) - x).norm() / x.norm())
        assert error == pytest.approx(expected, abs=0.004), codec


def test_rotation_spreads_outliers():
    x = tensor("gaussian", (128 * 64,), torch.float32, 0)
    x[::128] *= 50
    plain, turned = (float((roundtrip(k, x, 1) - x).norm() / x.norm()) for k in
                     (c.Quantize(4), c.Rotated(c.Quantize(4))))  # fmt: skip
    ordinary = x.clone()
    ordinary[::128] = 0
    lost = float((roundtrip(c.Quantize(4), x) - x).view(-1, 128)[:, 1:].norm() / ordinary.norm())
    kept = float((roundtrip(c.Rotated(c.Quantize(4)), x, 1) - x).view(-1, 128)[:, 1:].norm() / ordinary.norm())
    assert turned < plain and kept < lost


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_rows_equal_row_by_row(codec):
    for dtype in (torch.float64, torch.float32):
        x = tensor("laplace", (5, 80), dtype, 1)
        seeds = [0, 1, 2**33, 77, 2**61]
        one_by_one = torch.stack([roundtrip(codec, row, seed) for row, seed in zip(x, seeds)])
        rounding = 1e-12 if dtype == torch.float64 else 1e-6  # a norm over rows may add up in another order
        assert torch.allclose(codec.rows(x, seeds), one_by_one, rtol=rounding, atol=0)


@given(st.sampled_from(CODECS), inputs.filter(lambda x: x.numel() > 0), st.booleans(), st.booleans())
def test_mirrors_agree(codec, x, gate, bf16):
    """Sender's and receiver's mirrors are bitwise equal after encode_onto / decode_onto, and y is near the mirror."""
    h = (x.float() * 0.9 + 0.01).to(torch.bfloat16 if bf16 else torch.promote_types(x.dtype, torch.float32))
    sender, receiver = h.clone(), h.clone()
    wire = codec.encode_onto(x, sender, 3, gate)
    assert wire.numel() == codec.nbytes_onto(x.shape, x.dtype, gate)
    y = codec.decode_onto(wire, receiver, x.dtype, 3, gate)
    assert torch.equal(sender, receiver) and y.dtype == x.dtype
    assert torch.allclose(y.double(), sender.double(), rtol=0.01, atol=float(x.double().abs().max()) * 0.01 + 1e-38)


def test_gate_sends_the_value_where_the_mirror_is_unrelated():
    x, h = tensor("gaussian", (512,), torch.float32, 1), 10 * tensor("gaussian", (512,), torch.float32, 2)
    h[:256] = x[:256]  # half of the blocks know their sample
    errors = {}
    for gate in (False, True):
        mirror = h.clone()
        c.Quantize(4).encode_onto(x, mirror, gate=gate)
        errors[gate] = (mirror - x).view(2, 256).norm(dim=1) / x.view(2, 256).norm(dim=1)
    assert errors[True][0] == errors[False][0] == 0
    assert errors[True][1] < 0.15 < errors[False][1]


def test_low_rank_is_exact_on_low_rank_and_warm_start_converges():
    g = torch.Generator().manual_seed(0)
    exact = torch.randn(40, 3, generator=g) @ torch.randn(3, 30, generator=g)
    assert torch.allclose(roundtrip(c.LowRank(3), exact), exact, atol=1e-4)
    x, codec, prev = torch.randn(40, 30, generator=g), c.LowRank(3), None
    errors = []
    for step in range(30):
        wire = codec.encode(x, step, prev=prev)
        prev = codec.right_factor(wire, (40, 30), x.dtype)
        errors.append(float((codec.decode(wire, x.shape, x.dtype) - x).norm()))
    best = float(torch.linalg.svdvals(x)[3:].norm())
    assert errors[-1] == pytest.approx(best, rel=0.02) and errors[0] > 1.02 * best
    assert not roundtrip(codec, torch.zeros(40, 30)).any()
    assert codec.decode(codec.encode(x, 0, prev=torch.zeros(30, 3)), x.shape, x.dtype).isfinite().all()


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nonfinite_is_refused_and_flagged(codec, value):
    x = torch.ones(20, 30)
    x[3, 4] = value
    with pytest.raises(ValueError, match="1 of 600 values are NaN or Inf, the first at flat index 94"):
        codec.encode(x)
    wire, finite = codec.encode_flagged(x)
    assert not finite and wire.numel() == codec.nbytes(x.shape, x.dtype)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_wrong_length_is_refused(codec):
    x = torch.ones(20, 30)
    wire = codec.encode(x)
    for bad in (wire[:-1], torch.cat((wire, wire[:1])), wire[:0], wire.view(1, -1), wire.to(torch.int16)):
        with pytest.raises(ValueError, match="bytes"):
            codec.decode(bad, x.shape, x.dtype)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_noncontiguous_and_input_untouched(codec):
    base = tensor("gaussian", (30, 20), torch.float32, 1)
    x, kept = base.t(), base.clone()
    assert torch.equal(codec.encode(x, 4), codec.encode(x.contiguous(), 4)) and torch.equal(base, kept)
    h = torch.zeros(30, 20).t()
    codec.encode_onto(x, h, 4)
    assert torch.allclose(h, roundtrip(codec, x, 4), rtol=1e-6)


@pytest.mark.parametrize("codec", [c.Quantize(b) for b in (2, 4, 8)] + [c.Quantize(2, scale="mse"), c.ScaledSign(),
                                                                     c.Natural()], ids=str)  # fmt: skip
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_numbers_do_not_overflow(codec, dtype):
    x = torch.tensor([1.0, -1.0, 0.99, 0.5], dtype=torch.float64).repeat(40) * torch.finfo(dtype).max
    assert roundtrip(codec, x.to(dtype), 1).isfinite().all()


def test_cast_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="do not fit"):
        c.Cast("fp16").encode(torch.tensor([1e6]))


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: c.Quantize(1), "bits must be 2, 3, … 8, not 1"), (lambda: c.Quantize(9), "not 9"),
        (lambda: c.Quantize(4, block=100), "multiple of 8"), (lambda: c.Quantize(4, rounding="up"), "'up'"),
        (lambda: c.Quantize(4, scale="max"), "'max'"), (lambda: c.TopK(0), "density must lie in"),
        (lambda: c.Quantize(4, rounding="stochastic", scale="mse"), "unbiased"),
        (lambda: c.RandK(1.5), "1.5"), (lambda: c.LowRank(0), "rank"), (lambda: c.Cast("int8"), "'int8'"),
        (lambda: c.Dither(0), "levels"), (lambda: c.Dither(3, norm=1), "norm"), (lambda: c.Rotated(4), "codec"),
        (lambda: c.Rotated(c.Natural(), 100), "power of two"), (lambda: c.Chain(c.Natural(), c.Natural()), "TopK"),
        (lambda: c.make("zip"), "'zip' is unknown"), (lambda: c.make("quantize"), "needs bits"),
        (lambda: c.make("quantize", bit=4), "no setting 'bit'"), (lambda: c.ScaledSign(3), "multiple of 8"),
    ],
)  # fmt: skip
def test_bad_settings_name_the_value_in_one_line(build, said):
    with pytest.raises(ValueError, match=said) as caught:
        build()
    assert "\n" not in str(caught.value)


def test_make_builds_nested_codecs():
    assert c.make("rotated", inner={"codec": "quantize", "bits": 4}) == c.Rotated(c.Quantize(4))
    assert c.make("TopK", density=0.1) == c.TopK(0.1)


def test_integers_are_refused():
    with pytest.raises(ValueError, match="floating"):
        c.Quantize(4).encode(torch.ones(3, dtype=torch.int32))


def test_global_generators_are_untouched():
    before = torch.get_rng_state()
    for codec in CODECS:
        roundtrip(codec, torch.ones(20, 30), 5)
    assert torch.equal(before, torch.get_rng_state())


@given(st.sampled_from(["int32", "coded"]), st.sampled_from(["fp32", "int8"]), st.integers(2, 300), st.data())
def test_entries_that_are_looked_at_later(indices, values, n, data):
    """What is wrong with a message is told by `settle`, all of it, and only then; what it decodes to lies inside."""
    k = data.draw(st.integers(1, n - 1))
    now, later = Entries(values, indices), Entries(values, indices, later=True)
    cut = now.nbytes(n, k) - (k * 4 if indices == "int32" else index_bytes(n, k))
    index = torch.randperm(n, generator=torch.Generator().manual_seed(k))[:k].sort().values
    wire = now.encode(index, torch.ones(k), n)
    for _ in range(data.draw(st.integers(0, 2))):
        wire[data.draw(st.integers(cut, wire.numel() - 1))] ^= data.draw(st.integers(0, 255))
    try:
        expected = now.decode(wire, n, k)[0]
    except ValueError:
        expected = None
    got, _ = later.decode(wire, n, k)
    later.decode(now.encode(index, torch.ones(k), n), n, k)  # a good one after it
    assert got.numel() == k and 0 <= got.min() <= got.max() < n
    if expected is None:
        with pytest.raises(ValueError, match=f"not {k} ascending indices below {n}"):
            later.raise_if_damaged()
    else:
        assert torch.equal(got, expected)
    later.raise_if_damaged()  # nothing is left of it
    later.encode(index, torch.full((k,), torch.inf), n)
    with pytest.raises(ValueError, match="NaN or Inf"):
        later.raise_if_damaged()


@given(st.sampled_from([c.Quantize(2), c.Quantize(3, scale="mse"), c.LowRank(1), c.TopK(0.1), c.ScaledSign()]),
       st.sampled_from(DISTRIBUTIONS), st.sampled_from([(2, 9), (40, 33), (4, 8, 20)]),
       st.integers(0, 999))  # fmt: skip
def test_centered_leaves_no_mean_in_any_column(inner, kind, shape, seed):
    """What arrives adds up over tokens to what was sent, to bf16's rounding of what the inner codec missed.

    Where the inner codec misses nothing (a constant is of rank one), both errors are rounding: 1e-14 of x at most.
    """
    x, tokens = tensor(kind, shape, torch.float64, seed), math.prod(shape[:-1])
    plain, ours = ((roundtrip(codec, x, seed) - x).view(tokens, -1) for codec in (inner, c.Centered(inner)))
    assert (ours.sum(0).abs() <= 2**-8 * plain.sum(0).abs() + 1e-12 * x.abs().sum() + 1e-35).all()
    assert ours.square().sum() <= plain.square().sum() * (1 + 1e-12) + 1e-28 * x.square().sum() + 1e-70
    assert torch.allclose(ours - ours.mean(0), plain - plain.mean(0), atol=1e-12 * float(x.abs().max()) + 1e-40)


def test_centered_keeps_low_rank_s_warm_start():
    """Message after message of one matrix: the factor goes on from the last, through the wrapper too."""
    x = tensor("gaussian", (60, 40), torch.float64, 0) @ torch.diag(0.8 ** torch.arange(40, dtype=torch.float64))
    errors = []
    for codec in (c.LowRank(4), c.Centered(c.LowRank(4))):
        ends = [tw.Channel(codec), tw.Channel(codec)]
        for _ in range(8):
            y = ends[1].recv("b", ends[0].send("b", x), x.shape, x.dtype)
        errors.append(float((y - x).norm()))
    best = float(torch.linalg.svdvals(x)[4:].norm())
    assert best <= errors[0] * (1 + 1e-9) and errors[1] <= errors[0] <= 1.02 * best
    assert float((roundtrip(c.LowRank(4), x) - x).norm()) > 1.05 * best


def test_tiles_send_as_many_of_each():
    """Whole tiles, and those at the edges in proportion; of several tensors in one flat message, each by its shape."""
    x = tensor("student", (10, 13), torch.float32, 2)
    y = roundtrip(c.TileTopK(2, 4), x)
    sent = [int((y[i : i + 4, j : j + 4] != 0).sum()) for i in (0, 4, 8) for j in (0, 4, 8, 12)]
    assert sent == [2, 2, 2, 1, 2, 2, 2, 1, 1, 1, 1, 1] and torch.equal(y[y != 0], x[y != 0])
    assert float(x[:4, :4].abs().sort(descending=True).values.view(-1)[1:].min()) >= 0
    assert float(y[:4, :4].abs()[y[:4, :4] != 0].min()) == float(x[:4, :4].abs().view(-1).sort().values[-2])
    flat = torch.cat((x.view(-1), x.view(-1)[:37]))
    codec = c.TileTopK(2, 4).for_shapes([(10, 13), (37,)])
    both = roundtrip(codec, flat)
    assert torch.equal(both[:130].view(10, 13), y) and torch.equal(both[130:], roundtrip(c.TileTopK(2, 4), flat[130:]))
    large = c.TileTopK(64, 64, c.TwoLevels())
    assert 8 * large.nbytes((1024, 1024), torch.float32) / (2**20 / 64) == pytest.approx(10.06, abs=0.01)


def test_two_levels_fit_large_values_best():
    """Squared error on what tiles pick, against SparseLoCo's two bits and our grid: a third, at as many bits."""
    for kind in ("gaussian", "laplace", "student"):
        x = tensor(kind, (256, 256), torch.float32, 0)
        values = roundtrip(c.TileTopK(), x)
        values = values[values != 0]
        ours, theirs, grid = (
            float((roundtrip(codec, values) - values).square().sum())
            for codec in (c.TwoLevels(), c.BinMeans(), c.Quantize(2, block=512, scale="mse"))
        )
        assert ours < 0.45 * theirs and ours < 0.45 * grid, kind


@pytest.mark.parametrize("bits", [3, 4])
def test_powers_of_two_are_the_nearest(bits):
    x = tensor("laplace", (1280,), torch.float32, bits)
    y = roundtrip(c.PowerOfTwo(bits), x)
    for part, coded in zip(x.view(-1, 128), y.view(-1, 128)):
        scale = coded.abs().max()
        levels = torch.cat((scale * 2.0 ** -torch.arange(2.0 ** (bits - 1) - 1), torch.zeros(1)))
        nearest = (part.abs()[:, None].double() - levels).abs().amin(1)
        assert torch.equal((part.double() - coded).abs(), nearest)
