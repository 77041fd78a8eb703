"""Low rank between members: batches, shapes, and one factor per exchange, against straight-line code."""

from __future__ import annotations

import math

import pytest
import torch
from collective_cases import gradient
from thread_group import run

import thinwire as tw
from thinwire import collectives as c
from thinwire.codecs import Quantize
from thinwire.codecs.lowrank import gaussian
from thinwire.kernels.random import derive
from thinwire.memory import ErrorFeedback

SHAPES = [(24, 30), (7,), (24, 30), (3, 10, 20), (0, 5), (2, 2)]


def test_batched_low_rank_equals_separate_exchanges():
    """Three ranks, three steps with warm starts: every tensor as it would be alone with the same seed, to rounding (its
    operands lie elsewhere in memory, for which BLAS promises no equal bits)."""

    def work(rank: int) -> list[bool]:
        together, states, state, equal = c.LowRank(2).for_shapes(SHAPES), [{} for _ in SHAPES], {}, []
        for step in range(3):
            parts = [gradient("similar", shape, rank, 3, step) for shape in SHAPES]
            both = together.exchange(torch.cat([p.reshape(-1) for p in parts]), state=state, seed=step)
            alone = [c.LowRank(2).exchange(p, state=s, seed=step) for p, s in zip(parts, states)]
            for i in (0, 1):
                expected = torch.cat([a[i].reshape(-1) for a in alone])
                equal.append(float((both[i] - expected).norm()) <= 1e-10 * float(expected.norm()))
        assert set(state) == {"q0", "q2", "q3"}
        return equal

    assert all(all(equal) for equal in run(3, work)[0])


def test_batched_low_rank_sends_two_messages_for_all(monkeypatch):
    calls = []

    def counting(x, group):
        calls.append(x.numel())
        yield
        return x.clone()

    monkeypatch.setattr("thinwire.collectives.lowrank.exact_mean_steps", counting)
    zero = torch.zeros(sum(math.prod(s) for s in SHAPES))
    mean, own = c.LowRank(2).for_shapes(SHAPES).exchange(zero, state={})
    assert len(calls) == 2 and calls[0] == 2 * (24 + 24 + 3) + 7 + 4  # left factors, the vector, and 2 × 2 as it is
    assert not mean.any() and not own.any()
    with pytest.raises(ValueError, match="shapes"):
        c.LowRank(2).for_shapes(SHAPES).exchange(zero[1:], state={})


def test_low_rank_takes_a_convolution_as_out_by_rest():
    """As PowerSGD's authors do: a rank-1 gradient of that shape arrives exactly, in 8 + 36 values instead of 288."""
    g = torch.Generator().manual_seed(0)
    u = torch.outer(torch.randn(8, generator=g), torch.randn(36, generator=g)).view(8, 4, 3, 3)
    state: dict = {}
    mean, own = c.LowRank(1).exchange(u, state=state)
    assert mean.shape == u.shape and torch.allclose(mean, u, atol=1e-5) and torch.allclose(own, u, atol=1e-5)
    assert state["q0"].shape == (36, 1)


def test_alternating_low_rank_is_a_power_iteration_in_halves():
    """Against straight-line code, three members and five exchanges: left and right factors in turn, coded, orthonormal
    bases from the mean factor before. With error feedback on one fixed matrix the mean converges to it."""

    def work(rank: int) -> list[float]:
        collective, state, found, last = c.AlternatingLowRank(3, factors=c.Quantized(4)), {}, [], None
        for step in range(5):
            everyone = [gradient("similar", (24, 40), r, 3, step) for r in range(3)]
            mean, own = collective.exchange(everyone[rank], state=state, seed=step)
            turned = [m.T if step % 2 else m for m in everyone]
            if last is None:
                last = gaussian(40 * 3, derive("alternating"), "cpu").double().view(40, 3)
            base = torch.linalg.qr(last).Q
            factors = torch.stack([(m @ base).T.contiguous() for m in turned])
            expected, parts = coded_mean(factors)
            last = expected.T
            product, mine = last @ base.T, parts[rank].T @ base.T
            found += [float((mean - (product.T if step % 2 else product)).norm() / mean.norm())]
            found += [float((own - (mine.T if step % 2 else mine)).norm() / own.norm())]
        return found

    def coded_mean(factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        size, n = len(factors), factors[0].numel()
        flat = factors.view(size, n)
        lengths, code = c.Quantized(4).lengths(n, size), Quantize(4)

        def trip(x: torch.Tensor) -> torch.Tensor:
            return torch.cat([code.decode(code.encode(p), p.shape, p.dtype) for p in x.split(lengths)])

        own = torch.stack([trip(row) for row in flat])
        mean, start = trip(own.sum(0) / size), 0
        for owner, length in enumerate(lengths):
            part = slice(start, start + length)
            own[owner, part] += size * mean[part] - own[:, part].sum(0)
            start += length
        return mean.view(factors[0].shape), own.view(factors.shape)

    assert max(max(found) for found in run(3, work)[0]) < 1e-9
    one, channel = gradient("similar", (24, 40), 0, 1, 0), tw.Channel(c.AlternatingLowRank(3), ErrorFeedback())
    sent = sum(channel.reduce("w", one) for _ in range(60)) / 60
    assert float((sent - one).norm()) < 0.15 * float(one.norm())
