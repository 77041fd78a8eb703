"""`thinwire doctor --listen` and `--peers`: two machines of the lab, loopback, and what can be wrong between them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.bench.link import accuracy as lab_bench
from thinwire.cli import main
from thinwire.doctor import connection, probe
from thinwire.doctor.connection import Connection, ProtocolError, reach
from thinwire.doctor.interfaces import address_of, gloo_choice, interface_of
from thinwire.doctor.peers import Peer, diagnose, examine, gloo_advice, read_place, verdict
from thinwire.errors import UsageError
from thinwire.lab import Network, Unavailable

ROOT = Path(__file__).parent.parent
RATE = 2e7
READY = Peer(
    "b:29400", local="10.0.0.1", interface="wg0", seen_as="10.0.0.1", round_trip=0.02, download=2e7, upload=1e7,
    mtu=1420, clock=0.0, ports_there=True, ports_here=True,
)  # fmt: skip


def two_machines(out: str) -> int:
    """Rank 0 listens until told that all is done; rank 1 measures it, and a port of it where nothing is."""
    os.environ.pop("GLOO_SOCKET_IFNAME", None)  # the lab's; without it Gloo goes by the host's name
    there = os.environ["MASTER_ADDR"]
    if os.environ["RANK"] == "0":
        threading.Thread(target=main, args=(["doctor", "--listen", "--for", "60s"],), daemon=True).start()
        with socket.create_server((there, 29401)) as done:
            done.settimeout(60)
            done.accept()
        return 0
    lab_bench.connect((there, 29400)).close()  # rank 0 may be a moment behind
    status = main(["doctor", "--peers", there, f"{there}:29555", "--json", out])
    lab_bench.connect((there, 29401)).close()
    return status


def measured(net: Network, out: Path) -> dict[str, Any]:
    """What the two machines found; the best rates of three tries, since other work shares the machine's cores."""
    best = {"download": 0.0, "upload": 0.0}
    for _ in range(3):
        results = net.run(two_machines, str(out), timeout=60)
        assert list(results) == [0, 1]
        assert all(seen.sent < connection.MOST + 1_000_000 for seen in results.traffic.values())
        told: dict[str, Any] = json.loads(out.read_text())
        best = {way: max(rate, told["peers"][0][way]) for way, rate in best.items()}
        if min(best.values()) > 0.85 * RATE:
            break
    told["peers"][0] |= best
    return told


@pytest.mark.lab
@pytest.mark.timeout(120)
@pytest.mark.parametrize("latency", [0.0, 0.008])  # longer ones: test_doctor_long.py
def test_two_machines_at_20_mbit(latency: float, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Rates within 15 % of nominal, a round trip of two latencies; a dead port is one clear line and status 1."""
    try:
        with Network(hosts=2, rate=RATE, latency=latency, preload=("thinwire.cli",)) as net:
            told = measured(net, tmp_path / "d.json")
            lab_itself = lab_bench.measure(net, "raw TCP", lab_bench.tcp, RATE, 2_000_000)["measured"]
    except Unavailable as reason:
        pytest.skip(str(reason))
    good, dead = told["peers"]
    assert good["ok"] and good["ports_there"] and good["ports_here"]
    assert good["round_trip"] >= 2 * latency and good["local"] == good["seen_as"]
    assert good["mtu"] == 1500 and abs(good["clock"]) < 0.5
    assert told["gloo_address"] == good["local"] and "right for these peers" in told["gloo"]
    assert not dead["ok"] and "nothing listens on port 29555" in dead["problem"]
    said = capfd.readouterr().out
    assert re.search(r"ready. What to expect: thinwire plan out/train --rate \d+(\.\d)?mbit", said)
    assert ":29555: NOT READY: nothing listens on port 29555 there. What to do: start `thinwire doctor" in said
    rates = good["download"], good["upload"]
    assert max(rates) < 1.05 * RATE
    busy = lab_itself <= 0.85 * RATE or os.getloadavg()[0] > 4 * (os.cpu_count() or 1)
    if min(rates) <= 0.85 * RATE and latency and busy:
        told_by_lab = f"the lab's own transfer had {lab_itself / 1e6:.1f} Mb/s, load {os.getloadavg()[0]:.0f}"
        pytest.skip(f"this machine is too busy to delay packets in user space: {told_by_lab}")
    assert min(rates) > 0.85 * RATE


@pytest.fixture
def listener() -> Iterator[int]:
    """A listening side on loopback; its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=probe.serve, args=(server, time.monotonic() + 3, lambda *_: None))
        thread.start()
        yield server.getsockname()[1]
        thread.join()


