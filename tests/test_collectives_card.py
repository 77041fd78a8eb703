"""Ways that collectives take on a card, tried on CPUs between members in one process."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from thinwire.codecs import Cast
from thinwire.codecs.base import largest_is_finite
from thinwire.collectives import LowRank, OkTopk, TwoHop, lowrank, thresholds
from thinwire.collectives.dense import cast_mean_steps
from thinwire.collectives.groups import Metered, world
from thinwire.collectives.in_process import InProcessGroup
from thinwire.collectives.transit import MIX, Transit
from thinwire.config.wire import Reduction
from thinwire.data_parallel.exchange import Exchange
from thinwire.data_parallel.gradient_units import make_units
from thinwire.data_parallel.reducer import Reducer
from thinwire.kernels.checksum import PRIME
from thinwire.memory import ErrorFeedback, Plain
from thinwire.memory.channel import Channel

SHAPES = [(12, 8), (5,), (12, 8), (30, 8), (12, 8), (2, 3)]


def noise(n, seed):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def test_cholesky_makes_columns_orthonormal():
    factor = noise(2 * 40 * 4, 1).view(2, 40, 4) * torch.tensor([1e-12, 1.0, 1e9, 3.0])
    made = lowrank.by_cholesky(factor)
    assert torch.allclose(made.mT @ made, torch.eye(4).expand(2, 4, 4), atol=1e-5)
    assert torch.allclose(made @ (made.mT @ factor), factor, rtol=1e-4, atol=0.0)
    assert not lowrank.by_cholesky(torch.zeros(1, 9, 2)).any()
    twice = lowrank.by_cholesky(factor[:, :, [1, 1]])  # of rank one: what is there is kept, and nothing explodes
    assert torch.allclose(twice @ (twice.mT @ factor[:, :, 1:2]), factor[:, :, 1:2], rtol=1e-3, atol=1e-4)
    assert float(twice.abs().max()) < 1.1


def test_low_rank_of_many_matrices_together():
    """By batches and Cholesky as by one matrix after the other and QR: to rounding, over several steps."""
    n = sum(torch.Size(shape).numel() for shape in SHAPES)

    def steps(group):
        _, rank = world(group)
        state, out = {}, []
        for step in range(3):
            u = noise(n, 10 * step + rank)
            out += LowRank(2).for_shapes(SHAPES).exchange(u, group, state=state, seed=7)
        return out

    plain = InProcessGroup(3).run(steps)
    together = lambda parts, ranks, _, batches=lowrank._batches: batches(parts, ranks, True)  # noqa: E731
    by_cholesky = lambda factors: [lowrank.by_cholesky(factor) for factor in factors]  # noqa: E731
    with mock.patch.multiple(lowrank, _batches=together, orthonormal=by_cholesky):
        batched = InProcessGroup(3).run(steps)
    for one, other in zip(plain, batched):
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(one, other))
    assert all(torch.equal(a, b) for a, b in zip(batched[0][::2], batched[2][::2]))  # means


def test_casts_are_added_by_the_backend_where_no_residual_is_kept():
    values = [noise(1000, rank) for rank in range(3)]
    mean = torch.stack(values).mean(0)
    channel = {"plain": Plain(), "residual": ErrorFeedback()}

    def reduced(group, memory):
        meter = Metered(group)
        out = Channel(TwoHop(Cast("bf16")), channel[memory], name="x").reduce("x", values[world(group)[1]], meter)
        return out, meter.sent

    by_ring = lambda self, u, group=None: cast_mean_steps(u, self.codec, group)  # noqa: E731
    with mock.patch.object(TwoHop, "mean_steps", by_ring):
        ring = InProcessGroup(3).run(lambda group: reduced(group, "plain"))
        kept = InProcessGroup(3).run(lambda group: reduced(group, "residual"))
    hops = InProcessGroup(3).run(lambda group: reduced(group, "residual"))
    assert all(torch.equal(ring[0][0], other) for other, _ in ring[1:])
    assert 0 < float((ring[0][0] - mean).abs().max()) < 0.02
    assert torch.equal(kept[0][0], hops[0][0]) and not torch.equal(kept[0][0], ring[0][0])
    assert abs(ring[0][1] / hops[0][1] - 1) < 0.1


@pytest.mark.parametrize("values, indices", [("fp32", "int32"), ("int8", "coded")])
def test_oktopk_in_padded_memory(values, indices):
    """What a card does, which waits twice per exchange: the same bits, step by step, with crowded regions too."""
    collective = OkTopk(0.05, tau=4, tau_prime=5, values=values, indices=indices)

    def steps(group):
        _, rank = world(group)
        state, out = {}, []
        for step in range(8):
            u = noise(3000, 100 * step) + noise(3000, 100 * step + rank)
            u[rank * 100 : rank * 100 + 60] *= 1 + 40 * (step == 6)
            out += collective.exchange(u, group, state=state, step=step, seed=step)
        return out

    plain = InProcessGroup(3).run(steps)
    with mock.patch.object(thresholds, "is_on_card", lambda x: True):
        padded = InProcessGroup(3).run(steps)
    assert all(torch.equal(a, b) for one, other in zip(plain, padded) for a, b in zip(one, other))


def test_oktopk_on_a_card_makes_a_damaged_exchange_nan():
    def steps(group):
        return OkTopk(0.05).exchange(noise(400, world(group)[1]), group, state={})[0]

    bad = lambda self: torch.tensor(False)  # noqa: E731
    with (
        mock.patch.object(thresholds, "is_on_card", lambda x: True),
        mock.patch("thinwire.codecs.entries.Entries.all_good", bad),
    ):
        assert all(bool(mean.isnan().all()) for mean in InProcessGroup(2).run(steps))


def test_a_check_left_on_one_card_drops_the_step_on_all():
    shapes = {"w": (16, 16)}

    def steps(group):
        exchange = Exchange(shapes, Reduction(TwoHop(Cast("bf16"))), group)
        found = []
        for bad in (False, True, False):
            means = {unit: exchange.reduce(unit, noise(256, world(group)[1])) for unit in exchange.units}
            exchange.later.unread.append(
                torch.tensor(not (bad and world(group)[1] == 1))
            )  # as a card's means leave them
            found.append(exchange.agree(torch.zeros(3, dtype=torch.uint8)).tolist())
            exchange.commit()
            assert len(means) == 1
        return found

    for found in InProcessGroup(3).run(steps):
        assert found == [[0, 0, 0], [1, 0, 0], [0, 0, 0]]


def test_units_are_sent_in_the_order_in_which_backward_completes_them():
    """What is exact is spread over the model: its unit is complete when the first layer's part is, not before."""
    shapes = {"embedding": (90, 10)}
    for layer in range(3):
        shapes |= {f"{layer}.weight": (50, 20), f"{layer}.bias": (50,)}
    units = make_units(shapes, Reduction(TwoHop(Cast("bf16")), Plain(), unit_mb=0.004))
    assert [unit.parameters[0] for unit in units] == ["embedding", "0.weight", "0.bias", "1.weight", "2.weight"]
    assert [unit.exact for unit in units] == [False, False, True, False, False]


