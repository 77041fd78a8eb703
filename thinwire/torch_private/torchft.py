"""torchft: which quorum a manager is in, and connections of our own in the place of its process group."""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def quorum_number(manager: Any) -> int:
    """The number of the manager's quorum; it grows whenever members come or go."""
    return int(manager._quorum_id)


def connections(make: Callable[[dist.Store, int, int], Any], timeout: timedelta) -> Any:
    """What torchft takes as a process group, and makes anew for every quorum. make: of a store, this member's rank and
    how many there are gives the connections, which have `abort`. torchft drops its Gloo groups without closing their
    connections while anybody holds a message."""
    from torchft import ProcessGroupGloo

    class Connections(ProcessGroupGloo):
        def configure(self, store_addr: str, *about: Any, **more: Any) -> None:
            host, _, port = store_addr.partition("/")[0].rpartition(":")
            # torch calls a store that has died for longer than its time-out; nobody answers, and this says so at once
            socket.create_connection((host.strip("[]"), int(port)), timeout.total_seconds()).close()
            super().configure(store_addr, *about, **more)

        def _create_pg(self, store: dist.Store, rank: int, world_size: int) -> Any:
            return make(store, rank, world_size)

        def shutdown(self) -> None:
            self.abort(errored=False)

    return Connections(timeout=timeout)


def mesh_of(group: Any) -> Any:
    """What `make` gave for the present quorum; None where it was closed."""
    return group._pg
