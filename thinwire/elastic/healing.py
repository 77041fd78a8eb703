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
from collections.abc import Callable
from datetime import timedelta

from thinwire.elastic.packing import pack, unpack

LONGEST_REQUEST = 4096  # bytes
CHUNK = 1 << 18  # bytes that are sent at a time
ATTEMPTS = 5  # connections in a row that may break without a byte


class Snapshot:
    """A member's state of one step, as it is sent."""

    def __init__(self, step: int, state: object) -> None:
        self.step = step
        self.pieces = pack(state)
        self.nbytes = sum(piece.nbytes for piece in self.pieces)

    def send(self, connection: socket.socket, offset: int) -> None:
        """All bytes from the offset on."""
        for piece in self.pieces:
            if offset < piece.nbytes:
                for start in range(offset, piece.nbytes, CHUNK):
                    connection.sendall(piece[start : start + CHUNK])
                offset = 0
            else:
                offset -= piece.nbytes


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
        self.taken = threading.Condition()  # a snapshot was taken
        self.sent = 0  # bytes
        self.received = 0
        self.listener = socket.create_server((host, 0))
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
        fetch = _Fetch((str(where["host"]), int(where["port"])), str(where["token"]), step, self.timeout)
        try:
            return unpack(fetch.read, self.limit())
        finally:
            self.received += fetch.offset
            fetch.close()

    def shutdown(self, wait: bool = True) -> None:
        """Serve no more."""
        self.listener.close()

    # --- a member

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        """One newcomer; whoever does not know the token gets nothing, nor does one whose connection breaks."""
        with connection:
            connection.settimeout(self.timeout)
            try:
                request = json.loads(read_line(connection))
                if not secrets.compare_digest(str(request["token"]), self.token):
                    return
                snapshot = self._of_step(int(request["step"]))
                if snapshot is not None:
                    snapshot.send(connection, int(request["offset"]))
                    self.sent += snapshot.nbytes - int(request["offset"])
            except (OSError, ValueError, KeyError, TypeError):
                return

    def _of_step(self, step: int) -> Snapshot | None:
        with self.taken:
            self.taken.wait_for(lambda: self.snapshot is not None and self.snapshot.step == step, self.timeout)
            return self.snapshot if self.snapshot is not None and self.snapshot.step == step else None


class _Fetch:
    """The bytes of a state, one after the other, over as many connections as it takes."""

    def __init__(self, address: tuple[str, int], token: str, step: int, timeout: float) -> None:
        self.address = address
        self.request = {"token": token, "step": step}
        self.timeout = timeout
        self.offset = 0
        self.connection: socket.socket | None = None

    def read(self, into: memoryview) -> None:
        """Fill it. OSError where the member is gone."""
        have, broken = 0, 0
        while have < into.nbytes:
            try:
                count = self._connected().recv_into(into[have:], min(CHUNK, into.nbytes - have))
                if count == 0:
                    raise ConnectionError("the member has closed the connection")
            except OSError:
                broken += 1
                self.close()
                if broken == ATTEMPTS:
                    raise
                continue
            broken = 0
            have += count
            self.offset += count

    def _connected(self) -> socket.socket:
        if self.connection is None:
            self.connection = socket.create_connection(self.address, self.timeout)
            self.connection.sendall(json.dumps(self.request | {"offset": self.offset}).encode() + b"\n")
        return self.connection

    def close(self) -> None:
        """Of the connection."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None


def read_line(connection: socket.socket) -> bytes:
    """A line of at most LONGEST_REQUEST bytes."""
    found = b""
    while not found.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte or len(found) == LONGEST_REQUEST:
            raise ValueError("no request")
        found += byte
    return found
