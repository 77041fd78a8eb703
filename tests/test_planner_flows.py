"""What one flow carries, and how many are chosen."""

from __future__ import annotations

import itertools
import math
import os
import socket
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.distributed import packets
from thinwire.planner.flows import GOAL, INITIAL, MOST, choose_streams, one_flow, slow_start, under_way
from thinwire.planner.schedule import generate
from thinwire.planner.simulate import simulate
from thinwire.planner.step import Send, Traffic
from thinwire.train.tune import timing
from thinwire.train.tune.measured import Measured

RTT = st.floats(1e-4, 2.0)
LOSS = st.floats(1e-6, 0.2)
LONG = {("forward", 0): 60.0}  # seconds of silence, by connection
NAMES = st.sampled_from(["reno", "cubic", "bbr", "vegas"])


def test_mathis_at_100_ms_and_a_thousandth() -> None:
    assert one_flow(0.1, 0.001, "reno") == pytest.approx(4.47e6, rel=0.01)  # 5 % of 100 Mb/s
    assert one_flow(0.1, 0.01, "reno") == pytest.approx(1.41e6, rel=0.01)


def test_what_does_not_limit() -> None:
    assert one_flow(0.0, 0.1, "reno") == math.inf
    assert one_flow(0.1, 0.0, "reno") == one_flow(0.1, 0.01, "bbr") == 8 * 2_600_000 / 0.1
    assert one_flow(0.1, 0.0, "reno", 16e6) == 8 * 16e6 / 0.1


def test_cubic_passes_reno_where_losses_are_rare() -> None:
    assert one_flow(0.1, 1e-5, "cubic", 1e9) > 2 * one_flow(0.1, 1e-5, "reno", 1e9)
    assert one_flow(0.01, 1e-2, "cubic") == one_flow(0.01, 1e-2, "reno")


@pytest.mark.parametrize(
    ("link", "streams"),
    [
        ((1e8, 0.1, 0.001, "reno"), 21),
        ((1e8, 0.1, 0.01, "reno"), MOST),
        ((2e7, 0.1, 0.001, "reno"), 5),
        ((1e8, 0.1, 0.001, "bbr"), 1),
        ((1e9, 0.1, 0.0, "cubic"), 5),
        ((1e8, 0.001, 0.0, "cubic"), 1),
        ((1e8, 0.0, 0.01, "reno"), 1),
    ],
)
def test_choices(link: tuple[float, float, float, str], streams: int) -> None:
    assert choose_streams(*link) == streams
    assert choose_streams(*link, window=1e9) <= streams


@given(rate=st.floats(1e4, 1e11), rtt=RTT, loss=LOSS, name=NAMES)
def test_as_few_as_are_enough(rate: float, rtt: float, loss: float, name: str) -> None:
    streams, alone = choose_streams(rate, rtt, loss, name), one_flow(rtt, loss, name)
    assert 1 <= streams <= MOST
    assert streams == MOST or streams * alone >= GOAL * rate * (1 - 1e-9)
    assert streams == 1 or (streams - 1) * alone < GOAL * rate


@given(
    nbytes=st.floats(1, 1e9), rate=st.floats(1e5, 1e10), rtt=st.floats(1e-5, 0.5), streams=st.integers(1, 64)
)  # fmt: skip
def test_slow_start_costs_a_round_trip_per_doubling_at_most(nbytes, rate, rtt, streams) -> None:
    extra = slow_start(nbytes, rate, rtt, streams)
    rounds = math.ceil(math.log2(max(1.0, min(nbytes, 2 * rate * rtt / 8) / INITIAL)) + 1)
    assert 0 <= extra <= rtt * rounds
    if nbytes <= INITIAL * streams or 8 * INITIAL * streams >= rate * rtt:
        assert extra == 0


def test_slow_start_of_256_kB_over_50_ms() -> None:
    """Windows of 15, 29, 58 and 116 kB at 100 Mb/s: four answers to wait for, less what is sent meanwhile."""
    found = slow_start(256e3, 1e8, 0.1, silence=60.0)
    assert found == pytest.approx(4 * 0.1 - 8 * 15 * INITIAL / 1e8)


def test_the_first_messages_of_a_step_pay_for_the_silence() -> None:
    """All together what slow start adds to their bytes, no message less than nothing; nothing where it is off."""
    for rate, latency, nbytes, count in itertools.product((1e6, 1e8), (0.0, 0.05), (1e3, 1e5, 1e6), (1, 4, 16)):
        measured = Measured(
            [0.1] * 2, [0.2] * 2, {"forward": [rate, 0.0]}, {"forward": [latency, 0.0]}, {"forward": [nbytes]},
            {"forward": [[0.0, 0.0]]}, {},
        )  # fmt: skip
        hops = [measured._hop("forward", 0, 0, part, count, LONG) for part in range(count)]
        assert all(hop.wire >= 8 * nbytes / rate - 1e-12 and hop.latency == latency for hop in hops)
        added = sum(hop.wire for hop in hops) - count * 8 * nbytes / rate
        assert added == pytest.approx(slow_start(count * nbytes, rate, 2 * latency, silence=60.0), abs=1e-9)
        off = replace(measured, restarts=False)._hop("forward", 0, 0, 0, count, LONG)
        assert off.wire == 8 * nbytes / rate


