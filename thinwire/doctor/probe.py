"""The questions of `thinwire doctor --peers` and the answers of `--listen`: one connection per question.

A connection (connection.py) is bounded in time and bytes. It begins with one line of JSON, {"thinwire": 1, "do": …}.
Then, by what it asks for:
    hello     ← {"address": the asker's as seen here, "time": this clock}
    ping      → one byte, ← the same byte, up to PINGS times
    download  ← bytes until the asker closes, MOST at most
    upload    → bytes until ← {"rate": …} comes back, MOST at most
    port      ← {"port": a random one}; the asker connects to it; ← {"ok": …}
    back      → {"port": …}; this side connects to the asker there; ← {"ok": …}
    flows     several connections at once (flows.py)
The listener sends nothing but to who asked it, and connects to nobody else.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

from thinwire.doctor import connection, flows
from thinwire.doctor.connection import (
    VERSION,
    Answer,
    Connection,
    ProtocolError,
    clean,
    flag,
    number,
    plain,
    reach,
    whole,
)

PINGS = 20
FASTEST = 1e15  # bits per second that are believed
PORTS = (1024, 65535)  # that may be asked for


# --- the asking side


def ask(peer: Connection, what: str) -> Answer:
    """Ask `peer` for `what`; its answer."""
    peer.say({"thinwire": VERSION, "do": what})
    return peer.hear()


def round_trip(peer: Connection) -> float:
    """Seconds to `peer` and back, the median of PINGS."""
    peer.say({"thinwire": VERSION, "do": "ping"})
    times = []
    for _ in range(PINGS):
        began = time.perf_counter()
        peer.send(b"!")
        if not peer.receive(1):
            raise ProtocolError("no answer to a ping")
        times.append(time.perf_counter() - began)
    return median(times)


def download(peer: Connection) -> float | None:
    """Bits per second from `peer`; None: could not be timed."""
    peer.say({"thinwire": VERSION, "do": "download"})
    rate = peer.count()
    peer.drop()
    return rate


def upload(peer: Connection) -> float | None:
    """Bits per second to `peer`, as it counts them; None: could not be timed."""
    peer.say({"thinwire": VERSION, "do": "upload"})
    peer.pour()
    answer = peer.hear(connection.LONGEST + 2 * connection.PATIENCE)
    peer.drop()
    return None if answer.get("rate", 0) is None else number(answer, "rate", 0.0, FASTEST)


def port_there(peer: Connection) -> bool:
    """Whether a random port of `peer` can be reached: Gloo's ranks listen on such."""
    port = whole(ask(peer, "port"), "port", *PORTS)
    try:
        with reach((peer.peer.getpeername()[0], port), peer.peer.getsockname()[0], peer.left):
            pass
    except OSError:
        return False
    return flag(peer.hear(2 * connection.PATIENCE), "ok")


def port_here(peer: Connection) -> bool:
    """Whether `peer` can reach a random port of ours."""
    with socket.create_server((peer.peer.getsockname()[0], 0), family=peer.peer.family) as server:
        peer.say({"thinwire": VERSION, "do": "back"})
        peer.say({"port": server.getsockname()[1]})
        return flag(peer.hear(2 * connection.PATIENCE), "ok")


# --- the listening side


def serve(server: socket.socket, until: float, heard: Callable[[str, str], None]) -> int:
    """Answer one connection to `server` after another until the monotonic clock says `until`; how many were ours.
    `heard` is called with who asked, and for what."""
    answered = 0
    while (left := until - time.monotonic()) > 0:
        server.settimeout(left)
        try:
            accepted, address = server.accept()
        except TimeoutError:
            break
        with accepted:
            try:
                heard(address[0], _answer(Connection(accepted), plain(address[0])))
                answered += 1
            except (ProtocolError, OSError) as error:
                heard(address[0], f"not understood, or broken off: {clean(error)}")
    return answered


def _answer(peer: Connection, address: str) -> str:
    request = peer.hear()
    whole(request, "thinwire", VERSION, VERSION)
    what = request.get("do")
    if not isinstance(what, str) or what not in ANSWERS:
        raise ProtocolError(f"it asks for {clean(repr(what))}")
    ANSWERS[what](peer, address)
    return what


def _hello(peer: Connection, address: str) -> None:
    peer.say({"thinwire": VERSION, "address": address, "time": time.time()})


def _ping(peer: Connection, address: str) -> None:
    for _ in range(PINGS):
        byte = peer.receive(1)
        if not byte:
            return
        peer.send(byte)


def _download(peer: Connection, address: str) -> None:
    with _may_hang_up():
        peer.pour()
        peer.peer.shutdown(socket.SHUT_WR)
        peer.receive(1)


def _upload(peer: Connection, address: str) -> None:
    peer.say({"rate": peer.count()})
    with _may_hang_up():
        while peer.receive(1 << 16):  # what is on its way, so that our answer is not cut off
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


def _flows(peer: Connection, address: str) -> None:
    with _may_hang_up():
        flows.answer(peer, address)


def _port(peer: Connection, address: str) -> None:
    here = plain(peer.peer.getsockname()[0])
    with socket.create_server((here, 0), family=socket.AF_INET6 if ":" in here else socket.AF_INET) as other:
        other.settimeout(min(connection.PATIENCE, peer.left))
        peer.say({"port": other.getsockname()[1]})
        try:
            other.accept()[0].close()
        except TimeoutError:
            peer.say({"ok": False})
        else:
            peer.say({"ok": True})


def _back(peer: Connection, address: str) -> None:
    port = whole(peer.hear(), "port", *PORTS)
    try:
        with reach((address, port), seconds=peer.left):
            pass
    except OSError:
        peer.say({"ok": False})
    else:
        peer.say({"ok": True})


ANSWERS: dict[str, Callable[[Connection, str], None]] = {
    "hello": _hello, "ping": _ping, "download": _download, "upload": _upload, "port": _port, "back": _back,
    "flows": _flows,
}  # fmt: skip
