"""A connection to one other member: messages in both directions, all of which end at once where it breaks.

Gloo does not do that. When a connection breaks it tells those whose message has not begun to arrive, and not the one
whose message is arriving or leaving, which waits for its time-out (pair.cc: `signalException` passes over what is in
`rx_` and `tx_`). On a slow link a member that dies nearly always dies in the middle of a message.

A message is a header and its bytes. It is read when it comes, whether it was asked for or not, so that nobody has to
say first that he expects it.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from torch import Tensor

HEADER = struct.Struct("<QQ")  # tag, bytes
CHUNK = 1 << 18  # bytes that are read or written at a time, where a message has no place yet or the buffer is full
AT_ONCE = struct.pack("ii", 1, 0)  # SO_LINGER: what has not left is dropped


class Receipt:
    """A message under way. `wait` is as torch's Work has it.

    line: that it takes. tensor: where it comes from or goes to. held: its bytes on the host. leaves: it is sent.
    """

    def __init__(self, line: Line, tensor: Tensor, held: Tensor, leaves: bool) -> None:
        self.line = line
        self.tensor = tensor
        self.held = held
        self.view: memoryview = held.numpy().data
        self.leaves = leaves
        self.done = False

    def wait(self) -> bool:
        """Until the message is here, or has left. RuntimeError where the connection is broken before, or nothing was
        heard for the time-out."""
        self.line.wait(self)
        if not self.leaves and self.held.data_ptr() != self.tensor.data_ptr():
            self.tensor.copy_(self.held.view(self.tensor.dtype).view(self.tensor.shape))
        return True


class Line:
    """connection: to the member, which it owns. name: of the member, for errors. timeout: seconds without a byte after
    which a wait ends."""

    def __init__(self, connection: socket.socket, name: str, timeout: float) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self.name = name
        self.timeout = timeout
        self.changed = threading.Condition()
        self.expected: dict[int, deque[Receipt]] = {}  # by tag
        self.arrived: dict[int, deque[bytes]] = {}  # what came before it was expected
        self.leaving: deque[tuple[Receipt, memoryview]] = deque()  # what is left of each; the first is being written
        self.error = ""
        self.heard = self.said = time.monotonic()
        self.threads = 2
        for work in (self._read, self._write):
            threading.Thread(target=self._until_broken, args=(work,), name=f"thinwire {name}", daemon=True).start()

    def send(self, receipt: Receipt, tag: int) -> None:
        """As much as goes at once, the rest by the thread that writes."""
        message = HEADER.pack(tag, receipt.view.nbytes)
        with self.changed:
            self._check()
            sent = 0
            if not self.leaving:
                try:
                    sent = self.connection.sendmsg([message, receipt.view], [], socket.MSG_DONTWAIT)
                except BlockingIOError:
                    pass
                except OSError as error:
                    raise RuntimeError(f"{self.name} cannot be reached: {error}") from None
                self.said = time.monotonic()
            if sent < len(message):
                self.leaving.append((receipt, memoryview(message + receipt.view)[sent:]))
            elif sent - len(message) < receipt.view.nbytes:
                self.leaving.append((receipt, receipt.view[sent - len(message) :]))
            else:
                receipt.done = True
            self.changed.notify_all()

    def receive(self, receipt: Receipt, tag: int) -> None:
        """Into the receipt's bytes, in the order in which messages of a tag were sent."""
        with self.changed:
            waiting = self.arrived.get(tag)
            if waiting:
                self._fit(receipt, waiting[0])
                waiting.popleft()
                return
            self._check()
            self.expected.setdefault(tag, deque()).append(receipt)

    def wait(self, receipt: Receipt) -> None:
        """As Receipt.wait."""
        began = time.monotonic()
        with self.changed:
            while not receipt.done:
                self._check()
                last = max(began, self.said if receipt.leaves else self.heard)
                left = last + self.timeout - time.monotonic()
                if left <= 0:
                    break
                self.changed.wait(left)
        if not receipt.done:
            self.end(f"nothing was heard of {self.name} for {self.timeout:g} s")
            self._check()

    def end(self, reason: str, lets_finish: bool = False) -> None:
        """Break the connection; the other end notices at once. reason: for those who wait here. lets_finish: what has
        left this process still arrives."""
        with self.changed:
            if not self.error:
                self.error = reason
                with suppress(OSError):  # the other end was first
                    if not lets_finish:
                        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
                    self.connection.shutdown(socket.SHUT_RDWR)
            self.changed.notify_all()

    def _check(self) -> None:
        if self.error:
            raise RuntimeError(self.error)

    # --- on threads of their own

    def _until_broken(self, work: Callable[[], None]) -> None:
        try:
            work()
        except (OSError, RuntimeError) as error:
            self.end(f"the connection to {self.name} broke: {error}")
        with self.changed:  # the second one closes: a number that the first still reads from may be another file's then
            self.threads -= 1
            if self.threads == 0:
                self.connection.close()

    def _read(self) -> None:
        header = bytearray(HEADER.size)
        while True:
            self._fill(memoryview(header))
            tag, nbytes = HEADER.unpack(header)
            with self.changed:
                expected = self.expected.get(tag)
                receipt = expected.popleft() if expected else None
            if receipt is not None and receipt.view.nbytes == nbytes:
                self._fill(receipt.view)
                with self.changed:
                    receipt.done = True
                    self.changed.notify_all()
                continue
            content = self._collect(nbytes)
            with self.changed:
                expected = self.expected.get(tag)
                receipt = receipt or (expected.popleft() if expected else None)
                if receipt is None:
                    self.arrived.setdefault(tag, deque()).append(content)
                else:
                    self._fit(receipt, content)

    def _fit(self, receipt: Receipt, content: bytes) -> None:
        """Take a message that has come."""
        if len(content) != receipt.view.nbytes:
            raise RuntimeError(f"{receipt.view.nbytes} bytes of {self.name} were expected, and {len(content)} came")
        receipt.view[:] = content
        receipt.done = True
        self.changed.notify_all()

    def _collect(self, nbytes: int) -> bytes:
        """So many bytes, for which there is no place yet. Memory is taken as they come."""
        parts = []
        while nbytes:
            parts.append(bytearray(min(nbytes, CHUNK)))
            self._fill(memoryview(parts[-1]))
            nbytes -= len(parts[-1])
        return b"".join(parts)

    def _fill(self, view: memoryview) -> None:
        have = 0
        while have < view.nbytes:
            count = self.connection.recv_into(view[have:])
            if count == 0:
                raise ConnectionError("it was closed at the other end")
            self.heard = time.monotonic()
            have += count

    def _write(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: bool(self.leaving or self.error))
                self._check()
                receipt, rest = self.leaving[0]
            while rest.nbytes:
                rest = rest[self.connection.send(rest[:CHUNK]) :]
                self.said = time.monotonic()
            with self.changed:
                self.leaving.popleft()
                receipt.done = True
                self.changed.notify_all()
