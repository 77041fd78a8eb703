"""`thinwire doctor --listen` on one machine, `--peers HOST…` on the other: can they train together, and how fast?

    machine a$ thinwire doctor --listen
    machine b$ thinwire doctor --peers a

Measured: reachability, round trip, rate each way, path MTU, clocks, random ports both ways (Gloo connects every rank
with every other on ports that the kernel picks), and which address Gloo would choose. At most 8 MB each way per peer.
On a long link also what one and several flows carry, both ways at once too, and which packets were sent again; at most
96 MB more each way. From Python: `examine(host, port)` returns a `Peer`.
"""

from __future__ import annotations

import argparse
import errno
import re
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from thinwire.doctor import advice, connection, flows, probe
from thinwire.doctor.connection import Connection, ProtocolError, plain
from thinwire.doctor.flows import LongLink
from thinwire.doctor.interfaces import VARIABLE, address_of, gloo_choice, interface_of, path_mtu
from thinwire.errors import UsageError
from thinwire.quantities import parse_time, show_rate
from thinwire.terminal import progress, table, write_json

PORT = "29400"  # torchrun's own for its rendezvous: what is open for one is open for the other
LATEST = 1e11  # seconds that a clock may say, some thousand years from now
CLOCK = 1.0  # seconds by which clocks may differ before it is worth a word
ABSENT = "–"
OTHER = "choose another port on both sides: --listen 29411; a thinwire there must be of this version"


@dataclass(frozen=True)
class Peer:
    """What was found out about one machine; None: not measured."""

    name: str
    problem: str = ""  # why it cannot be used as it is
    remedy: str = ""
    local: str = ""  # our address on the way there
    interface: str | None = None
    seen_as: str = ""  # our address as the peer sees it
    round_trip: float | None = None  # seconds
    download: float | None = None  # bits per second from the peer
    upload: float | None = None
    mtu: int | None = None
    clock: float | None = None  # seconds by which its clock is ahead
    ports_there: bool | None = None  # its random ports can be reached
    ports_here: bool | None = None
    long: LongLink | None = None  # where the round trip is long: loss, and what several flows carry

    @property
    def ok(self) -> bool:
        """Whether ranks can work with it."""
        return not self.problem


def configure(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the options of `thinwire doctor` that are about other machines."""
    parser.add_argument("--peers", nargs="+", metavar="HOST[:PORT]", help="measure the way to machines that --listen")
    parser.add_argument(
        "--listen", nargs="?", const=PORT, metavar="PORT", help=f"answer --peers, on {PORT} unless told"
    )
    parser.add_argument("--interface", metavar="NAME", help="with --peers, --listen: use this one, such as wg0")
    parser.add_argument("--for", dest="duration", default="10min", help="with --listen: how long (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Listen or measure, as `args` says; the exit status."""
    if args.peers and args.listen:
        raise UsageError("--peers and --listen: one machine listens, the other measures")
    source = address_of(args.interface) if args.interface else ""
    return _listen(args, source) if args.listen else _measure(args, source)


def _listen(args: argparse.Namespace, source: str) -> int:
    port, seconds = read_port(args.listen), parse_time(args.duration, "--for")
    try:
        server = _server(source, port)
    except OSError as error:
        raise UsageError(f"cannot listen on port {port}: {error.strerror}; is torchrun running?") from None
    with server:
        print(f"listening on {source or 'every address'}, port {port}, for {seconds:.0f} s; on the other machine: "
              f"thinwire doctor --peers HOST:{port}", flush=True)  # fmt: skip
        answered = probe.serve(
            server, time.monotonic() + seconds, lambda who, what: print(f"{plain(who)}: {what}", flush=True)
        )
    print("" if answered else "nobody asked: see docs/two-machines.md on firewalls")
    write_json(args.json, {"answered": answered})
    return 0 if answered else 1


def _server(source: str, port: int) -> socket.socket:
    """On both protocols where the machine has them."""
    if source or not socket.has_dualstack_ipv6():
        family = socket.AF_INET6 if ":" in source else socket.AF_INET
        return socket.create_server((source, port), family=family)
    return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)


