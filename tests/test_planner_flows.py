"""What one flow carries, and how many are chosen."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.planner.flows import GOAL, MOST, choose_streams, one_flow

RTT = st.floats(1e-4, 2.0)
LOSS = st.floats(1e-6, 0.2)
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