def test_checksums_of_many_messages_depend_on_their_order():
    def table(totals):
        transit = Transit(2, 0)
        for total in totals:
            transit.add(0, 1, torch.tensor(total))
        return transit.table(torch.device("cpu"))

    totals = [PRIME - 1 - i for i in range(40)]
    expected = 0
    for total in totals:
        expected = (expected * MIX + total) % PRIME
    assert int.from_bytes(bytes(table(totals)[8:12].tolist()), "little") == expected
    assert not torch.equal(table(totals), table(totals[1:2] + totals[:1] + totals[2:]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_value_that_is_not_finite_is_found_by_the_norm(dtype):
    x = noise(3000, 5).to(dtype)
    largest = torch.finfo(dtype).max
    assert largest_is_finite(x) and largest_is_finite(torch.full((9,), -largest, dtype=dtype))
    for place in (0, 1777, 2999):
        for value in (torch.nan, torch.inf, -torch.inf):
            y = x.clone()
            y[place] = value
            assert not largest_is_finite(y)


def test_two_reducers_on_one_thread_exchange_in_the_order_in_which_they_were_given():
    """As the trainer has them on a card: of gradients and of a tied embedding, in one order on all ranks."""
    weights = [torch.nn.Parameter(torch.zeros(8, 8)) for _ in range(2)]
    first = Reducer([("one", weights[0])], "max", agrees=False)
    second = Reducer([("two", weights[1])], "max", agrees=False, thread=first.thread)
    order = []
    for reducer, weight, name in ((first, weights[0], "one"), (second, weights[1], "two")):
        weight.grad = noise(64, 1).view(8, 8)
        with mock.patch.object(reducer.exchange.later, "leave", lambda good, name=name: order.append(name) or True):
            reducer.put_rest()
            reducer.thread.queue.join()
    assert order == ["one", "two"] and second.setup.thread is first.thread
    for reducer in (first, second):
        assert reducer.exchanged()
        reducer.settle(False)
        reducer.close()
    assert first.thread.thread is None
