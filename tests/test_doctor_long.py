"""`thinwire doctor --peers` on long links: what several flows carry, what was lost, and what to set."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from thinwire.bench.link import accuracy as lab_bench
from thinwire.cli import main
from thinwire.doctor import advice, connection, flows, probe
from thinwire.doctor.advice import LocalTcp, advise
from thinwire.doctor.connection import ProtocolError, reach
from thinwire.doctor.flows import LongLink
from thinwire.doctor.peers import examine
from thinwire.lab import Network, Unavailable

PLAIN = LocalTcp("reno", ("reno", "cubic", "bbr"), True, 33_554_432, 4_194_304)
LINK = LongLink(0.1, 0.001, 4e6, 4e6, 8, 3.2e7, 3e7)


def two_machines(out: str) -> int:
    """Rank 0 listens until told that all is done; rank 1 measures it."""
    there = os.environ["MASTER_ADDR"]
    flows.LONGEST, connection.LONGEST = 1.5, 0.5
    if os.environ["RANK"] == "0":
        threading.Thread(target=main, args=(["doctor", "--listen", "--for", "60s"],), daemon=True).start()
        with socket.create_server((there, 29401)) as done:
            done.settimeout(60)
            done.accept()
        return 0
    lab_bench.connect((there, 29400)).close()  # rank 0 may be a moment behind
    status = main(["doctor", "--peers", there, "--json", out])
    lab_bench.connect((there, 29401)).close()
    return status


@pytest.mark.lab
@pytest.mark.timeout(120)
def test_a_long_and_lossy_link(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Loss is seen, flows carry more than one, the first advice is the first, and nothing goes on for ever."""
    out = tmp_path / "d.json"
    network = Network(hosts=2, rate="20mbit", latency="25ms", loss="1%", congestion="reno", preload=("thinwire.cli",))
    try:
        with network as net:
            results = net.run(two_machines, str(out), timeout=90)
    except Unavailable as reason:
        pytest.skip(str(reason))
    assert list(results) == [0, 0]
    assert all(seen.sent < connection.MOST + 3 * flows.MOST for seen in results.traffic.values())
    found = json.loads(out.read_text())["peers"][0]["long"]
    assert 0.002 < found["loss"] < 0.05 and found["round_trip"] >= 0.050
    assert found["many"] > 2 * found["one_both"] > 0
    said = capfd.readouterr().out
    lines = re.findall(r"29400: (a long link|first, on both machines: sysctl|at this loss|or without root)", said)
    assert lines == ["a long link", "first, on both machines: sysctl", "at this loss", "or without root"]


@pytest.fixture
def listener() -> Iterator[tuple[int, list[str]]]:
    """A listening side on loopback; its port, and what it heard."""
    heard: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        until = time.monotonic() + 4
        thread = threading.Thread(target=probe.serve, args=(server, until, lambda _, what: heard.append(what)))
        thread.start()
        yield server.getsockname()[1], heard
        thread.join()


