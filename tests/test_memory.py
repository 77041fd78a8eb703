"""The table of algorithms: each named memory equals a straight-line implementation of its paper's update.

The straight lines below use only a codec's `rows` map (what the other end decodes) and plain arithmetic; the
channel side goes through frames, both ends, and the state. Float64, 50 steps, to 1e-12.
"""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from thinwire import codecs as c
from thinwire import memory as m
from thinwire.kernels.random import derive

D, STEPS = 60, 50


def gradients(seed: int = 0) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    base = torch.randn(D, generator=g, dtype=torch.float64)
    return [base * (1 + 0.02 * t) + 0.1 * torch.randn(D, generator=g, dtype=torch.float64) for t in range(STEPS)]


def apply(codec: c.Codec, u: torch.Tensor, t: int) -> torch.Tensor:
    """C(u) with the seed that both ends derive for send t of key "w"."""
    return codec.rows(u[None], [derive(0, 0, "w", t)])[0]


def through_channel(codec: c.Codec, memory: m.Memory) -> list[torch.Tensor]:
    sender, receiver = tw.Channel(codec, memory), tw.Channel(codec, memory)
    out = []
    for x in gradients():
        frame = sender.send("w", x)
        out.append(receiver.recv("w", frame, x.shape, x.dtype))
        assert sender.digest("w") == receiver.digest("w")
    return out


def straight_dcgd(codec, xs):
    return [apply(codec, x, t) for t, x in enumerate(xs)]


def straight_fixed(codec, xs, h):
    return [h + apply(codec, x - h, t) for t, x in enumerate(xs)]


def straight_diana(codec, xs, alpha):
    h, out = torch.zeros(D, dtype=torch.float64), []
    for t, x in enumerate(xs):
        message = apply(codec, x - h, t)
        out.append(h + message)
        h = h + alpha * message
    return out


def straight_rand_diana(codec, xs, p):
    h, out = torch.zeros(D, dtype=torch.float64), []
    for t, x in enumerate(xs):
        out.append(h + apply(codec, x - h, t))
        if derive("refresh", derive(0, 0, "w", t)) / 2**63 < p:
            h = x
    return out


def straight_ef21(codec, xs):
    h, out = torch.zeros(D, dtype=torch.float64), []
    for t, x in enumerate(xs):
        h = h + apply(codec, x - h, t)
        out.append(h)
    return out


def straight_ef14(codec, xs, decay):
    e, out = torch.zeros(D, dtype=torch.float64), []
    for t, x in enumerate(xs):
        p = e + x
        sent = apply(codec, p, t)
        e = decay * (p - sent)
        out.append(sent)
    return out


def straight_econtrol(codec, xs, eta):
    h, e, out = torch.zeros(D, dtype=torch.float64), torch.zeros(D, dtype=torch.float64), []
    for t, x in enumerate(xs):
        step = apply(codec, x + eta * e - h, t)
        e = e + x - h - step
        h = h + step
        out.append(h)
    return out


def straight_aqsgd(codec, xs):
    memory, out = None, []
    for t, x in enumerate(xs):
        memory = x if memory is None else memory + apply(codec, x - memory, t)
        out.append(memory)
    return out


SHIFT = gradients(9)[0]
TABLE = {
    "DCGD": (c.RandK(0.3), m.Plain(), lambda k, xs: straight_dcgd(k, xs)),
    "FIXED": (c.RandK(0.3), m.FixedShift(SHIFT), lambda k, xs: straight_fixed(k, xs, SHIFT)),
    "STAR with Top-K": (c.Induced(c.TopK(0.2), c.RandK(0.3)), m.StarShift({"w": SHIFT}),
                        lambda k, xs: straight_fixed(k, xs, SHIFT)),
    "DIANA": (c.RandK(0.3), m.Diana(), lambda k, xs: straight_diana(k, xs, 1 / (1 + k.omega(D)))),
    "DIANA, own alpha": (c.NaturalDither(3), m.Diana(0.2), lambda k, xs: straight_diana(k, xs, 0.2)),
    "generalised DIANA": (c.Induced(c.TopK(0.2), c.RandK(0.3)), m.Diana(),
                          lambda k, xs: straight_diana(k, xs, 1 / (1 + k.omega(D)))),
    "Rand-DIANA": (c.RandK(0.3), m.RandDiana(0.3), lambda k, xs: straight_rand_diana(k, xs, 0.3)),
    "EF21": (c.TopK(0.1), m.EF21(), lambda k, xs: straight_ef21(k, xs)),
    "EF14": (c.TopK(0.1), m.ErrorFeedback(), lambda k, xs: straight_ef14(k, xs, 1.0)),
    "EF14 with decay": (c.ScaledSign(), m.ErrorFeedback(0.9), lambda k, xs: straight_ef14(k, xs, 0.9)),
    "EControl": (c.TopK(0.1), m.EControl(0.3), lambda k, xs: straight_econtrol(k, xs, 0.3)),
    "AQ-SGD": (c.TopK(0.2), m.Delta(store="native", gate=False), lambda k, xs: straight_aqsgd(k, xs)),
    "AQ-SGD, 4 bits": (c.Quantize(4), m.Delta(store="native", gate=False), lambda k, xs: straight_aqsgd(k, xs)),
}  # fmt: skip


