"""torchft: which quorum a manager is in, and its Gloo group with an alarm."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist


def quorum_number(manager: Any) -> int:
    """The number of the manager's quorum; it grows whenever members come or go."""
    return int(manager._quorum_id)


def is_connected(group: Any) -> bool:
    """Has torchft's process group connections? It drops them when one of them breaks."""
    return group._pg is not None


def store_at(address: str, timeout: timedelta) -> dist.Store:
    """The store at host:port/prefix. It is waited for without end where its process is frozen."""
    from torchft.process_group import create_store_client

    host, _, port = address.partition("/")[0].rpartition(":")
    # torch calls a store that has died for longer than its time-out; nobody answers, and this says so at once
    socket.create_connection((host.strip("[]"), int(port)), timeout.total_seconds()).close()
    return create_store_client(address, timeout)


def gloo_at(host: str, store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """A Gloo group with connections of this address. torchft's has those of the address for which the machine's name
    stands, on many machines a loopback one."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    gloo = dist.ProcessGroupGloo(store, rank, size, options)
    gloo._set_sequence_number_for_group()
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return group


def alarmed_gloo(meet: Callable[[str, int, int], tuple[dist.Store, Any]], host: str, timeout: timedelta) -> Any:
    """torchft's Gloo group, made anew for every quorum, with `alarm`, that of the present one. meet: gives the store
    and the alarm (thinwire/elastic/alarm.py) of a quorum from the store's address, this member's rank and how many
    there are. host: this member's address."""
    from torchft import ProcessGroupGloo

    patience = 2 * timeout.total_seconds()  # for Gloo's connections, which has the time-out for each of them

    class AlarmedGloo(ProcessGroupGloo):
        alarm: Any = None

        def configure(self, store_addr: str, replica_id: str, rank: int, world_size: int, *about: Any) -> None:
            """torchft 0.2.0 calls it for every quorum."""
            self._meet(store_addr, rank, world_size)

        def reconfigure(self, opts: Any) -> Any:
            """torchft after 0.2.0 calls it instead. It gives what is waited for by `wait()`."""
            peers = [json.loads(handle) for handle in opts.handles]
            place = [peer["id"] for peer in peers].index(self._handle_id())
            self._meet(f"{peers[0]['store']}/torchft/{opts.uuid}", place, len(peers))
            return _Done()

        def _meet(self, address: str, rank: int, size: int) -> None:
            self.leave()
            store, self.alarm = meet(address, rank, size)
            self._pg = self.alarm.wait_for(partial(gloo_at, host, store, rank, size, timeout), patience)

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


class _Done:
    """Nothing is waited for any more."""

    def wait(self) -> bool:
        return True
