"""A network does what it says: rates, counters, isolation, changes while it runs."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import lab_programs
import pytest
from lab_support import require_network

from thinwire.bench.link import accuracy as bench
from thinwire.errors import UsageError
from thinwire.lab import Network, RankFailed, check

pytestmark = [pytest.mark.lab, pytest.mark.timeout(90)]
require_network()

SITES = """
[sites.near]
uplink = {up = "10mbit", down = "40mbit"}
[sites.far]
uplink = {rate = "20mbit", latency = "4ms"}
[[hosts]]
site = "near"
count = 2
[[hosts]]
site = "far"
"""


@pytest.fixture(scope="module")
def net() -> Iterator[Network]:
    """Two hosts with torch at hand, for every test that leaves them as they were."""
    with Network(hosts=2, rate="100mbit", preload=("torch.distributed",)) as network:
        yield network


def of_nominal(network: Network, rate: float, seconds: float) -> float:
    """Raw TCP against the nominal rate; the best of three, since other work shares the machine's cores."""
    best = 0.0
    for _ in range(3):
        row = bench.measure(network, "raw TCP", bench.tcp, rate, max(1_000_000, round(rate / 8 * seconds)))
        best = max(best, row["of_nominal"])
        if best > 0.92:
            break
    return best


@pytest.mark.parametrize(("rate", "seconds"), [("2mbit", 1), ("20mbit", 0.7), ("200mbit", 0.7), ("1gbit", 1)])
def test_raw_tcp_within_ten_per_cent_of_the_rate(net: Network, rate: str, seconds: float) -> None:
    nominal = {"2mbit": 2e6, "20mbit": 2e7, "200mbit": 2e8, "1gbit": 1e9}[rate]
    for host in net.hosts:
        net.set_rate(host.name, rate)
    assert 0.9 <= of_nominal(net, nominal, seconds) <= 1.02


@pytest.mark.parametrize("test", [bench.tcp, bench.gloo_send, bench.gloo_all_reduce])
@pytest.mark.parametrize("size", [1_000_000, 20_000_000])
def test_counters_are_the_payload_and_headers(net: Network, test: object, size: int) -> None:
    for host in net.hosts:
        net.set_rate(host.name, "10mbit" if size == 1_000_000 else "300mbit")
    results = net.run(test, size, timeout=60)
    slack = 0.05 * size + 65536
    assert size <= results.traffic["host0"].sent <= size + slack
    assert size <= results.traffic["host1"].received <= size + slack


def test_a_quiet_network_counts_nothing() -> None:
    with Network(hosts=3, rate="10mbit", preload=()) as network:
        results = network.run(["sleep", "0.5"])
        assert all(seen.sent + seen.received < 2000 for seen in results.traffic.values())


def test_variables_results_and_output(net: Network, capsys: pytest.CaptureFixture[str]) -> None:
    results = net.run(lab_programs.whoami, "hello", per_host=2)
    assert [value["RANK"] for value in results] == ["0", "1", "2", "3"]
    assert [value["LOCAL_RANK"] for value in results] == ["0", "1", "0", "1"]
    assert [value["GROUP_RANK"] for value in results] == ["0", "0", "1", "1"]
    last = results[-1]
    assert last["WORLD_SIZE"] == "4" and last["LOCAL_WORLD_SIZE"] == "2"
    assert last["MASTER_ADDR"] == net.hosts[0].address
    assert last["GLOO_SOCKET_IFNAME"] == last["NCCL_SOCKET_IFNAME"] == "eth0"
    assert "host1.0 | hello from host1" in capsys.readouterr().out
    assert len(results) == 4 and results.seconds > 0
    assert net.run(lab_programs.whoami, "again")[0]["MASTER_PORT"] != last["MASTER_PORT"]