def _measure(args: argparse.Namespace, source: str) -> int:
    places = [read_place(text) for text in args.peers]
    peers = []
    with progress("doctor", len(places)) as advance:
        for host, port in places:
            peers.append(examine(host, port, source))
            advance(host, 1)
    _show(peers)
    address, why = gloo_choice()
    told = gloo_advice(peers, address, why)
    print(told)
    for peer in peers:
        print(verdict(peer))
        for line in advice.advise(peer.long, advice.local_tcp()) if peer.long else ():
            print(f"{peer.name}: {line}")
    write_json(args.json, {"peers": [asdict(p) | {"ok": p.ok} for p in peers], "gloo": told, "gloo_address": address})
    return 0 if all(peer.ok for peer in peers) else 1


def read_port(text: str) -> int:
    """The port in `text`; a mistake where ranks could not use it."""
    if not text.isdecimal() or not 1024 <= int(text) < 65536:
        raise UsageError(f"port {text!r}: allowed is 1024 to 65535")
    return int(text)


def read_place(text: str) -> tuple[str, int]:
    """(host, port) in `text`: host, host:port, an IPv6 address, or [address]:port."""
    match = re.fullmatch(r"\[(?P<v6>[^\]]+)\](?::(?P<p6>.*))?|(?P<host>[^:\[\]]+)(?::(?P<port>.*))?", text)
    if match is None and text.count(":") > 1 and "[" not in text:
        return text, int(PORT)
    if match is None:
        raise UsageError(f"--peers {text!r}: write HOST, HOST:PORT or [ADDRESS]:PORT")
    port = match["p6"] if match["v6"] else match["port"]
    return match["v6"] or match["host"], read_port(PORT if port is None else port)


def examine(host: str, port: int, source: str = "") -> Peer:
    """Everything about the peer at `host` and `port`, asked from the address `source` ("": any); what fails says what
    to do."""
    name = f"{host}:{port}"
    try:
        with connection.reach((host, port), source) as first:
            base = _first(first, name)
    except ProtocolError:
        return Peer(name, "something else listens there", OTHER)
    except OSError as error:
        return Peer(name, *_why(error, host, port))
    try:
        return _rest(base, (host, port), source)
    except (ProtocolError, OSError) as error:
        return Peer(**asdict(base) | {"problem": f"broken off: {error}", "remedy": "is --listen still running there?"})


def _first(peer: Connection, name: str) -> Peer:
    began = time.time()
    answer = probe.ask(peer, "hello")
    connection.whole(answer, "thinwire", probe.VERSION, probe.VERSION)
    clock = connection.number(answer, "time", 0.0, LATEST)
    local = plain(peer.peer.getsockname()[0])
    return Peer(
        name, local=local, interface=interface_of(local), seen_as=connection.address(answer, "address"),
        mtu=path_mtu(peer.peer), clock=clock - (began + time.time()) / 2,
    )  # fmt: skip


def _rest(base: Peer, place: tuple[str, int], source: str) -> Peer:
    """Round trip, rates, ports; then what they mean."""

    def ask(question: Callable[[Connection], object]) -> object:
        with connection.reach(place, source) as peer:
            return question(peer)

    found = {
        "round_trip": ask(probe.round_trip),
        "ports_there": ask(probe.port_there),
        "ports_here": ask(probe.port_here),
    }
    found |= {"download": ask(probe.download), "upload": ask(probe.upload)}
    peer = Peer(**asdict(base) | found)
    problem, remedy = diagnose(peer)
    if problem or peer.round_trip is None or peer.round_trip < advice.LONG:
        return replace(peer, problem=problem, remedy=remedy)
    one = min(rate for rate in (peer.download, peer.upload) if rate is not None)
    return replace(peer, long=flows.measure(lambda: connection.reach(place, source), peer.round_trip, one))


