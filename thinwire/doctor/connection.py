"""A connection between two doctors that ends in time: SECONDS and MOST bytes each way, whatever the other side does.

Lines are JSON objects of at most LINE bytes. What stands in them is somebody else's: every value is read as a type and
a range (`whole`, `number`, `flag`, `address`), and nothing is shown that was not cleaned (`clean`).
"""

from __future__ import annotations

import ipaddress
import json
import select
import socket
import struct
import time
from typing import Any, NoReturn

VERSION = 2  # of the questions: what both sides must speak
MOST = 8_000_000  # bytes of a rate's measurement
LONGEST = 2.0  # seconds of it
PATIENCE = 4.0  # seconds to connect, or to wait for an answer
SECONDS = 12.0  # of a connection
LINE = 500  # bytes of a request or an answer
SHOWN = 60  # characters of anything that the other side sent
BLOCK = bytes(16_384)
SETTLED = 0.2  # share of a transfer that is left out: TCP is still finding its speed


class ProtocolError(Exception):
    """The other side is something else than a thinwire doctor."""


Answer = dict[str, Any]


class Connection:
    """A socket with a deadline and a bound on what is received.

    peer: the connected socket, closed at the end of a `with` block.
    """

    def __init__(self, peer: socket.socket) -> None:
        self.peer = peer
        self.until = time.monotonic() + SECONDS
        self.room = MOST + LINE
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.peer.close()

    @property
    def left(self) -> float:
        """Seconds until the deadline; ProtocolError after it."""
        left = self.until - time.monotonic()
        if left <= 0:
            raise ProtocolError(f"it takes longer than {SECONDS:.0f} s")
        return left

    # --- bytes

    def receive(self, size: int, patience: float | None = None) -> bytes:
        """At most `size` bytes, waited for so many seconds (None: PATIENCE); nothing where the other side has ended."""
        if self.room <= 0:
            raise ProtocolError(f"more than {MOST} bytes came")
        self.peer.settimeout(min(PATIENCE if patience is None else patience, self.left))
        data = self.peer.recv(min(size, self.room))
        self.room -= len(data)
        return data

    def send(self, data: bytes) -> None:
        """All of `data`."""
        self.peer.settimeout(min(PATIENCE, self.left))
        self.peer.sendall(data)

    def count(self) -> float | None:
        """Bits per second that arrive, for LONGEST at most; None where nothing came that could be timed."""
        marks = [(time.perf_counter(), 0)]
        until, total = marks[0][0] + LONGEST + PATIENCE, 0
        while total < MOST and time.perf_counter() < until:
            ready, _, _ = select.select([self.peer], [], [], min(until - time.perf_counter(), self.left))
            data = self.receive(min(1 << 18, MOST - total)) if ready else b""
            if not data:
                break
            total += len(data)
            marks.append((time.perf_counter(), total))
            if len(marks) == 2:
                until = marks[1][0] + LONGEST
        return speed(marks[1:])

    def pour(self) -> None:
        """Send until the other side speaks or closes, MOST bytes and a few seconds at most."""
        left, until = MOST, time.perf_counter() + LONGEST + PATIENCE
        while left > 0 and time.perf_counter() < until:
            readable, writable, _ = select.select([self.peer], [self.peer], [], min(1.0, self.left))
            if readable:
                return
            if writable:
                left -= self.peer.send(BLOCK[:left])

    def drop(self) -> None:
        """Close so that what still waits to be sent is thrown away."""
        self.peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.peer.close()

    # --- lines

    def say(self, answer: Answer) -> None:
        """Send `answer` as one line of JSON."""
        self.send(json.dumps(answer).encode() + b"\n")

    def hear(self, patience: float | None = None) -> Answer:
        """One line of JSON, read byte by byte: what follows it is not ours. patience: as of `receive`."""
        line = b""
        while not line.endswith(b"\n"):
            byte = self.receive(1, patience)
            if not byte or len(line) >= LINE:
                raise ProtocolError("no whole line came")
            line += byte
        try:
            answer = json.loads(line, parse_constant=_no_number)
        except (ValueError, RecursionError):
            raise ProtocolError("what came is no JSON") from None
        if not isinstance(answer, dict):
            raise ProtocolError("what came is no JSON object")
        return answer


def reach(address: tuple[str, int], source: str = "", seconds: float | None = None) -> Connection:
    """A connection to `address`, from the address `source` ("": any), within so many seconds (None: PATIENCE)."""
    patience = PATIENCE if seconds is None else min(PATIENCE, seconds)
    return Connection(socket.create_connection(address, patience, (source, 0) if source else None))


def plain(address: str) -> str:
    """`address` without what a socket for both protocols adds: ::ffff:10.0.0.1 is 10.0.0.1."""
    return address.removeprefix("::ffff:") if "." in address else address.split("%")[0]


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def speed(marks: list[tuple[float, int]]) -> float | None:
    """Bits per second by marks of (time, bytes so far), from the first past the settling share to the last."""
    if len(marks) < 2 or marks[-1][0] <= marks[0][0]:
        return None
    from_then = marks[0][0] + SETTLED * (marks[-1][0] - marks[0][0])
    start = next(mark for mark in marks if mark[0] >= from_then or mark is marks[-2])
    seconds = marks[-1][0] - start[0]
    return 8 * (marks[-1][1] - start[1]) / seconds if seconds > 0 else None


# --- values that somebody else sent


def clean(value: object) -> str:
    """A value for a terminal: one short line without control characters."""
    text = "".join(sign if sign.isprintable() else "?" for sign in str(value)[: SHOWN + 1])
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def whole(answer: Answer, name: str, low: int, high: int) -> int:
    """The whole number of that name, from `low` to `high`."""
    value = answer.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ProtocolError(f"{name} is {clean(repr(value))}")
    return value


def number(answer: Answer, name: str, low: float, high: float) -> float:
    """The number of that name, from `low` to `high`."""
    value = answer.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
        raise ProtocolError(f"{name} is {clean(repr(value))}")
    return float(value)


def flag(answer: Answer, name: str) -> bool:
    """The truth value of that name."""
    value = answer.get(name)
    if not isinstance(value, bool):
        raise ProtocolError(f"{name} is {clean(repr(value))}")
    return value


def address(answer: Answer, name: str) -> str:
    """The address of that name, of either protocol."""
    value = answer.get(name)
    try:
        return str(ipaddress.ip_address(value if isinstance(value, str) else ""))
    except ValueError:
        raise ProtocolError(f"{name} is {clean(repr(value))}") from None
