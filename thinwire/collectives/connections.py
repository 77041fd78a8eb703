"""More connections between the members of a group, all of them made at once.

Every Gloo backend has sockets of its own. To make one, each member writes into a store where it listens, and reads
there where the others do: over a long link that takes a dozen latencies, and torch's `new_group` adds an agreement on a
name and a barrier, for one group after another. Here each backend is made by a thread of its own, on a store that is in
this process. What all of them wrote there goes to the other members in one message, over the group that there is.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives.groups import world
from thinwire.collectives.messages import gather
from thinwire.torch_private.groups import timeout_of

Texts = dict[str, str]  # what a store holds: by key, in hexadecimal digits


class Connection(Protocol):
    """What carries messages between two members, by their ranks: a process group, or one of its backends."""

    def send(self, tensors: list[Tensor], to: int, tag: int) -> dist.Work | None:
        """Begin to send."""

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work | None:
        """Begin to receive."""


class Addresses(dist.Store):
    """A store in this process, for one backend that is being made; reading waits until the key is known.

    changed: notified where anything happens; the same for all backends that are made together.
    """

    def __init__(self, changed: threading.Condition) -> None:
        super().__init__()
        self.changed = changed
        self.known: dict[str, bytes] = {}
        self.written: list[str] = []  # keys that the other members have not been told of
        self.wanted: Sequence[str] = ()  # keys that the backend waits for
        self.ended = False  # the backend is made, or has failed
        self.failed: BaseException | None = None
        self.backend: dist.ProcessGroupGloo | None = None

    def set(self, key: str, value: bytes | str) -> None:
        """Called by the backend."""
        with self.changed:
            self.known[key] = value.encode() if isinstance(value, str) else bytes(value)
            self.written.append(key)

    def get(self, key: str) -> bytes:
        """Called by the backend."""
        self.wait([key])
        return self.known[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Called by the backend; how long it may take is up to the members' messages."""
        with self.changed:
            self.wanted = keys
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.failed is not None or not self.lacks())
            if self.failed is not None:
                raise RuntimeError(f"connections to the other ranks were not made: {self.failed}")

    def check(self, keys: Sequence[str]) -> bool:
        """Called by the backend."""
        return all(key in self.known for key in keys)

    def lacks(self) -> bool:
        """Does the backend wait for what is not known?"""
        return not all(key in self.known for key in self.wanted)

    def make(self, rank: int, size: int, timeout: timedelta) -> None:
        """On a thread of its own: the backend."""
        try:
            self.backend = dist.ProcessGroupGloo(self, rank, size, timeout)
        except BaseException as error:
            self.failed = error
        with self.changed:
            self.ended = True
            self.changed.notify_all()

    def news(self) -> Texts:
        """What was written since the last call."""
        keys, self.written = self.written, []
        return {key: self.known[key].hex() for key in keys}


def more_connections(group: dist.ProcessGroup, count: int) -> list[Connection]:
    """So many Gloo backends of the group's members, numbered as in it, each with connections of its own.

    All members call it at the same time. group: it can send tensors on the host.
    """
    size, rank = world(group)
    timeout = timeout_of(group)
    changed = threading.Condition()
    stores = [Addresses(changed) for _ in range(count)]
    for number, store in enumerate(stores):
        name = f"thinwire-connection-{number}"
        threading.Thread(target=store.make, args=(rank, size, timeout), name=name, daemon=True).start()
    try:
        while not _told_each_other(stores, changed, group):
            pass
    except BaseException as error:
        with changed:
            for store in stores:
                store.failed = store.failed or error
            changed.notify_all()
        raise
    return [cast(Connection, store.backend) for store in stores]


def _told_each_other(stores: list[Addresses], changed: threading.Condition, group: dist.ProcessGroup) -> bool:
    """When all backends here wait for others, or are made: tell every member what was written, and learn what they
    wrote. Are all made, on all members?"""
    with changed:
        changed.wait_for(lambda: all(store.ended or store.lacks() for store in stores))
        failed = next((store.failed for store in stores if store.failed is not None), None)
        mine = {
            "news": [store.news() for store in stores],
            "made": all(store.ended for store in stores),
            "failed": "" if failed is None else str(failed),
        }
    everyone = _gather_texts(json.dumps(mine), group)
    for rank, said in enumerate(everyone):
        if said["failed"]:
            raise RuntimeError(f"rank {rank} of the group could not open connections: {said['failed']}")
    with changed:
        for said in everyone:
            for store, news in zip(stores, said["news"], strict=True):
                store.known |= {key: bytes.fromhex(value) for key, value in news.items()}
        changed.notify_all()
    return all(said["made"] for said in everyone)


def _gather_texts(text: str, group: dist.ProcessGroup) -> list[Any]:
    """What every member says, in two rounds: lengths, and texts padded to the longest."""
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    lengths = [int(length) for length in gather(torch.tensor([data.numel()]), group)]
    padded = torch.nn.functional.pad(data, (0, max(lengths) - data.numel()))
    return [json.loads(bytes(x[:n].tolist())) for x, n in zip(gather(padded, group), lengths)]