def test_loopback_survives_strangers(listener: int) -> None:
    """Garbage, a wrong version, a port it must not connect to: dropped; who comes after them is served."""
    for line in (b"GET / HTTP/1.0\r\n\r\n", b"[1]\n", b'{"thinwire": 9, "do": "hello"}\n', b"\xff\n", b"x" * 2000,
                 b'{"thinwire": 2, "do": []}\n', b'{"thinwire": true, "do": {}}\n', b"[" * 499 + b"\n"):  # fmt: skip
        with reach(("127.0.0.1", listener)) as peer:
            peer.send(line)
    for port in (22, "abc", [1], 10**400, True, None, 2000.5):
        with reach(("127.0.0.1", listener)) as peer:
            peer.say({"thinwire": probe.VERSION, "do": "back"})
            peer.say({"port": port})
            with pytest.raises((ProtocolError, ConnectionError)):
                peer.hear()
    found = examine("127.0.0.1", listener)
    assert found.ok and found.interface == "lo" and found.download and found.download > 1e8
    assert found.round_trip is not None and found.round_trip < 0.1


def test_a_success_says_nothing_of_failures() -> None:
    """The asker drops its connections when it has measured enough: the listener takes that as the end of an answer."""
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        until = time.monotonic() + 3
        thread = threading.Thread(target=probe.serve, args=(server, until, lambda _, what: said.append(what)))
        thread.start()
        assert examine("127.0.0.1", server.getsockname()[1]).ok
        thread.join()
    assert set(said) == set(probe.ANSWERS) - {"flows"}, said  # those are for long links


def test_a_reset_before_the_listener_is_done_ends_its_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        asker = reach(server.getsockname())
        peer = server.accept()[0]
        asker.drop()
        with peer:
            probe._download(Connection(peer), "")  # its shutdown finds no connection any more


def answering(reply: bytes) -> tuple[socket.socket, threading.Thread]:
    """A server of something else, for one visitor."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with server.accept()[0] as peer:
            peer.sendall(reply)
            peer.recv(1000)

    thread = threading.Thread(target=serve)
    thread.start()
    return server, thread


@pytest.mark.parametrize("reply", [b"SSH-2.0-OpenSSH_9.9\r\n", b"{}\n", b"x" * 5000])
def test_something_else_on_the_port(reply: bytes) -> None:
    server, thread = answering(reply)
    with server:
        found = examine("127.0.0.1", server.getsockname()[1])
    thread.join()
    assert found.problem == "something else listens there" and "--listen" in found.remedy


HELLO = {"thinwire": probe.VERSION, "address": "127.0.0.1", "time": 1e9}
ESCAPE = "\x1b[2J\x1b[1;31mb:29400: ready.\r\n\u202e"


@pytest.mark.parametrize(
    "change",
    [{"address": ESCAPE}, {"address": [1]}, {"time": 10**400}, {"time": True}, {"time": "now"}, {"thinwire": [1]}],
    ids=str,
)
def test_a_peer_that_says_something_else_is_not_believed(change: dict[str, Any]) -> None:
    server, thread = answering(json.dumps(HELLO | change).encode() + b"\n")
    with server:
        found = examine("127.0.0.1", server.getsockname()[1])
    thread.join()
    assert found.problem == "something else listens there"


@pytest.mark.parametrize("question", [probe.port_there, probe.port_here, probe.upload])
@pytest.mark.parametrize("value", ["abc", [1], 10**400, -1, ESCAPE, {}, 1e400, True], ids=lambda value: f"{value!r:.9}")
def test_answers_of_other_types_are_one_clean_line(question: Any, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "pour", lambda _: None)
    if question is not probe.upload and value is True:
        value = 1
    server, thread = answering(json.dumps(dict.fromkeys(("port", "ok", "rate"), value)).encode() + b"\n")
    with server, reach(server.getsockname()) as peer, pytest.raises(ProtocolError) as caught:
        question(peer)
    thread.join()
    assert str(caught.value).isprintable() and len(str(caught.value)) < 80


@given(st.text())
def test_what_is_shown_is_one_short_line(text: str) -> None:
    shown = connection.clean(text)
    assert shown.isprintable() and len(shown) <= connection.SHOWN + 1


def test_a_connection_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte at a time, each in time, does not hold the listener for longer than a connection may last."""
    monkeypatch.setattr(connection, "SECONDS", 0.5)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        peer = FakeTcp(ours)
        stop = threading.Event()
        dripping = threading.Thread(target=drip, args=(theirs, stop))
        dripping.start()
        with pytest.raises((ProtocolError, TimeoutError), match=r"it takes longer|timed out"):
            peer.hear()
        stop.set()
        dripping.join()


