"""Bytes of another member's state over as many connections as it takes."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

LONGEST_REQUEST = 4096  # bytes
CHUNK = 1 << 18  # bytes that are sent at a time
CALLING = 10.0  # seconds until a connection is there, at most
ATTEMPTS = 5  # connections in a row that may break without a byte


class Fetch:
    """The bytes, one after the other.

    where: host, port and token of the member. request: what is asked for. timeout: seconds without a byte until a
    connection is given up.
    """

    def __init__(self, where: Mapping[str, Any], request: Mapping[str, int], timeout: float) -> None:
        self.address = str(where["host"]), int(where["port"])
        self.request: dict[str, int | str] = {"token": str(where["token"]), **request}
        self.timeout = timeout
        self.offset = 0
        self.connection: socket.socket | None = None
        self.given_up = False

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
                if broken == ATTEMPTS or self.given_up:
                    raise
                continue
            broken = 0
            have += count
            self.offset += count

    def _connected(self) -> socket.socket:
        if self.connection is None:
            self.connection = socket.create_connection(self.address, min(self.timeout, CALLING))
            self.connection.settimeout(self.timeout)
            if self.given_up:  # meanwhile
                raise ConnectionError("it is not wanted any more")
            self.connection.sendall(json.dumps(self.request | {"offset": self.offset}).encode() + b"\n")
        return self.connection

    def be_patient(self, seconds: float) -> None:
        """From here on a connection is given up after so many seconds without a byte."""
        self.timeout = seconds
        if self.connection is not None:
            self.connection.settimeout(seconds)

    def close(self) -> None:
        """Of the connection."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def give_up(self) -> None:
        """From another thread: `read` ends with an error."""
        self.given_up = True
        connection = self.connection
        if connection is not None:
            with suppress(OSError):  # it was broken already
                connection.shutdown(socket.SHUT_RDWR)


def listen(host: str, backlog: int | None = None) -> socket.socket:
    """At a free port of this address, and at no other address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=backlog)


def in_url(host: str) -> str:
    """An address as it stands before a port: that of IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def send_from(connection: socket.socket, piece: memoryview, offset: int) -> int:
    """The piece's bytes from the offset on: how many."""
    for start in range(offset, piece.nbytes, CHUNK):
        connection.sendall(piece[start : start + CHUNK])
    return max(0, piece.nbytes - offset)


def read_line(connection: socket.socket, seconds: float) -> bytes:
    """A line of at most LONGEST_REQUEST bytes, all of it within so many seconds."""
    found, deadline = b"", time.monotonic() + seconds
    while not found.endswith(b"\n"):
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        byte = connection.recv(1)
        if not byte or len(found) == LONGEST_REQUEST:
            raise ValueError("no request")
        found += byte
    return found