def test_commands_and_environment(net: Network, capsys: pytest.CaptureFixture[str]) -> None:
    code = "import os; print(os.environ['RANK'], os.environ['FLAVOUR'], os.getuid())"
    results = net.run([sys.executable, "-c", code], env={"FLAVOUR": "sour"})
    assert list(results) == [None, None]
    said = capsys.readouterr().out
    assert f"host0 | 0 sour {os.getuid()}" in said and f"host1 | 1 sour {os.getuid()}" in said


def test_hosts_reach_each_other_by_name_and_nothing_else(net: Network) -> None:
    for found in net.run(lab_programs.reach):
        assert found.pop("devices") in ("eth0,lo", ",".join(sorted(os.listdir("/sys/class/net"))))
        assert all("unreachable" in error for error in found.values()), found
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert list(net.run(lab_programs.connect_to, port)) == ["ConnectionRefusedError"] * 2
    command = "import socket; assert [socket.gethostbyname(f'host{i}')[-4:] for i in (0, 1)] == ['.0.1', '.0.2']"
    net.run([sys.executable, "-c", command])


def test_a_rank_cannot_reshape_its_link(net: Network) -> None:
    code = (
        "from thinwire.lab.netlink import Netlink, index_of\n"
        "try: Netlink().delete_qdisc(index_of('eth0'), 0xFFFFFFFF)\n"
        "except PermissionError: raise SystemExit(7)"
    )
    with pytest.raises(RankFailed) as failed:
        net.run([sys.executable, "-c", code], env={"PYTHONPATH": os.pathsep.join(sys.path)}, echo=False)
    assert failed.value.status == 7


def test_hosts_go_by_the_same_tcp_on_every_machine(net: Network) -> None:
    assert set(net.run(lab_programs.congestion_control)) <= {"cubic", "reno"}


def test_hosts_go_by_what_they_are_told() -> None:
    allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()
    choice = allowed[-1]
    with Network(hosts=1, congestion=choice, window="16MB", slow_start_after_idle=False, preload=()) as network:
        assert list(network.run(lab_programs.congestion_control)) == [choice]
        settings = network.run(lab_programs.tcp_settings)[0]
    assert settings == {"tcp_rmem": 32_000_000, "tcp_wmem": 32_000_000, "tcp_slow_start_after_idle": 0}


def test_latency_is_one_way_and_the_rate_holds() -> None:
    with Network(hosts=2, rate="100mbit", latency="20ms", preload=()) as network:
        assert network.delay in ("netem", "user space")
        assert 0.040 <= network.run(lab_programs.round_trip, 8)[1] < 0.055
        row = bench.measure(network, "raw TCP", bench.tcp, 1e8, 25_000_000)
        assert 0.6 < row["of_nominal"] < 1.0  # TCP opens its window over the first round trips


def test_jumbo_frames_go_through_sites_and_switches_whole(net: Network, tmp_path: Path) -> None:
    assert list(net.run(lab_programs.whole_packet, 1472)) == [1472, 1472]  # IP and UDP headers take 28
    assert list(net.run(lab_programs.whole_packet, 1473)) == [0, 0]
    (tmp_path / "two.toml").write_text('mtu = 9000\n[sites.a]\n[sites.b]\n[[hosts]]\nsite = "a"\nname = "host0"\n'
                                       '[[hosts]]\nsite = "b"\nname = "host1"\n')  # fmt: skip
    late = Network(2, latency="1ms", mtu=9000, preload=())
    for network in (
        Network(2, "5mbit", mtu=9000, preload=()),
        late,
        Network(topology=tmp_path / "two.toml", preload=()),
    ):
        with network:
            assert list(network.run(lab_programs.whole_packet, 8972)) == [8972, 8972]
            assert list(network.run(lab_programs.whole_packet, 8973)) == [0, 0]


def test_loss_is_seen_and_survived() -> None:
    with Network(hosts=2, rate="50mbit", loss="2%", preload=()) as network:
        row = bench.measure(network, "raw TCP", bench.tcp, 5e7, 3_000_000)
        assert row["counted_of_payload"] > 1.05  # headers of single packets, and what was sent again


