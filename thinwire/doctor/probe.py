"""The wire of `thinwire doctor --listen` and `--peers`: one connection per question, bounded in time and bytes.

A connection begins with one line of JSON, {"thinwire": 1, "do": …}. Then, by what it asks for:
    hello     ← {"address": the asker's as seen here, "time": this clock}
    ping      → one byte, ← the same byte, up to PINGS times
    download  ← bytes until the asker closes, MOST at most
    upload    → bytes until ← {"rate": …} comes back, MOST at most
    port      ← {"port": a random one}; the asker connects to it; ← {"ok": …}
    back      → {"port": …}; this side connects to the asker there; ← {"ok": …}
The listener sends nothing but to who asked it, and connects to nobody else.
"""

from __future__ import annotations

import errno
import json
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

VERSION = 1
PINGS = 20
MOST = 8_000_000  # bytes of a rate's measurement
LONGEST = 2.0  # seconds of it
PATIENCE = 4.0  # seconds to connect, or to wait for an answer
LINE = 500  # bytes of a request or an answer
BLOCK = bytes(16_384)
SETTLED = 0.2  # share of a transfer that is left out: TCP is still finding its speed


class ProtocolError(Exception):
    """The other side is something else than a thinwire doctor."""


Answer = dict[str, Any]


def say(peer: socket.socket, answer: Answer) -> None:
    """Send `answer` to `peer` as one line of JSON."""
    peer.sendall(json.dumps(answer).encode() + b"\n")


def hear(peer: socket.socket) -> Answer:
    """One line of JSON from `peer`, read byte by byte: what follows it is not ours."""
    line = b""
    while not line.endswith(b"\n"):
        byte = peer.recv(1)
        if not byte or len(line) > LINE:
            raise ProtocolError("no whole line came")
        line += byte
    try:
        answer = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ProtocolError("what came is no JSON") from None
    if not isinstance(answer, dict):
        raise ProtocolError("what came is no JSON object")
    return answer


def count(peer: socket.socket) -> float | None:
    """Bits per second that arrive from `peer`, for LONGEST at most; None where nothing came that could be timed."""
    marks = [(time.perf_counter(), 0)]
    until, total = marks[0][0] + LONGEST + PATIENCE, 0
    buffer = bytearray(1 << 18)
    while total < MOST and time.perf_counter() < until:
        ready, _, _ = select.select([peer], [], [], until - time.perf_counter())
        size = peer.recv_into(buffer) if ready else 0
        if not size:
            break
        total += size
        marks.append((time.perf_counter(), total))
        if len(marks) == 2:
            until = marks[1][0] + LONGEST
    return _speed(marks[1:])


def _speed(marks: list[tuple[float, int]]) -> float | None:
    """From the first mark past the settling share to the last."""
    if len(marks) < 2 or marks[-1][0] <= marks[0][0]:
        return None
    from_then = marks[0][0] + SETTLED * (marks[-1][0] - marks[0][0])
    start = next(mark for mark in marks if mark[0] >= from_then or mark is marks[-2])
    seconds = marks[-1][0] - start[0]
    return 8 * (marks[-1][1] - start[1]) / seconds if seconds > 0 else None


def pour(peer: socket.socket) -> None:
    """Send to `peer` until it speaks or closes, MOST bytes and a few seconds at most."""
    left, until = MOST, time.perf_counter() + LONGEST + PATIENCE
    while left > 0 and time.perf_counter() < until:
        readable, writable, _ = select.select([peer], [peer], [], 1.0)
        if readable:
            return
        if writable:
            left -= peer.send(BLOCK[:left])


def drop(peer: socket.socket) -> None:
    """Close the connection `peer` so that what still waits to be sent is thrown away."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()


def reach(address: tuple[str, int], source: str = "") -> socket.socket:
    """A connection to `address`, from the address `source` ("": any)."""
    peer = socket.create_connection(address, PATIENCE, (source, 0) if source else None)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return peer


# --- the asking side


def ask(peer: socket.socket, what: str) -> Answer:
    """Ask `peer` for `what`; its answer."""
    say(peer, {"thinwire": VERSION, "do": what})
    return hear(peer)


def round_trip(peer: socket.socket) -> float:
    """Seconds to `peer` and back, the median of PINGS."""
    say(peer, {"thinwire": VERSION, "do": "ping"})
    times = []
    for _ in range(PINGS):
        began = time.perf_counter()
        peer.sendall(b"!")
        if not peer.recv(1):
            raise ProtocolError("no answer to a ping")
        times.append(time.perf_counter() - began)
    return median(times)


def download(peer: socket.socket) -> float | None:
    """Bits per second from `peer`; None: could not be timed."""
    say(peer, {"thinwire": VERSION, "do": "download"})
    rate = count(peer)
    drop(peer)
    return rate


def upload(peer: socket.socket) -> float | None:
    """Bits per second to `peer`, as it counts them; None: could not be timed."""
    say(peer, {"thinwire": VERSION, "do": "upload"})
    pour(peer)
    peer.settimeout(LONGEST + 2 * PATIENCE)
    rate = hear(peer).get("rate")
    drop(peer)
    return float(rate) if isinstance(rate, int | float) else None


def port_there(peer: socket.socket) -> bool:
    """Whether a random port of `peer` can be reached: Gloo's ranks listen on such."""
    port = ask(peer, "port").get("port")
    try:
        reach((peer.getpeername()[0], int(port or 0)), peer.getsockname()[0]).close()
    except OSError:
        return False
    peer.settimeout(2 * PATIENCE)
    return bool(hear(peer).get("ok"))