def test_a_connection_takes_no_more_than_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a measurement's bytes what is still on its way is read to a bound, not for as long as it comes."""
    monkeypatch.setattr(connection, "MOST", 100_000)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        taken = threading.Thread(target=lambda: expect_refusal(FakeTcp(ours)))
        taken.start()
        theirs.settimeout(10)
        sent = 0
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, TimeoutError):
            while sent < 10_000_000:
                sent += theirs.send(bytes(10_000))
        taken.join()
    assert sent < 1_000_000  # what was taken, and the kernel's own buffers


def expect_refusal(peer: Connection) -> None:
    with pytest.raises(ProtocolError, match="more than 100000 bytes"):
        probe._upload(peer, "")
    peer.peer.close()


class FakeTcp(Connection):
    """Over a pair of sockets that are not TCP's."""

    def __init__(self, peer: socket.socket) -> None:
        self.peer = peer
        self.until = time.monotonic() + connection.SECONDS
        self.room = connection.MOST + connection.LINE


def drip(peer: socket.socket, stop: threading.Event) -> None:
    while not stop.wait(0.02):
        peer.send(b" ")


def unknown(*_: object, **__: object) -> None:
    """A look-up that fails, without asking any server."""
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def test_names_and_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PATIENCE", 0.2)
    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", unknown)
        assert "is not known here" in examine("no-such-host", 29400).problem
    with socket.socket() as silent:  # bound, full queue: connections hang as behind a firewall that drops
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        place = silent.getsockname()
        fillers = [socket.socket() for _ in range(3)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(place)
        found = examine(*place)
        for filler in fillers:
            filler.close()
    assert found.problem.startswith("no answer within") and "firewall" in found.remedy


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seen_as": "203.0.113.7"}, "sees this machine as 203.0.113.7, not 10.0.0.1"),
        ({"ports_here": False}, "random ports cannot be reached here"),
        ({"ports_there": False, "ports_here": False}, "cannot be reached there and here"),
        ({"upload": None}, "small packets pass and large ones do not"),
    ],
    ids=str,
)
def test_what_stands_in_the_way(change: dict[str, Any], words: str) -> None:
    problem, remedy = diagnose(replace(READY, **change))
    assert words in problem and remedy
    assert "NOT READY" in verdict(replace(READY, problem=problem, remedy=remedy))


def test_the_verdict_on_a_good_peer() -> None:
    assert diagnose(READY) == ("", "")
    assert verdict(READY) == "b:29400: ready. What to expect: thinwire plan out/train --rate 10mbit."
    assert "Clocks differ by 90.0 s" in verdict(replace(READY, clock=-90.0))


def test_which_address_gloo_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "right for these peers" in gloo_advice([READY], "10.0.0.1", "why")
    assert "set GLOO_SOCKET_IFNAME=wg0 here" in gloo_advice([READY], "127.0.0.1", "why")
    assert "use one VPN" in gloo_advice([READY, replace(READY, local="10.9.0.1")], "10.0.0.1", "why")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert gloo_choice()[0] == "127.0.0.1"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", unknown)
        assert gloo_choice() == (
            "127.0.0.1",
            f"this host's name, {socket.gethostname()}, stands for no address of its own",
        )
    assert address_of("lo") == "127.0.0.1" and interface_of("127.0.0.1") == "lo" and interface_of("192.0.2.1") is None


@pytest.mark.parametrize(
    ("text", "place"),
    [("a", ("a", 29400)), ("a:1234", ("a", 1234)), ("::1", ("::1", 29400)), ("[::1]:5000", ("::1", 5000))],
)
def test_places(text: str, place: tuple[str, int]) -> None:
    assert read_place(text) == place


@pytest.mark.parametrize("text", ["a:0", "a:x", "a:99999", "[::1", ""])
def test_places_that_are_none(text: str) -> None:
    with pytest.raises(UsageError):
        read_place(text)


def test_mistakes_are_one_line_and_status_two(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for words, told in (
            (["--listen", "80"], "port '80': allowed is 1024 to 65535"),
            (["--listen", "--peers", "a"], "one machine listens, the other measures"),
            (["--peers", "a", "--interface", "nope0"], "no such interface; there are"),
            (["--listen", str(port), "--interface", "lo"], f"cannot listen on port {port}"),
            (["--listen", "--for", "soon"], "--for 'soon'"),
        ):
            assert main(["doctor", *words]) == 2
            assert told in capsys.readouterr().err


def test_nobody_came(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--listen", "29477", "--for", "0.2s", "--interface", "lo"]) == 1
    assert "nobody asked" in capsys.readouterr().out


@pytest.mark.parametrize("page", ["README.md", "docs/two-machines.md"])
def test_pages_that_are_linked_exist(page: str) -> None:
    path = ROOT / page
    for link in re.findall(r"\]\(([\w./-]+)\)", path.read_text()):
        assert (path.parent / link).exists(), f"{page} links to {link}"