def test_a_silence_is_as_long_as_the_simulated_step_leaves_it() -> None:
    """Of a step that computes for long the first message starts slowly; of a short one, or where the machine does not
    have it, none does."""
    levels = dict.fromkeys(("forward", "backward", "gradient", "embedding"), 0)

    def first(seconds: float, restarts: bool) -> float:
        ways = {"forward": [1e8, 0.0], "backward": [0.0, 1e8]}
        late = {way: [0.05, 0.05] for way in ways}
        measured = Measured(
            [seconds] * 2, [seconds] * 2, ways, late, {way: [5e4] for way in ways},
            {way: [[0.0, 0.0]] for way in ways}, {}, restarts=restarts,
        )  # fmt: skip
        step = measured.step(generate("1F1B", 2, 4), levels)
        return step.hop(Send(Traffic.FORWARD, 0, 0)).wire

    assert first(0.01, True) == first(1.0, False) == pytest.approx(8 * 5e4 / 1e8)
    assert first(1.0, True) > 0.1 > first(0.01, True)


def test_loss_holds_windows_down() -> None:
    """From what is usually under way on, a window grows by a packet per round trip; BBR knows no such limit."""
    usual = under_way(0.1, 1e-3, "reno")
    assert usual == pytest.approx(one_flow(0.1, 1e-3, "reno") * 0.1 / 8)
    assert math.isinf(under_way(0.1, 1e-3, "bbr")) and math.isinf(under_way(0.1, 0.0, "reno"))
    seconds = [slow_start(440_000, 1e8, 0.1, streams, 60.0, usual=usual) for streams in (1, 8)]
    assert seconds[0] > 0.9 > 0.3 > seconds[1], "one flow takes ten round trips, eight take three"
    assert slow_start(440_000, 1e8, 0.1, silence=60.0) == slow_start(440_000, 1e8, 0.1, silence=60.0, usual=math.inf)


def test_a_lossy_link_is_simulated_by_its_windows() -> None:
    """Its rate is the best that was seen; an exchange takes no longer than its bytes do there, and what TCP adds."""
    levels = dict.fromkeys(("forward", "backward", "gradient", "embedding"), 0)
    ways = {"forward": [7e6, 0.0], "backward": [0.0, 4e7]}
    clean = Measured(
        [0.03] * 2, [0.05] * 2, ways, {way: [0.05] * 2 for way in ways}, {way: [25_000.0] for way in ways},
        {way: [[0.0, 0.0]] for way in ways}, {"gradient": [[0.7, 0.7]]}, {"gradient": [[0.05, 0.05]]},
        burst={"gradient": [[440_000.0] * 2]}, slowest=[7e6, 0.05],
    )  # fmt: skip
    lossy = clean.with_loss(1e-3, under_way(0.1, 1e-3, "reno"))
    assert lossy.rate == {"forward": [4e7, 0.0], "backward": [0.0, 4e7]} and lossy.slowest == [4e7, 0.05]
    assert lossy.exchange["gradient"] == [[pytest.approx(0.05 + 8 * 440_000 / 4e7)] * 2]
    steps = [
        simulate(some.step(generate("1F1B", 2, 4), levels)).makespan for some in (lossy, replace(lossy, streams=8))
    ]
    assert steps[0] > 1.5 * steps[1]


def test_packets_of_this_process_are_counted() -> None:
    """Those of its TCP connections, and no descriptor is left open; a round counts no more than a few sent again."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            opened, count = len(os.listdir("/proc/self/fd")), packets.LossCount()
            with count.round():
                for _ in range(5):
                    one.sendall(b"x" * 1000)
                    other.recv(1000, socket.MSG_WAITALL)
            assert count.packets >= 5 and count.lost == 0 and count.share == 0
            assert len(os.listdir("/proc/self/fd")) == opened
    with mock.patch.object(packets, "of_this_process", side_effect=[(0, 0), (500, 1000)]), count.round():
        pass
    assert count.lost == packets.MOST and 0 < count.share < 0.01


def test_a_rank_that_trains_nothing_has_no_optimiser_to_time() -> None:
    assert timing._optimizer_seconds({}) == 0.0
    assert timing._optimizer_seconds({"x": torch.nn.Parameter(torch.zeros(3, 4))}) > 0
