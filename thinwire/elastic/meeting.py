"""A connection between every two members of a quorum, for its alarm.

A member calls those of lower rank, and is called by the others. The caller greets with the token of the member that it
calls, which the quorum's store has, and with its own rank. Who greets with anything else, or not at all, keeps nobody
waiting.
"""

from __future__ import annotations

import json
import secrets
import selectors
import socket
import time
from contextlib import ExitStack
from datetime import timedelta
from typing import Self

import torch.distributed as dist

from thinwire.elastic.fetching import listen

TOKEN, RANK = 32, 4  # bytes of a greeting
KEEP_ALIVE = 30  # seconds without a byte after which the kernel asks whether the other end is there: routers forget


def connect(store: dist.Store, rank: int, size: int, host: str, deadline: float) -> dict[int, socket.socket]:
    """rank → a connection, which does not block. Arguments as for Alarm; deadline: of time.monotonic().

    RuntimeError or OSError where a member cannot be reached by then; no connection is left.
    """
    if size == 1:
        return {}
    token = secrets.token_hex(TOKEN // 2)
    with listen(host, size) as listener, _Callers(listener, token) as callers, ExitStack() as undo:
        store.set(f"thinwire/{rank}", json.dumps([host, listener.getsockname()[1], token]))
        found = {peer: undo.enter_context(_call(store, peer, rank, deadline)) for peer in range(rank)}
        while len(found) < size - 1:
            caller, connection = callers.next(deadline)
            undo.enter_context(connection)
            if caller <= rank or caller >= size or caller in found:
                raise ConnectionError(f"somebody has called as member {caller} of this quorum")
            found[caller] = connection
        for connection in found.values():
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEP_ALIVE)
        undo.pop_all()
    return found


def _call(store: dist.Store, peer: int, rank: int, deadline: float) -> socket.socket:
    """Connect to a member, and say who calls."""
    store.wait([f"thinwire/{peer}"], timedelta(seconds=_left(deadline)))
    host, port, token = json.loads(store.get(f"thinwire/{peer}"))
    connection = socket.create_connection((host, port), _left(deadline))
    connection.sendall(token.encode() + rank.to_bytes(RANK, "big"))
    return connection


class _Callers:
    """Who has called, and has not said all of a greeting. listener: where they call. token: what they have to say."""

    def __init__(self, listener: socket.socket, token: str) -> None:
        self.listener, self.token = listener, token
        self.said: dict[socket.socket, bytes] = {}
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *about: object) -> None:
        self.selector.close()
        for caller in self.said:
            caller.close()

    def next(self, deadline: float) -> tuple[int, socket.socket]:
        """The next one who knows the token: rank and connection. TimeoutError where nobody has come by then."""
        while time.monotonic() < deadline:
            for key, _ in self.selector.select(_left(deadline)):
                caller = key.fileobj
                assert isinstance(caller, socket.socket)
                if caller is self.listener:
                    self._accept()
                elif (rank := self._hear(caller)) is not None:
                    return rank, caller
        raise TimeoutError("not all members of this quorum have connected")

    def _accept(self) -> None:
        caller, _ = self.listener.accept()
        caller.setblocking(False)
        self.said[caller] = b""
        self.selector.register(caller, selectors.EVENT_READ)

    def _hear(self, caller: socket.socket) -> int | None:
        """Its rank, when it has said all of a right greeting. After a wrong one it is closed."""
        try:
            more = caller.recv(TOKEN + RANK - len(self.said[caller]))
        except BlockingIOError:  # there was nothing after all
            return None
        except OSError:
            more = b""
        said = self.said[caller] = self.said[caller] + more
        if more and len(said) < TOKEN + RANK:
            return None
        self.selector.unregister(caller)
        del self.said[caller]
        if len(said) == TOKEN + RANK and secrets.compare_digest(said[:TOKEN], self.token.encode()):
            return int.from_bytes(said[TOKEN:], "big")
        caller.close()
        return None


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())
