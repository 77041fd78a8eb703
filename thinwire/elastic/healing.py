"""How a newcomer gets a member's state: over a socket of its own, as bytes and never as pickles.

torchft's HTTP transport loads what it gets with pickle, and its other one unpickles too: whoever can answer in a
member's place could run code on the newcomer. Here a newcomer asks for a step's state from an offset on, so that a
broken connection is taken up where it broke off.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta

from torch import Tensor

from thinwire.elastic.fetching import Fetch, listen, read_line, send_from
from thinwire.elastic.packing import pack, unpack
from thinwire.elastic.streams import LONGEST, Stream

MOST = 64  # callers at a time: more than a run has newcomers
FULL = 0.1  # seconds until the next caller is looked for, where this process has too many files open
KEPT = 60.0  # seconds for which a copy is kept for a newcomer whose connection broke


class Snapshot:
    """A member's state of one step, as it is sent."""

    def __init__(self, step: int, state: object) -> None:
        self.step = step
        self.pieces = pack(state)
        self.nbytes = sum(piece.nbytes for piece in self.pieces)

    def send(self, connection: socket.socket, offset: int) -> int:
        """All bytes from the offset on: how many."""
        sent = 0
        for piece in self.pieces:
            sent += send_from(connection, piece, offset)
            offset = max(0, offset - piece.nbytes)
        return sent


class Healing:
    """torchft's checkpoint transport. Both ends: a member serves its state, a newcomer fetches it.

    host: the address that it listens on. timeout: seconds without a byte until a connection is given up.
    limit: gives the bytes that a state may have at most.
    """

    def __init__(self, host: str, timeout: float, limit: Callable[[], int]) -> None:
        self.host = host
        self.timeout = timeout
        self.limit = limit
        self.token = secrets.token_hex(16)
        self.snapshot: Snapshot | None = None
        self.stream: Stream | None = None  # the last that was asked for
        self.wanted = 0  # who wait for a stream
        self.served = 0  # who get one
        self.unserved = 0.0  # time since which nobody gets one
        self.taken = threading.Condition()  # a snapshot or a stream was taken
        self.sent = 0  # bytes
        self.received = 0
        self.closed = False
        self.places = threading.BoundedSemaphore(MOST)
        self.listener = listen(host)
        threading.Thread(target=self._serve, name="thinwire healing", daemon=True).start()

    # --- what torchft calls

    def metadata(self) -> str:
        """Where this member's state can be had."""
        return json.dumps({"host": self.host, "port": self.listener.getsockname()[1], "token": self.token})

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: object, timeout: timedelta) -> None:
        """Copy the state, for newcomers to fetch while training goes on."""
        snapshot = Snapshot(step, state_dict)
        with self.taken:
            self.snapshot = snapshot
            self.taken.notify_all()

    def disallow_checkpoint(self) -> None:
        """The step has ended: the copy is not needed any more, but by those who are fetching it."""
        with self.taken:
            self.snapshot = None

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> object:
        """A member's state of that step."""
        where = json.loads(metadata)
        fetch = Fetch(where, {"step": step}, self.timeout)
        try:
            return unpack(fetch.read, self.limit())
        finally:
            self.received += fetch.offset
            fetch.close()

    def shutdown(self, wait: bool = True) -> None:
        """Serve no more, but for those who are being served."""
        self.closed = True
        with suppress(OSError):  # it was shut down before
            self.listener.shutdown(socket.SHUT_RDWR)  # close() alone leaves the one thread waiting
        self.listener.close()

    # --- a state that is fetched while training goes on

    def offer(self, step: int, state: Mapping[str, Tensor]) -> None:
        """At the beginning of a step: a copy of the state after so many steps, where somebody wants one."""
        with self.taken:
            if not self.served and time.monotonic() > self.unserved + KEPT:
                self.stream = None
        if self.wanted:
            stream = Stream(step, state)
            with self.taken:
                self.stream, self.wanted = stream, 0
                self.taken.notify_all()

    def finish_serving(self, seconds: float) -> None:
        """Wait until those who are getting a state have it; at most so long."""
        with self.taken:
            self.taken.wait_for(lambda: not self.served, seconds)

    # --- a member

    def _serve(self) -> None:
        while not self.closed:
            try:
                connection, _ = self.listener.accept()
            except OSError:  # closed; or the process has too many files open for now
                time.sleep(FULL)
                continue
            if not self.places.acquire(blocking=False):
                connection.close()
                continue
            try:
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()
            except RuntimeError:  # this process has too many threads for now
                self.places.release()
                connection.close()

    def _answer(self, connection: socket.socket) -> None:
        """One newcomer; whoever does not know the token gets nothing, nor does one whose connection breaks."""
        with connection:
            try:
                request = json.loads(read_line(connection, self.timeout))
                connection.settimeout(self.timeout)
                if not secrets.compare_digest(str(request["token"]), self.token):
                    return
                offset = max(0, int(request["offset"]))
                if "stream" in request:
                    self._send_stream(connection, int(request["stream"]), offset)
                    return
                snapshot = self._of_step(int(request["step"]))
                if snapshot is not None:
                    self.sent += snapshot.send(connection, offset)
            except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
                return
            finally:
                self.places.release()

    def _send_stream(self, connection: socket.socket, step: int, offset: int) -> None:
        """The next copy that is taken, where step is −1; else that of the step."""
        with self.taken:
            before = self.stream
            self.wanted += step < 0
            self.served += 1
            if step < 0:
                self.taken.wait_for(lambda: self.stream is not before, LONGEST)
            stream = self.stream
        try:
            if stream is not None and step in (-1, stream.step):
                self.sent += stream.send(connection, offset)
                with self.taken:
                    if self.served == 1 and self.stream is stream:
                        self.stream = None  # nobody else gets it
        finally:
            with self.taken:
                self.served -= 1
                self.unserved = time.monotonic()
                self.taken.notify_all()

    def _of_step(self, step: int) -> Snapshot | None:
        with self.taken:
            self.taken.wait_for(lambda: self.snapshot is not None and self.snapshot.step == step, self.timeout)
            return self.snapshot if self.snapshot is not None and self.snapshot.step == step else None