@pytest.mark.slow
def test_on_loopback_every_flow_is_served(listener: tuple[int, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "LONG", 0.0)
    monkeypatch.setattr(flows, "LONGEST", 0.3)
    monkeypatch.setattr(flows, "GRACE", 0.1)
    port, heard = listener
    found = examine("127.0.0.1", port)
    assert found.ok and found.long is not None
    assert min(found.long.one_both, found.long.many, found.long.many_both) > 1e7
    assert found.long.loss is not None and found.long.loss < 0.5
    while threading.active_count() > 1 and heard.count("flows") < 4:  # the listener ends the last one after us
        time.sleep(0.01)
    assert heard.count("flows") == 4 and set(heard) == set(probe.ANSWERS)


@pytest.mark.slow
def test_what_may_not_be_asked(listener: tuple[int, list[str]]) -> None:
    for wrong in ({"count": 17}, {"count": 0}, {"count": True}, {"send": 1}, {"receive": "x"}):
        with reach(("127.0.0.1", listener[0])) as peer:
            peer.say({"thinwire": probe.VERSION, "do": "flows"})
            peer.say({"count": 2, "send": True, "receive": True} | wrong)
            with pytest.raises((ProtocolError, ConnectionError)):
                peer.hear()


@pytest.mark.parametrize("answer", [{"rate": -1.0}, {"rate": "x"}, {"rate": 1.0, "loss": 2.0}], ids=str)
def test_figures_that_cannot_be(answer: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flows, "transfer", lambda *_: (None, None))
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with server.accept()[0] as peer, socket.create_server(("127.0.0.1", 0)) as other:
                peer.sendall(json.dumps({"port": other.getsockname()[1]}).encode() + b"\n")
                with other.accept()[0]:
                    peer.sendall(json.dumps(answer).encode() + b"\n")
                    peer.recv(1000)

        thread = threading.Thread(target=serve)
        thread.start()
        with reach(server.getsockname()) as peer, pytest.raises(ProtocolError):
            flows.ask(peer, 1, True, False)
        thread.join()


def test_a_silent_flow_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flows, "LONGEST", 0.2)
    monkeypatch.setattr(flows, "GRACE", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server, reach(server.getsockname()) as ours, server.accept()[0]:
        assert flows.transfer([ours.peer], False, True) == (None, None)


def test_what_could_not_be_timed_is_asked_again_and_is_never_a_rate_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [flows.Carried(None, 2e6, 0.0), flows.Carried(1e6, 2e6, 0.01), *[flows.Carried(4e6, 4e6, 0.0)] * 9]
    monkeypatch.setattr(
        flows, "ask", lambda peer, count, send, receive: told.pop(0) if send and receive else one_way(send)
    )

    def one_way(send: bool) -> flows.Carried:
        return flows.Carried(3e6, None, 0.0) if send else flows.Carried(None, 5e6, 0.0)

    found = flows.measure(nullcontext, 0.1, 6e6)  # type: ignore[arg-type]
    assert found == LongLink(0.1, 0.01, 6e6, 1e6, flows.COUNT, 3e6, 4e6)
    monkeypatch.setattr(flows, "ask", lambda *_: flows.Carried(None, None, None))
    with pytest.raises(ProtocolError, match="twice"):
        flows.measure(nullcontext, 0.1, 6e6)  # type: ignore[arg-type]


def test_advice_of_a_lossy_link() -> None:
    lines = advise(LINK, PLAIN)
    assert len(lines) == 4
    assert "100 ms there and back, 0.1 % of packets sent again" in lines[0] and "8 flows 32mbit" in lines[0]
    assert lines[1].startswith("first") and "sysctl -w net.ipv4.tcp_slow_start_after_idle=0" in lines[1]
    assert "under reno carries about 4.47mbit" in lines[2] and "tcp_congestion_control=bbr" in lines[2]
    assert "[wire] streams = 7" in lines[3]


def test_advice_is_about_what_is_not_set_yet() -> None:
    assert len(advise(LINK, None)) == 1
    done = replace(PLAIN, congestion="bbr", slow_start_after_idle=False)
    assert len(advise(LINK, done)) == 1
    assert "modprobe tcp_bbr; sysctl" in advise(LINK, replace(PLAIN, available=("reno",)))[2]


def test_advice_of_a_fat_link() -> None:
    lines = advise(LongLink(0.1, 0.0, 2e8, 2e8, 8, 9e8, 9e8), PLAIN)
    assert "11.25 MB are under way, and one flow may have 2.60 MB" in lines[2]
    assert "net.ipv4.tcp_rmem='4096 131072 36290323' net.ipv4.tcp_wmem='4096 16384 36290323'" in lines[2]
    assert "[wire] streams = 4" in lines[3] and len(lines) == 4


def test_local_settings_are_read() -> None:
    found = advice.local_tcp()
    assert found is not None and found.congestion in found.available and found.window > 0
