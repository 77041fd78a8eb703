"""The lab's words: rates, times, topology files. Nothing here makes a network."""

from __future__ import annotations

import socket
import struct
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from thinwire.errors import UsageError
from thinwire.lab.delay import LATE, Lane
from thinwire.lab.shaping import ETHERNET, _netem, bundle_packets, burst_bytes, queue_bytes
from thinwire.lab.tcp import Tcp
from thinwire.lab.topology import HostLink, flat, load
from thinwire.quantities import parse_bytes, parse_loss, parse_rate, parse_time, show_bytes, show_duration, show_rate

SITES = """
[sites.paris]
rate = "1gbit"
latency = "0.1ms"
uplink = { up = "20mbit", down = "100mbit", latency = "15ms" }

[sites.tokyo]
rate = "500mbit"
uplink = "50mbit"

[[hosts]]
site = "paris"
count = 2

[[hosts]]
name = "slow"
site = "tokyo"
up = "10mbit"
"""


@pytest.mark.parametrize(
    ("text", "rate"), [("100mbit", 1e8), ("2.5gbit", 2.5e9), ("64 kbit", 64e3), ("1GBIT", 1e9), (5e6, 5e6)]
)
def test_rates(text: str | float, rate: float) -> None:
    assert parse_rate(text) == rate
    assert parse_rate(show_rate(rate)) == rate


@pytest.mark.parametrize(
    ("rate", "shown"),
    [(1158130.0, "1.16mbit"), (999_950.0, "1mbit"), (123_456_789.0, "123mbit"), (12_345.0, "12.3kbit")],
)
def test_rates_are_rounded_for_people(rate: float, shown: str) -> None:
    assert show_rate(rate) == shown


