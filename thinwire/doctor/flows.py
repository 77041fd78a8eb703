"""What several connections at once carry, one way or both ways: a question of `thinwire doctor --peers` on long links.

    flows  → {"count": …, "send": does the asker send?, "receive": does it receive?}, ← {"port": a random one}
           the asker connects to it so many times; bytes go; ← {"rate": …, "loss": …} as the listener saw them
Bounded whatever the other side does: MOST bytes each way and LONGEST + GRACE seconds.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from thinwire.distributed.packets import counted
from thinwire.doctor import connection
from thinwire.doctor.connection import VERSION, Connection, ProtocolError, flag, number, plain, reach, speed, whole

COUNT = 8  # flows that are compared with one
MOST_COUNT = 16
MOST = 32_000_000  # bytes each way, all flows together
LONGEST = 3.0  # seconds of it
GRACE = 1.0  # seconds that a sender goes on for: the receiver begins to count when the first byte arrives
FASTEST = 1e15  # bits per second that are believed


@dataclass(frozen=True)
class Carried:
    """What was carried: bits per second to the peer and from it, and the share of packets that were sent again.

    None: not measured.
    """

    upload: float | None
    download: float | None
    loss: float | None

    @property
    def rates(self) -> list[float]:
        """Of the ways in which something was timed."""
        return [rate for rate in (self.upload, self.download) if rate]


@dataclass(frozen=True)
class LongLink:
    """What was measured of a long link. Rates are in bits per second, of the slower way."""

    round_trip: float  # seconds there and back
    loss: float | None  # share of packets that were sent again; None: the kernel does not tell
    one: float  # by one flow
    one_both: float  # by one flow, both ways at once
    streams: int  # flows of the following
    many: float
    many_both: float

    @property
    def fastest(self) -> float:
        """Bits per second that the link carries at least."""
        return max(self.one, self.one_both, self.many, self.many_both)


def measure(connect: Callable[[], Connection], round_trip: float, one: float) -> LongLink:
    """Compare one flow with COUNT. connect: makes a connection to the peer. round_trip, one: as measured before."""

    def slower(count: int, *ways: tuple[bool, bool]) -> tuple[float, float | None]:
        """Bits per second of the slower way, each of `ways` being (send, receive), and the loss of the first."""
        found = [_carried(connect, count, *way) for way in ways]
        return min(rate for one in found for rate in one.rates), found[0].loss

    one_both, loss = slower(1, (True, True))
    many_both, _ = slower(COUNT, (True, True))
    many, _ = slower(COUNT, (True, False), (False, True))
    return LongLink(round_trip, loss, one, one_both, COUNT, many, many_both)


def _carried(connect: Callable[[], Connection], count: int, send: bool, receive: bool) -> Carried:
    """As `ask`; once more where a way could not be timed, as on a machine too busy to look in time."""
    for _ in range(2):
        with connect() as peer:
            found = ask(peer, count, send, receive)
        if len(found.rates) == send + receive:
            return found
    raise ProtocolError(f"what {count} connections carry could not be timed, twice")


def ask(peer: Connection, count: int, send: bool, receive: bool) -> Carried:
    """Measure `count` connections to `peer`'s host.

    send, receive: whether bytes go there, come from there, or both at once.
    """
    peer.say({"thinwire": VERSION, "do": "flows"})
    peer.say({"count": count, "send": send, "receive": receive})
    port = whole(peer.hear(), "port", 1024, 65535)
    here, there = peer.peer.getsockname()[0], peer.peer.getpeername()[0]
    with ExitStack() as stack:
        flows = [stack.enter_context(reach((there, port), here, peer.left)) for _ in range(count)]
        ours, loss = transfer([flow.peer for flow in flows], send, receive)
        answer = peer.hear(LONGEST + 2 * connection.PATIENCE)
        for flow in flows:
            flow.drop()
    theirs = _number(answer, "rate", FASTEST)
    losses = [share for share in (loss, _number(answer, "loss", 1.0)) if share is not None]
    return Carried(theirs, ours, max(losses, default=None))


def answer(peer: Connection, address: str) -> None:
    """Do what `ask` asks for, with the asker at `address` and nobody else."""
    request = peer.hear()
    count, send, receive = whole(request, "count", 1, MOST_COUNT), flag(request, "receive"), flag(request, "send")
    here = plain(peer.peer.getsockname()[0])
    family = socket.AF_INET6 if ":" in here else socket.AF_INET
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server((here, 0), family=family, backlog=MOST_COUNT))
        peer.say({"port": server.getsockname()[1]})
        flows = [stack.enter_context(_accept(server, peer, address)) for _ in range(count)]
        rate, loss = transfer([flow.peer for flow in flows], send, receive)
        peer.say({"rate": rate, "loss": loss})
        peer.receive(1, LONGEST + 2 * connection.PATIENCE)  # until the asker is done too
        for flow in flows:
            flow.drop()


def _accept(server: socket.socket, peer: Connection, address: str) -> Connection:
    server.settimeout(min(connection.PATIENCE, peer.left))
    accepted, who = server.accept()
    if plain(who[0]) != address:
        accepted.close()
        raise ProtocolError("somebody else connected")
    return Connection(accepted)


def transfer(flows: list[socket.socket], send: bool, receive: bool) -> tuple[float | None, float | None]:
    """Send over all connections, receive over all, or both: (bits per second received, share of packets sent again).

    The share is that of the second half where there is one: at first TCP finds the link's rate by overfilling it.
    """
    began = time.perf_counter()
    marks = [(began, 0)]
    sending, receiving = set(flows if send else ()), set(flows if receive else ())
    sent, half = 0, (0, 0)
    for flow in flows:
        flow.setblocking(False)
    while sending or receiving:
        now = time.perf_counter()
        if now > began + LONGEST / 2 and half == (0, 0):
            half = counted(flows)
        if sent >= MOST or now > began + LONGEST + GRACE:
            sending.clear()
        first = marks[1][0] if len(marks) > 1 else began + GRACE
        if marks[-1][1] >= MOST or now > first + LONGEST:
            receiving.clear()
        readable, writable, _ = select.select(receiving, sending, [], 0.05)
        for flow in writable:
            sent += flow.send(connection.BLOCK)
        came = [len(flow.recv(1 << 18)) for flow in readable]
        if 0 in came:
            raise ProtocolError("a flow was closed early")
        if came:
            marks.append((time.perf_counter(), marks[-1][1] + sum(came)))
    return (speed(marks[1:]) if receive else None), (_share(half, counted(flows)) if send else None)


def _share(before: tuple[int, int], after: tuple[int, int]) -> float | None:
    packets = after[1] - before[1]
    return min(1.0, (after[0] - before[0]) / packets) if packets > 0 else None


def _number(answer: connection.Answer, name: str, high: float) -> float | None:
    return None if answer.get(name, 0) is None else number(answer, name, 0.0, high)