def test_sites_share_their_uplink(tmp_path: Path) -> None:
    (tmp_path / "sites.toml").write_text(SITES)
    with Network(topology=tmp_path / "sites.toml", preload=()) as network:
        assert [host.name for host in network.hosts] == ["near-0", "near-1", "far-0"]
        inside = network.run(lab_programs.tcp_between, 0, 1, 2_000_000)
        across = network.run(lab_programs.tcp_between, 0, 2, 2_000_000)
        back = network.run(lab_programs.tcp_between, 2, 0, 2_000_000)
        assert inside.traffic["near"].sent < 10_000 and inside.seconds < 1.0
        assert across.traffic["near"].sent >= 2_000_000
        assert 0.8 < across[2] / 1.6 < 1.25  # 16 Mbit through near's 10 Mb/s up, and not its 40 down
        assert 0.8 < back[0] / 0.8 < 1.4  # through far's 20 up


def test_rates_and_links_change_while_a_program_runs() -> None:
    with Network(hosts=2, rate="100mbit", preload=()) as network:
        job = network.start(lab_programs.drip, "plain")

        def settles(low: float, high: float, patience: float = 8.0) -> bool:
            """Whether host 0 soon sends at a rate between these; what is under way has to pass first."""
            until = time.monotonic() + patience
            while time.monotonic() < until:
                before, began = job.traffic()["host0"].sent, time.monotonic()
                assert not job.watch(0.4)
                if low <= (job.traffic()["host0"].sent - before) * 8 / (time.monotonic() - began) <= high:
                    return True
            return False

        assert settles(0.85e8, 1.1e8)
        network.set_rate("host0", up="8mbit")
        assert settles(6.5e6, 9e6)
        network.set_rate("host0", up="100mbit")
        assert settles(0.85e8, 1.1e8)
        network.set_rate("host1", down="20mbit")
        assert settles(1.6e7, 2.4e7)
        network.set_rate("host1", up="50mbit")  # and still receives at 20
        assert not settles(4e7, 1e12, 1.5) and settles(1.6e7, 2.4e7)
        network.set_rate(0, "unlimited")
        network.set_rate(1, "unlimited")
        assert settles(2e8, 1e12)
        network.link_down("host1")
        assert settles(0, 1e6)
        network.link_up("host1")
        assert settles(2e8, 1e12)
        job.pause(1)
        assert settles(0, 1e6)
        job.resume(1)
        assert settles(2e8, 1e12)
        job.stop()


def test_sixteen_hosts_and_gloo_ranks_come_up_fast() -> None:
    with Network(hosts=16, rate="1gbit", preload=("torch.distributed",)) as network:
        assert network.setup_seconds < 2.0
        began = time.monotonic()
        assert list(network.run(lab_programs.all_reduce, 1)) == [16.0] * 16
        busy = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))  # other work on these cores stretches time
        assert time.monotonic() - began < 10.0 * busy  # importing torch included


def test_sixty_four_hosts() -> None:
    with Network(hosts=64, rate="10mbit", latency="1ms", preload=()) as network:
        results = network.run(lab_programs.everyone_greets_the_next)
        assert list(results) == [f"hello from {(rank - 1) % 64}" for rank in range(64)]


def test_refused_with_one_line(net: Network) -> None:
    def local() -> None: ...

    for call, complaint in (
        (lambda: net.run(local), "top level"),
        (lambda: net.run(["no-such-program"]), "no-such-program"),
        (lambda: net.run(lab_programs.sleep, 0, per_host=0), "per_host"),
        (lambda: net.set_rate("host9", "1mbit"), "host9"),
        (lambda: net.set_rate("host0", "1 parsec"), "parsec"),
        (lambda: net.set_rate("host0"), "needs"),
        (lambda: net.link_down(7), "7"),
    ):
        with pytest.raises(UsageError, match=complaint) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_check_says_what_works() -> None:
    findings = check()
    assert [finding.ok for finding in findings] == [True, True]
    assert "netem" in findings[1].detail