@pytest.mark.parametrize("row", TABLE)
def test_memory_equals_its_paper(row):
    codec, memory, straight = TABLE[row]
    for ours, theirs in zip(through_channel(codec, memory), straight(codec, gradients())):
        assert (ours - theirs).norm() <= 1e-12 * max(1.0, float(theirs.norm()))


def test_lazy_error_is_error_feedback_keyed_by_boundary():
    """Optimus-CC: what one micro-batch's message leaves out goes to the next; the sum telescopes to the residual."""
    channel, other = (tw.Channel(c.LowRank(2), m.ErrorFeedback()) for _ in range(2))
    xs = [torch.randn(20, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(t)) for t in range(12)]
    arrived = [other.recv("boundary 1", channel.send("boundary 1", x), x.shape, x.dtype) for x in xs]
    residual = channel.state.read("e", "boundary 1")
    assert torch.allclose(sum(arrived) + residual, sum(xs), atol=1e-12)


def test_ef14_is_the_alpha_one_rule_on_the_running_sum():
    """The sheet's identity: EF14's sent sum equals EF21's shift fed with the running sum of gradients."""
    codec, total = c.TopK(0.1), torch.zeros(D, dtype=torch.float64)
    sums, sent = [], torch.zeros(D, dtype=torch.float64)
    for x in gradients():
        total = total + x
        sums.append(total)
    shifts = straight_ef21(codec, sums)
    for t, message in enumerate(straight_ef14(codec, gradients(), 1.0)):
        sent = sent + message
        assert (sent - shifts[t]).norm() <= 1e-12 * sent.norm()


class Threads(tw.collectives.Collective):
    """A collective over simulated workers: exchange adds up and counts on being called once per worker in turn."""

    def __init__(self, codec: c.Codec) -> None:
        self.codec = codec

    def exchange(self, u, group, *, state, key="", step=0, seed=0):
        own = self.codec.rows(u[None], [seed])[0]
        state["calls"] = state.get("calls", torch.tensor(0)) + 1
        return own, own  # one worker: Σ own = 1·mean


@pytest.mark.parametrize("memory", [m.Plain(), m.Diana(0.3), m.EF21(), m.ErrorFeedback(), m.EControl(0.4),
                                    m.RandDiana(0.5), m.FixedShift(SHIFT)], ids=lambda k: k.name)  # fmt: skip
def test_reduce_alone_follows_the_same_rule(memory):
    """World size 1: reduce is the receiver's y, so the same straight lines hold (seeds differ by the rank)."""
    codec = c.Quantize(4)  # deterministic: no seed
    channel, pair = tw.Channel(Threads(codec), memory), (tw.Channel(codec, memory), tw.Channel(codec, memory))
    for x in gradients():
        y = channel.reduce("w", x)
        expected = pair[1].recv("w", pair[0].send("w", x), x.shape, x.dtype)
        assert (y - expected).norm() <= 1e-12 * expected.norm()
    state = channel.state_dict()
    assert int(state["c/s:w/calls"]) == STEPS


@pytest.mark.parametrize("codec", [c.RandK(0.1), c.Quantize(2, rounding="stochastic"), c.Ternary()], ids=str)
@pytest.mark.parametrize("memory", [m.EF21(), m.EControl(0.5), m.Delta()], ids=lambda k: k.name)
def test_alpha_one_refuses_high_variance(codec, memory):
    with pytest.raises(ValueError, match="diverges with ω"):
        tw.Channel(codec, memory)


def test_alpha_one_refuses_by_size_where_omega_depends_on_it():
    channel = tw.Channel(c.Dither(8), m.EF21())
    channel.send("small", torch.randn(16))
    with pytest.raises(ValueError, match="diverges"):
        channel.send("large", torch.randn(10_000))


def test_diana_without_alpha_needs_an_unbiased_codec():
    with pytest.raises(ValueError, match="give alpha"):
        tw.Channel(c.TopK(0.1), m.Diana()).send("w", torch.randn(20))


@pytest.mark.parametrize(("build", "said"), [
    (lambda: m.Diana(0), "alpha"), (lambda: m.RandDiana(1.5), "1.5"), (lambda: m.ErrorFeedback(0), "decay"),
    (lambda: m.EControl(1.0), "eta"), (lambda: m.Delta(store="fp4"), "'fp4'"),
    (lambda: tw.Channel(c.Quantize(4), m.Delta(capacity=2.0)), "2.0"),
    (lambda: tw.Channel(c.Quantize(4), m.Delta(capacity="2 parsecs")), "parsecs"),
    (lambda: tw.Channel("quantize"), "codec or a collective"),
])  # fmt: skip
def test_bad_settings(build, said):
    with pytest.raises(ValueError, match=said) as caught:
        build()
    assert "\n" not in str(caught.value)
