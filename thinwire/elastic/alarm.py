"""The alarm of a quorum: one idle connection between every two members, by which all know at once that one is gone.

Gloo does not say so. When a connection breaks it tells those whose message has not begun, and not the one whose message
is arriving or leaving, which waits for its time-out (pair.cc: `signalException` passes over `rx_` and `tx_`). On a slow
link a member that dies nearly always dies in the middle of a message. The kernel closes the connections of a process
that was killed, the idle ones too.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from thinwire.elastic.aside import Aside
from thinwire.elastic.meeting import connect

MEETING = 2  # members that were told of a quorum connect within the time-out divided by this
LEFT, GIVEN_UP = b"l", b"g"  # the only byte that such a connection carries, before its end


class Alarm:
    """store: where the members of this quorum, and no others, tell each other their addresses. rank, size: of this
    member in it. host: its own address. timeout: seconds until a member is given up; one that does not come is after
    half of them, since all were told at the same time.

    RuntimeError or OSError where one of them cannot be reached.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, host: str, timeout: float) -> None:
        self.timeout = timeout
        self.changed = threading.Condition()  # it rings, or somebody who waits here has waited enough
        self.reason = ""  # why it rings
        self.peers = connect(store, rank, size, host, time.monotonic() + timeout / MEETING)
        if self.peers:
            threading.Thread(target=self._listen, name="thinwire alarm", daemon=True).start()

    def wait_for(self, wait: Callable[[], Any], seconds: float | None = None) -> Any:
        """What `wait` gives, on another thread. RuntimeError as soon as the alarm rings; where `wait` fails, or takes
        more than so many seconds, it rings. Who waits when it rings is left behind."""
        aside = Aside(wait, self.changed, self.timeout)
        if not self.reason:
            aside.start()
        with self.changed:
            self.changed.wait_for(lambda: aside.done or self.reason, seconds)
            done = aside.done  # looked at once: the wait may fail in the moment in which the alarm rings
        if not done:
            self.ring(f"no answer within {seconds} s")
            raise RuntimeError(self.reason)
        if aside.error is not None:
            self.ring(f"a message failed in this step: {aside.error}")
            raise aside.error
        return aside.result

    def ring(self, reason: str) -> None:
        """Nobody waits any more, here or elsewhere: this step cannot count. reason: for those who wait here."""
        self._end(reason, GIVEN_UP)

    def leave(self) -> None:
        """In peace: it rings nowhere."""
        self._end("this member has left", LEFT)

    def _end(self, reason: str, last_byte: bytes) -> None:
        """The first reason stays."""
        with self.changed:
            if not self.reason:
                self.reason = reason
                for connection in self.peers.values():
                    with suppress(OSError):  # the other end was first
                        connection.send(last_byte)
                    with suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)
            self.changed.notify_all()

    def _listen(self) -> None:
        """On a thread of its own, until the end."""
        there = {connection.fileno(): peer for peer, connection in self.peers.items()}
        poll = select.poll()  # select() refuses numbers above 1023
        for number in there:
            poll.register(number, select.POLLIN)
        while there and not self.reason:
            for number, _ in poll.poll():
                peer = there[number]
                try:
                    said = self.peers[peer].recv(1)
                except BlockingIOError:  # there was nothing after all
                    continue
                except OSError:
                    said = b""
                if said == LEFT:
                    poll.unregister(number)
                    del there[number]
                else:
                    self.ring(f"member {peer} {'gave the step up' if said == GIVEN_UP else 'is gone'}")
        with self.changed:  # nobody uses them after the end, so their numbers may become other files'
            self.changed.wait_for(lambda: bool(self.reason))
        for connection in self.peers.values():
            connection.close()