def port_here(peer: socket.socket) -> bool:
    """Whether `peer` can reach a random port of ours."""
    with socket.create_server((peer.getsockname()[0], 0), family=peer.family) as server:
        say(peer, {"thinwire": VERSION, "do": "back"})
        say(peer, {"port": server.getsockname()[1]})
        peer.settimeout(2 * PATIENCE)
        return bool(hear(peer).get("ok"))


# --- the listening side


def serve(server: socket.socket, until: float, heard: Callable[[str, str], None]) -> int:
    """Answer one connection to `server` after another until the monotonic clock says `until`; how many were ours.
    `heard` is called with who asked, and for what."""
    answered = 0
    while (left := until - time.monotonic()) > 0:
        server.settimeout(left)
        try:
            peer, address = server.accept()
        except TimeoutError:
            break
        peer.settimeout(PATIENCE)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with peer:
            try:
                heard(address[0], _answer(peer, plain(address[0])))
                answered += 1
            except (ProtocolError, OSError) as error:
                heard(address[0], f"not understood, or broken off: {error}")
    return answered


def plain(address: str) -> str:
    """`address` without what a socket for both protocols adds: ::ffff:10.0.0.1 is 10.0.0.1."""
    return address.removeprefix("::ffff:") if "." in address else address.split("%")[0]


def _answer(peer: socket.socket, address: str) -> str:
    request = hear(peer)
    what = request.get("do")
    if request.get("thinwire") != VERSION or what not in ANSWERS:
        raise ProtocolError(f"it asks for {what!r}")
    ANSWERS[what](peer, address)
    return str(what)


def _hello(peer: socket.socket, address: str) -> None:
    say(peer, {"thinwire": VERSION, "address": address, "time": time.time()})


def _ping(peer: socket.socket, address: str) -> None:
    for _ in range(PINGS):
        byte = peer.recv(1)
        if not byte:
            return
        peer.sendall(byte)


def _download(peer: socket.socket, address: str) -> None:
    with _may_hang_up():
        pour(peer)
        peer.shutdown(socket.SHUT_WR)
        peer.recv(1)


def _upload(peer: socket.socket, address: str) -> None:
    say(peer, {"rate": count(peer)})
    with _may_hang_up():
        while peer.recv(1 << 16):  # what is on its way, so that our answer is not cut off
            pass


@contextmanager
def _may_hang_up() -> Iterator[None]:
    """The asker drops the connection when it has measured enough; that ends an answer, and is no failure of it."""
    try:
        yield
    except ConnectionError:
        return
    except OSError as error:
        if error.errno != errno.ENOTCONN:  # shutdown after the asker's reset has arrived
            raise


def _port(peer: socket.socket, address: str) -> None:
    here = plain(peer.getsockname()[0])
    with socket.create_server((here, 0), family=socket.AF_INET6 if ":" in here else socket.AF_INET) as other:
        other.settimeout(PATIENCE)
        say(peer, {"port": other.getsockname()[1]})
        try:
            other.accept()[0].close()
        except TimeoutError:
            say(peer, {"ok": False})
        else:
            say(peer, {"ok": True})


def _back(peer: socket.socket, address: str) -> None:
    port = hear(peer).get("port")
    if not isinstance(port, int) or not 1024 <= port < 65536:
        raise ProtocolError(f"it asks to be connected to port {port!r}")
    try:
        reach((address, port)).close()
    except OSError:
        say(peer, {"ok": False})
    else:
        say(peer, {"ok": True})


ANSWERS: dict[str, Callable[[socket.socket, str], None]] = {
    "hello": _hello, "ping": _ping, "download": _download, "upload": _upload, "port": _port, "back": _back,
}  # fmt: skip
