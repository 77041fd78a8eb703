"""A state that is sent while both ends train on: a copy of one step, packed part by part as it leaves.

    {"step": s, "parts": n} | n times {name: tensor}, each packed for itself

The copy is taken at the beginning of a step, when somebody has asked for it.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping

from torch import Tensor

from thinwire.elastic.fetching import Fetch, send_from
from thinwire.elastic.packing import pack, unpack
from thinwire.errors import UsageError

log = logging.getLogger("thinwire")

LONGEST = 600.0  # seconds for which a newcomer waits for the next step of the member that it has asked
STALLED = 30.0  # seconds without a byte of a state after which its connection is made anew
ENDING = 1.0  # seconds within which a connection that was shut down ends its thread
CANNOT = "thinwire: a newcomer cannot be sent the state: %s"
WHILE_PACKING = 0.01  # seconds between two looks whether the next part is packed


class Stream:
    """A member's state after `step` steps. Tensors are copied here, and packed by a thread of its own."""

    def __init__(self, step: int, state: Mapping[str, Tensor]) -> None:
        self.step = step
        self.copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}
        self.pieces = pack({"step": step, "parts": len(self.copies)})
        self.packed = threading.Event()
        try:
            threading.Thread(target=self._pack, name="thinwire packing", daemon=True).start()
        except RuntimeError as error:  # this process has too many threads: as where packing fails
            log.warning(CANNOT, error)
            self.packed.set()

    def _pack(self) -> None:
        try:
            for name in list(self.copies):
                self.pieces += pack({name: self.copies.pop(name)})
        except (UsageError, MemoryError) as error:  # the stream ends too early, and the newcomer asks another member
            log.warning(CANNOT, error)
        finally:
            self.packed.set()

    def send(self, connection: socket.socket, offset: int) -> int:
        """All bytes from the offset on: how many."""
        number = sent = 0
        while not self.packed.is_set() or number < len(self.pieces):
            if number == len(self.pieces):
                time.sleep(WHILE_PACKING)
                continue
            piece = self.pieces[number]
            sent += send_from(connection, piece, offset)
            offset = max(0, offset - piece.nbytes)
            number += 1
        return sent


class Fetching:
    """The state of another member, on its way: `done` when it is here, with `step` and `state`; or `failed`.

    metadata: of the member, as its `Healing.metadata` says. limit: bytes that a tensor may have. parts: tensors that
    there may be.
    """

    def __init__(self, metadata: str, limit: int, parts: int) -> None:
        self.metadata = metadata
        self.limit, self.parts = limit, parts
        self.step = -1
        self.state: dict[str, Tensor] = {}
        self.failed = ""
        self.done = False
        self.fetch = Fetch(json.loads(metadata), {"stream": -1}, LONGEST)
        self.thread = threading.Thread(target=self._run, name="thinwire state", daemon=True)
        self.thread.start()

    @property
    def received(self) -> int:
        """Bytes so far."""
        return self.fetch.offset

    def _run(self) -> None:
        try:
            about = _table(self.fetch.read, self.limit)
            self.step = int(str(about["step"]))
            self.fetch.request["stream"] = self.step
            self.fetch.be_patient(STALLED)
            parts = int(str(about["parts"]))
            if parts > self.parts:
                raise ValueError(f"{parts} tensors are announced, and at most {self.parts} are expected")
            for _ in range(parts):
                for name, value in _table(self.fetch.read, self.limit).items():
                    assert isinstance(value, Tensor)
                    self.state[str(name)] = value
            self.done = True
        except Exception as error:  # whatever it is: nobody else would say that the state does not come
            self.failed = str(error) or type(error).__name__
        finally:
            self.fetch.close()

    def close(self) -> None:
        """It is not wanted any more."""
        self.fetch.give_up()
        self.thread.join(ENDING)


def _table(read: Callable[[memoryview], None], limit: int) -> dict[object, object]:
    found = unpack(read, limit)
    if not isinstance(found, dict):
        raise ValueError("no part of a state")
    return found
