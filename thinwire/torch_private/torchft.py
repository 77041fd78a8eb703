"""torchft: which quorum a manager is in, and its Gloo group with an alarm."""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist


def quorum_number(manager: Any) -> int:
    """The number of the manager's quorum; it grows whenever members come or go."""
    return int(manager._quorum_id)


def is_connected(group: Any) -> bool:
    """Has torchft's process group connections? It drops them when one of them breaks."""
    return group._pg is not None


def alarmed_gloo(make: Callable[[dist.Store, int, int], Any], timeout: timedelta) -> Any:
    """torchft's Gloo group, made anew for every quorum, with `alarm`, that of the present one. make: of a store, this
    member's rank and how many there are gives it (thinwire/elastic/alarm.py)."""
    from torchft import ProcessGroupGloo

    class AlarmedGloo(ProcessGroupGloo):
        alarm: Any = None

        def configure(self, store_addr: str, *about: Any, **more: Any) -> None:
            self.leave()
            place, _, port = store_addr.partition("/")[0].rpartition(":")
            # torch calls a store that has died for longer than its time-out; nobody answers, and this says so at once
            socket.create_connection((place.strip("[]"), int(port)), timeout.total_seconds()).close()
            super().configure(store_addr, *about, **more)

        def _create_pg(self, store: dist.Store, rank: int, world_size: int) -> Any:
            self.alarm = make(store, rank, world_size)
            return self.alarm.wait_for(partial(super()._create_pg, store, rank, world_size))

        def shutdown(self) -> None:
            """In a step that cannot count: nobody waits for this member."""
            if self.alarm is not None:
                self.alarm.ring("the connections to the other members were closed in this step")
            self._pg = None

        def leave(self) -> None:
            """After a step that may count for others."""
            if self.alarm is not None:
                self.alarm.leave()
            self._pg = None

    return AlarmedGloo(timeout=timeout)