@pytest.mark.parametrize(
    ("text", "size"), [("10MB", 10_000_000), ("1.5 kB", 1500), ("7b", 7), ("2gb", 2 * 10**9), (12, 12)]
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size
    assert parse_bytes(show_bytes(size)) == size


@pytest.mark.parametrize("text", ["10", "10mbit", "MB", "-1MB", -1, True])
def test_bad_sizes(text: Any) -> None:
    with pytest.raises(UsageError, match="size"):
        parse_bytes(text)


def test_no_rate_is_no_limit() -> None:
    assert parse_rate(None) is None
    assert parse_rate("unlimited") is None
    assert show_rate(None) == "unlimited"


@pytest.mark.parametrize(("text", "seconds"), [("10ms", 0.01), ("250us", 250e-6), ("2s", 2.0), ("0", 0.0), (1.5, 1.5)])
def test_times(text: str | float, seconds: float) -> None:
    assert parse_time(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "bad",
    ["100", "5MB/s", "fast", "-3mbit", "", "0mbit", "1e400gbit", "1bit", "nanmbit", "10 furlong", "500gbit"],
)
def test_bad_rates_name_what_is_allowed(bad: str) -> None:
    with pytest.raises(UsageError, match="rate"):
        parse_rate(bad)


@pytest.mark.parametrize("bad", ["5", "10", "-1ms", "soon", "1week", float("nan"), -0.5])
def test_bad_times(bad: str | float) -> None:
    with pytest.raises(UsageError, match="time"):
        parse_time(bad)


def test_loss() -> None:
    assert parse_loss("0.5%") == pytest.approx(0.005)
    assert parse_loss(0.25) == 0.25
    for bad in ("100%", "-1%", "lots", 1.0):
        with pytest.raises(UsageError, match="loss"):
            parse_loss(bad)


def test_bytes_are_decimal() -> None:
    assert show_bytes(999) == "999 B"
    assert show_bytes(25e6) == "25.00 MB"
    shown = [show_duration(s) for s in (0.04, 9.949, 9.96, 59.4, 60, 3599.4, 3600, 7500)]
    assert shown == ["0.0 s", "9.9 s", "10 s", "59 s", "1 min 00 s", "59 min 59 s", "1 h 00 min", "2 h 05 min"]


@pytest.mark.parametrize("mtu", [576, 1500, 9000])
@pytest.mark.parametrize("rate", [1e4, 2e6, 1e8, 1e9, 1e11])
def test_burst_holds_a_packet_and_a_bundle_fits_the_burst(rate: float, mtu: int) -> None:
    assert burst_bytes(rate, mtu) >= 2 * (mtu + ETHERNET)
    assert bundle_packets(rate, mtu) >= 1 and bundle_packets(rate, mtu) * (mtu + ETHERNET) <= burst_bytes(rate, mtu)
    assert bundle_packets(None, mtu) * (mtu - 40) <= 1 << 16  # IP and TCP headers come once
    assert queue_bytes(rate, mtu) > burst_bytes(rate, mtu)


def test_burst_grows_with_the_rate() -> None:
    assert burst_bytes(1e9) == 10 * burst_bytes(1e8) >= 32_000


def test_flat_hosts_are_numbered() -> None:
    topology = flat(3, HostLink(up=1e8, down=1e8))
    assert [host.name for host in topology.hosts] == ["host0", "host1", "host2"]
    assert [host.address for host in topology.hosts] == ["10.77.0.1", "10.77.0.2", "10.77.0.3"]
    assert len({host.mac for host in topology.hosts}) == 3
    assert set(topology.links) == {"host0", "host1", "host2"}


@pytest.mark.parametrize("hosts", [0, -1, 255, 1000])
def test_host_counts_out_of_range(hosts: int) -> None:
    with pytest.raises(UsageError, match="hosts"):
        flat(hosts, HostLink())


@pytest.mark.parametrize("mtu", [0, 575, 9217, True, 1500.0, "9000"])
def test_packets_out_of_range(mtu: Any) -> None:
    with pytest.raises(UsageError, match=r"mtu .*from 576 to 9216"):
        flat(2, HostLink(), mtu=mtu)


def test_254_hosts_have_addresses() -> None:
    assert flat(254, HostLink()).hosts[-1].address == "10.77.0.254"


def test_sites(tmp_path: Path) -> None:
    settings = 'mtu = 9000\ncongestion = "bbr"\nwindow = "16MB"\nslow_start_after_idle = false\n'
    (tmp_path / "sites.toml").write_text(settings + SITES.replace('up = "10mbit"', 'up = "10mbit"\nreorder = "1%"'))
    topology = load(tmp_path / "sites.toml")
    assert topology.mtu == 9000
    assert topology.tcp == Tcp("bbr", 16_000_000, False)
    assert topology.reordered and topology.by_packet
    assert [(host.name, host.site) for host in topology.hosts] == [
        ("paris-0", "paris"),
        ("paris-1", "paris"),
        ("slow", "tokyo"),
    ]
    assert topology.hosts[0].link == HostLink(up=1e9, down=1e9, latency=1e-4)
    assert topology.hosts[2].link == HostLink(up=1e7, down=5e8, reorder=0.01)
    assert topology.links["paris"] == HostLink(up=2e7, down=1e8, latency=0.015)
    assert topology.links["tokyo"] == HostLink(up=5e7, down=5e7)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (('site = "tokyo"', 'site = "oslo"'), "'oslo'; the sites are paris, tokyo"),
        (("count = 2", "count = 0"), "count 0"),
        (("count = 2", "count = 300"), "302|301 hosts"),
        (('up = "10mbit"', 'up = "10 parsecs"'), "host slow up '10 parsecs'"),
        (('up = "10mbit"', 'speed = "10mbit"'), "unknown key 'speed'"),
        (('name = "slow"', 'name = "paris"'), "used twice"),
        (('name = "slow"', 'name = "a b"'), "'a b'"),
        (('latency = "15ms"', 'latency = "1h"'), "up to 10s"),
        (("[sites.paris]", "[sites.paris"), "not TOML"),
        (("[[hosts]]", "[[machines]]"), "unknown key 'machines'"),
        (("[sites.tokyo]", "[site.tokyo]"), "unknown key 'site'"),
        (("[sites.paris]", "congestion = 3\n[sites.paris]"), "congestion 3: allowed is a name"),
        (("[sites.paris]", 'window = "16"\n[sites.paris]'), "window '16': write a number and one of the units B, kB"),
        (("[sites.paris]", 'window = "1B"\n[sites.paris]'), "window 1: allowed is 65536 bytes to"),
        (("[sites.paris]", "slow_start_after_idle = 0\n[sites.paris]"), "slow_start_after_idle 0: allowed is true"),
        (("count = 2", 'reorder = "often"'), "reorder 'often'"),
    ],
)
def test_bad_topologies_give_one_line(tmp_path: Path, change: tuple[str, str], complaint: str) -> None:
    (tmp_path / "bad.toml").write_text(SITES.replace(*change))
    with pytest.raises(UsageError, match=complaint) as caught:
        load(tmp_path / "bad.toml")
    assert "\n" not in str(caught.value)


def test_topology_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        load(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not TOML"):
        load(tmp_path / "binary.toml")


def test_a_reordered_packet_comes_behind_its_followers() -> None:
    """The second of five is late: it is sent last, after its LATE seconds; nothing is lost."""
    (ends, source), (target, arrived) = (socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2))
    for port in (ends, source, target, arrived):
        port.setblocking(False)
    chance = mock.Mock(random=mock.Mock(side_effect=[0.9, 0.1, 0.9, 0.9, 0.9]))
    lane = Lane(source, target, 0.0, reorder=0.5)
    with ends, source, target, arrived:
        for number in range(5):
            ends.send(bytes([number]))
        lane.take(chance)
        again = lane.give(time.monotonic())
        assert [arrived.recv(9)[0] for _ in range(4)] == [0, 2, 3, 4]
        assert 0 < again - time.monotonic() <= LATE
        assert lane.give(again) == float("inf") and arrived.recv(9)[0] == 1


def test_netem_speaks_the_kernels_units() -> None:
    """10 ms is 156250 ticks of 64 ns; a loss of 1 is all 32 bits. (For kernels that have netem.)"""
    body = _netem(0.010, 0.25, 1e8)
    latency, limit, loss, gap, duplicate, jitter = struct.unpack("6I", body[-24:])
    assert (latency, loss, gap, duplicate, jitter) == (156250, round(0.25 * 0xFFFFFFFF), 0, 0, 0)
    assert limit >= 1000
    assert b"netem\0" in body