def _why(error: OSError, host: str, port: int) -> tuple[str, str]:
    """A failure to connect: what it means, what to do."""
    if isinstance(error, socket.gaierror):
        return f"the name {host} is not known here", "give its address, or add it to /etc/hosts"
    if isinstance(error, ConnectionRefusedError):
        return f"nothing listens on port {port} there", f"start `thinwire doctor --listen {port}` on {host}"
    if isinstance(error, TimeoutError):
        return f"no answer within {connection.PATIENCE:.0f} s", (
            f"is {host} on, is the address right, and does its firewall let TCP port {port} in?"
        )
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return "no way there from this machine", "is the VPN up on both sides (wg show, tailscale status)?"
    return f"cannot connect: {error.strerror or error}", "see docs/two-machines.md"


def diagnose(peer: Peer) -> tuple[str, str]:
    """(problem, remedy) of a peer that answers; empty where ranks can work with it."""
    if peer.seen_as != peer.local:
        return f"it sees this machine as {peer.seen_as}, not {peer.local}: an address translation is between", (
            "Gloo tells others its own address, so connect the machines by a VPN (docs/two-machines.md)"
        )
    if peer.ports_there is False or peer.ports_here is False:
        where = " and ".join(w for w, ok in (("there", peer.ports_there), ("here", peer.ports_here)) if ok is False)
        return f"random ports cannot be reached {where}", (
            "Gloo connects every rank with every other on random ports: let all TCP between these machines in, best on "
            "a VPN's interface only"
        )
    if peer.download is None or peer.upload is None:
        return "small packets pass and large ones do not", (
            f"lower the MTU of {peer.interface or 'the tunnel'}: ip link set dev {peer.interface or 'wg0'} mtu 1280"
        )
    return "", ""


def gloo_advice(peers: list[Peer], address: str, why: str) -> str:
    """Whether `address`, on which Gloo would listen (and `why`), is the one that reaches `peers`, and the variable to
    set where it is not."""
    ways = list(dict.fromkeys((p.local, p.interface) for p in peers if p.local))
    choice = f"Gloo would listen on {address or 'nothing'} ({why})"
    if not ways:
        return f"{choice}."
    if len(ways) > 1:
        return f"{choice}; the peers are reached from {', '.join(local for local, _ in ways)}: use one VPN for all."
    local, interface = ways[0]
    if local == address:
        return f"{choice}: right for these peers."
    return f"{choice}, but the peers are reached from {local}: set {VARIABLE}={interface or 'its interface'} here."


def verdict(peer: Peer) -> str:
    """One line about `peer`: what to expect of it, or what to do."""
    if not peer.ok:
        return f"{peer.name}: NOT READY: {peer.problem}. What to do: {peer.remedy}"
    rate = min(r for r in (peer.download, peer.upload) if r is not None)
    ahead = peer.clock or 0.0
    clock = f" Clocks differ by {abs(ahead):.1f} s: logs will not line up." if abs(ahead) > CLOCK else ""
    return f"{peer.name}: ready. What to expect: thinwire plan out/train --rate {round(rate / 1e6, 1):g}mbit.{clock}"


def _show(peers: list[Peer]) -> None:
    rows = [
        [
            p.name, "ready" if p.ok else "no", _scaled(p.round_trip, 1e3), _rate(p.download), _rate(p.upload),
            p.mtu or ABSENT, _scaled(p.clock, 1e3), _yes(p.ports_there), _yes(p.ports_here),
            f"{p.local} ({p.interface or '?'})" if p.local else ABSENT,
        ]
        for p in peers
    ]  # fmt: skip
    columns = (
        "peer", "state", "round trip ms", "from it", "to it", "path MTU", "its clock ahead ms", "ports there",
        "ports here", "reached from",
    )  # fmt: skip
    table("Peers", columns, rows)


def _scaled(seconds: float | None, scale: float) -> str:
    return ABSENT if seconds is None else f"{seconds * scale:.3g}"


def _rate(rate: float | None) -> str:
    return ABSENT if rate is None else show_rate(rate)


def _yes(value: bool | None) -> str:
    return {True: "yes", False: "no", None: ABSENT}[value]
